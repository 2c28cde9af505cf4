"""fairseq's encoder with a pluggable attention mechanism, and softmax in the layers that an option names.

The encoder has its own loop over the layers. It passes one `Context` to every layer, with what belongs to the call:
padding and first segments.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from fairseq.distributed import fsdp_wrap
from fairseq.models.roberta.model import RobertaEncoder
from fairseq.models.transformer import TransformerConfig, TransformerEncoderBase
from fairseq.modules.transformer_sentence_encoder import init_bert_params
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lln_fairseq.attention import LAYER_REGISTRY, Attention, Context, build_layer, reject_layer_mechanism
from lln_fairseq.attention.context import read_batch
from lln_fairseq.models.layer import LLNEncoderLayer
from lln_fairseq.models.options import attention_options, parse_softmax_layers
from lln_fairseq.text.pairs import BERT_PAIRS, first_segment_lengths, second_text

SOFTMAX = "softmax"  # the registered name of the attention of softmax_layers


class LLNTransformerEncoder(TransformerEncoderBase):
    """fairseq's transformer encoder with a pluggable mechanism in every layer, and its own loop over the layers.

    The layers that the option `softmax_layers` names have softmax attention instead. If the mechanism replaces whole
    layers, the encoder always has a layer norm after the last one.

    Args:
        args: fairseq's options of the model, plus `attention`, the options of that mechanism, `feed_forward_tokens`,
            `softmax_layers`, `rotary`, `rotary_base` and `pair_form`.
        dictionary: the dictionary of the input tokens.
        embed_tokens: the embedding of the tokens.

    Raises:
        ValueError: if the mechanism cannot be built, if `softmax_layers` names a layer that does not exist, or if the
            mechanism replaces whole layers and `args` contains options that only RoBERTa's own layers support.
    """

    layer_norm: nn.Module | None  # after the last layer; created by fairseq
    second_text_embedding: nn.Parameter | None  # (C,), added to the tokens of the second text in BERT's form of pairs

    def __init__(self, args: Any, dictionary: Any, embed_tokens: nn.Embedding) -> None:
        attention = args.attention
        options = attention_options(attention, args)
        cfg = TransformerConfig.from_namespace(args)
        layers = cfg.encoder.layers
        softmax_layers = parse_softmax_layers(args.softmax_layers, layers)
        if softmax_layers:
            reject_layer_mechanism(attention, "does not support softmax_layers")
        cfg.encoder.layers = 0  # fairseq's constructor would build all layers alike
        super().__init__(cfg, dictionary, embed_tokens)
        cfg.encoder.layers = layers
        self.pair_form = args.pair_form
        self.second_text_embedding = None
        if self.pair_form == BERT_PAIRS:
            self.second_text_embedding = nn.Parameter(torch.zeros(embed_tokens.embedding_dim))
        self.softmax_layers = softmax_layers
        for number in range(layers):
            if number in softmax_layers:
                layer = self.build_layer(args, cfg, SOFTMAX, {})
            else:
                layer = self.build_layer(args, cfg, attention, options)
            self.layers.append(layer)
        self.num_layers = layers
        if attention in LAYER_REGISTRY and self.layer_norm is None:
            # These layers normalize only their inputs, so the output of the last one still needs a norm.
            self.layer_norm = nn.LayerNorm(embed_tokens.embedding_dim)
        attentions = [module for module in self.modules() if isinstance(module, Attention)]
        for number, module in enumerate(attentions):
            module.set_depth(number, len(attentions))

    def build_layer(self, args: Any, cfg: TransformerConfig, attention: str, options: dict[str, Any]) -> nn.Module:
        """Build a layer, wrapped for activation checkpointing and then for FSDP, in the order of fairseq."""
        layer: nn.Module
        if attention in LAYER_REGISTRY:
            layer = _build_replacement_layer(args, cfg, attention, options)
        else:
            layer = LLNEncoderLayer(cfg, attention, options, args.feed_forward_tokens, args.rotary, args.rotary_base)
        min_num_params = cfg.min_params_to_wrap
        if cfg.checkpoint_activations:
            # fairseq's checkpoint_wrapper recomputes without autocast, and fails in DDP with find_unused_parameters.
            vars(layer)["forward"] = functools.partial(_recompute, layer.forward, cfg.offload_activations)
            min_num_params = 0
        return fsdp_wrap(layer, min_num_params=min_num_params)

    def forward(
        self,
        src_tokens: Tensor,
        return_all_hiddens: bool = False,
        first_lengths: Tensor | None = None,
    ) -> dict[str, Any]:
        """Return fairseq's dictionary, with the output of the encoder (T, B, C) under the additional key `features`.

        `features` is the same tensor as encoder_out[0]. It is the output of the last layer after the encoder's final
        layer norm, if there is one. encoder_states has the input of the first layer and the outputs of all layers, all
        before that norm and (T, B, C); it is empty without `return_all_hiddens`. fairseq's NanDetector looks for a
        tensor among the values of every module's result. fairseq's dictionary has only lists, so without `features` the
        detector would fail with a StopIteration that has no message.

        Args:
            src_tokens: token ids (B, T).
            return_all_hiddens: fill encoder_states.
            first_lengths: the lengths of the first segments, int64 (B,). None: those that src_tokens show, which are
                too short for a sequence that was cut inside its first segment.
        """
        padding = src_tokens.eq(self.padding_idx)
        x, embedding = self._embed(src_tokens)
        if first_lengths is None:
            first_lengths = first_segment_lengths(src_tokens, self.dictionary.eos(), self.pair_form, self.padding_idx)
        has_padding, max_first_length = read_batch(padding, first_lengths)
        if has_padding:
            x = x * (1 - padding.unsqueeze(-1).type_as(x))
        context = Context(padding if has_padding else None, first_lengths, max_first_length)
        x = x.transpose(0, 1)
        states = [x]
        for layer in self.layers:
            x = layer(x, context)
            if return_all_hiddens:
                states.append(x)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        return {
            "encoder_out": [x],
            "encoder_padding_mask": [padding],
            "encoder_embedding": [embedding],
            "encoder_states": states if return_all_hiddens else [],
            "features": x,
        }

    def _embed(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of the first layer and the embeddings without positions, both (B, T, C), for tokens (B, T).

        fairseq has no embedding of the second text.
        """
        embedding = self.embed_scale * self.embed_tokens(tokens)
        x = embedding
        if self.embed_positions is not None:
            x = x + self.embed_positions(tokens)
        if self.second_text_embedding is not None:
            is_second = second_text(tokens, self.dictionary.eos(), self.padding_idx)
            x = x + is_second[:, :, None] * self.second_text_embedding
        if self.layernorm_embedding is not None:
            x = self.layernorm_embedding(x)
        x = self.dropout_module(x)
        if self.quant_noise is not None:
            x = self.quant_noise(x)
        return x, embedding


