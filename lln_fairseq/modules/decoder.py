"""fairseq's decoder-only transformer with causal LLN attention in every layer."""

from typing import Any

from fairseq.distributed import fsdp_wrap
from fairseq.models.transformer import TransformerConfig, TransformerDecoder
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from torch import Tensor, nn

from lln_fairseq.modules.causal_self_attention import CausalSelfAttention


class LLNDecoderLayer(TransformerDecoderLayerBase):
    """fairseq's decoder layer with causal LLN attention.

    Args:
        cfg: fairseq's configuration of the decoder.
        options: the keyword arguments alpha, beta and constants of `CausalSelfAttention`. They are passed separately
            because TransformerConfig drops keys that it does not know.
    """

    def __init__(self, cfg: TransformerConfig, options: dict[str, Any]) -> None:
        self.attention_options = options  # super().__init__ calls build_self_attention, which reads it
        super().__init__(cfg, no_encoder_attn=True)

    def build_self_attention(self, embed_dim: int, cfg: TransformerConfig, **unused: Any) -> CausalSelfAttention:
        """Build the attention. fairseq calls this hook."""
        return CausalSelfAttention(
            embed_dim,
            cfg.decoder.attention_heads,
            q_noise=self.quant_noise,
            qn_block_size=self.quant_noise_block_size,
            **self.attention_options,
        )


class LLNDecoder(TransformerDecoder):
    """fairseq's decoder, built from `LLNDecoderLayer`.

    Args:
        args: the options of the model.
        dictionary: the dictionary of the task.
        embed_tokens: the token embedding.
        options: the keyword arguments alpha, beta and constants of `CausalSelfAttention`.
    """

    def __init__(self, args: Any, dictionary: Any, embed_tokens: nn.Module, options: dict[str, Any]) -> None:
        self.attention_options = options  # super().__init__ calls build_decoder_layer, which reads it
        super().__init__(args, dictionary, embed_tokens, no_encoder_attn=True)

    def build_decoder_layer(self, args: Any, no_encoder_attn: bool = True) -> nn.Module:
        """Build a layer, wrapped for activation checkpointing and FSDP. fairseq calls this hook."""
        cfg = TransformerConfig.from_namespace(args)
        layer = LLNDecoderLayer(cfg, self.attention_options)
        # The rest is copied from fairseq's build_decoder_layer.
        if cfg.checkpoint_activations:
            layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
        min_num_params = 0 if cfg.checkpoint_activations else cfg.min_params_to_wrap
        return fsdp_wrap(layer, min_num_params=min_num_params)

    def buffered_future_mask(self, tensor: Tensor) -> Tensor:
        """Return a tensor (0,) in place of the N x N mask that hides later tokens. fairseq calls this hook.

        `CausalSelfAttention` does not read the mask, and building it would need quadratic memory.
        """
        return tensor.new_empty(0)
