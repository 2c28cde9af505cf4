"""fairseq's decoder stack without an encoder, with causal LLN attention in every layer."""

from typing import Any

from fairseq.distributed import fsdp_wrap
from fairseq.models.transformer import TransformerConfig, TransformerDecoder
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from torch import Tensor, nn

from lln_fairseq.modules.causal_self_attention import CausalSelfAttention


class LLNDecoderLayer(TransformerDecoderLayerBase):
    """fairseq's decoder layer; the options of the attention are given, since TransformerConfig drops such keys."""

    def __init__(self, cfg: TransformerConfig, options: dict[str, Any]) -> None:
        self.attention_options = options  # the hook below runs inside super().__init__
        super().__init__(cfg, no_encoder_attn=True)

    def build_self_attention(self, embed_dim: int, cfg: TransformerConfig, **unused: Any) -> CausalSelfAttention:
        return CausalSelfAttention(
            embed_dim,
            cfg.decoder.attention_heads,
            q_noise=self.quant_noise,
            qn_block_size=self.quant_noise_block_size,
            **self.attention_options,
        )


class LLNDecoder(TransformerDecoder):
    def __init__(self, args: Any, dictionary: Any, embed_tokens: nn.Module, options: dict[str, Any]) -> None:
        self.attention_options = options
        super().__init__(args, dictionary, embed_tokens, no_encoder_attn=True)

    def build_decoder_layer(self, args: Any, no_encoder_attn: bool = True) -> nn.Module:
        cfg = TransformerConfig.from_namespace(args)
        layer = LLNDecoderLayer(cfg, self.attention_options)
        # From here on as in fairseq's own build_decoder_layer.
        if cfg.checkpoint_activations:
            layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
        return fsdp_wrap(layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap)

    def buffered_future_mask(self, tensor: Tensor) -> Tensor:
        """A sign that later tokens are hidden; the N x N mask of fairseq would be quadratic memory for nothing."""
        return tensor.new_empty(0)