def _recompute(forward: Callable[..., Tensor], offload: bool, x: Tensor, *args: Any) -> Tensor:
    """Compute forward(x, *args), and compute it again in the backward pass. With `offload`, x is kept on the CPU."""
    if not torch.is_grad_enabled():
        return forward(x, *args)
    device = x.device

    def compute(kept: Tensor, on_device: Tensor) -> Tensor:
        return forward(kept.to(device, non_blocking=True), *args)

    kept = x.to("cpu", non_blocking=True) if offload else x
    # The empty tensor is there because torch restores the random numbers of the devices that the tensors are on.
    return checkpoint(compute, kept, x.new_empty(0), use_reentrant=False)


def _build_replacement_layer(args: Any, cfg: TransformerConfig, attention: str, options: dict[str, Any]) -> nn.Module:
    """Build a mechanism that replaces a layer. Raise ValueError for options that it does not support."""
    if args.feed_forward_tokens:
        reject_layer_mechanism(attention, "does not support feed_forward_tokens")
    if cfg.quant_noise.pq:
        reject_layer_mechanism(attention, "does not support quant_noise_pq")
    if args.rotary:
        reject_layer_mechanism(attention, "does not support rotary")
    return build_layer(
        attention,
        dim=cfg.encoder.embed_dim,
        dropout=cfg.dropout,
        attention_dropout=cfg.attention_dropout,
        activation_dropout=cfg.activation_dropout,
        **options,
    )


class LLNRobertaEncoder(RobertaEncoder):
    """fairseq's RoBERTa encoder with a pluggable mechanism, and with layer_norm_eps in its layer norms.

    `args` are those of `LLNTransformerEncoder`, plus `layer_norm_eps`. A mechanism that replaces a layer sets
    `args.no_token_positional_embeddings` in place and uses layer_norm_eps in its own norms; other mechanisms keep the
    ε of their norms.
    """

    def __init__(self, args: Any, dictionary: Any) -> None:
        if args.attention in LAYER_REGISTRY:
            args.no_token_positional_embeddings = not LAYER_REGISTRY[args.attention].cls.positions
        super().__init__(args, dictionary)
        for name, module in self.named_modules():
            # LLNMultiheadAttention keeps the mechanism in `attention`. Norms of the mechanism keep their own ε.
            belongs_to_mechanism = ".attention." in name
            if name.endswith(("layer_norm", "layernorm_embedding")) and not belongs_to_mechanism:
                module.eps = args.layer_norm_eps

    def build_encoder(self, args: Any, dictionary: Any, embed_tokens: nn.Embedding) -> LLNTransformerEncoder:
        """Build the transformer encoder with BERT's initial values. fairseq's constructor calls this hook."""
        encoder = LLNTransformerEncoder(args, dictionary, embed_tokens)
        encoder.apply(init_bert_params)
        return encoder

    def forward(
        self,
        src_tokens: Tensor,
        features_only: bool = False,
        return_all_hiddens: bool = False,
        masked_tokens: Tensor | None = None,
        first_lengths: Tensor | None = None,
        **unused: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return features (B, T, C) or logits of the vocabulary, and a dictionary with the entry `inner_states`.

        The logits are (B, T, V), or (masked tokens, V) if `masked_tokens`, bool (B, T), selects some. inner_states are
        the `encoder_states` of `LLNTransformerEncoder.forward`, or None without `return_all_hiddens`. `first_lengths`
        is explained there, and all further arguments are ignored.
        """
        out = self.sentence_encoder(src_tokens, return_all_hiddens, first_lengths)
        x = out["features"].transpose(0, 1)
        if not features_only:
            x = self.output_layer(x, masked_tokens=masked_tokens)
        inner_states = out["encoder_states"] if return_all_hiddens else None
        return x, {"inner_states": inner_states}
