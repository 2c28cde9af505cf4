"""fairseq's encoder with a pluggable attention mechanism, and softmax in the layers that an option names.

The classes override fairseq's build_* hooks, support sequences that are spread over several workers, and can compute
the feed-forward part in pieces.
"""

from typing import Any

import torch
import torch.nn.functional as F
from fairseq.distributed import fsdp_wrap
from fairseq.models.roberta.model import RobertaEncoder
from fairseq.models.transformer import TransformerConfig, TransformerEncoder
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.gelu import gelu
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase
from fairseq.modules.transformer_sentence_encoder import init_bert_params
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lln_fairseq.attention import LAYER_REGISTRY, Attention, build_layer, reject_layer_mechanism
from lln_fairseq.attention.segments import first_segment_lengths
from lln_fairseq.models.multihead_attention import LLNMultiheadAttention
from lln_fairseq.models.packed_linear import PackedLinear
from lln_fairseq.models.token_shards import Shard

SOFTMAX = "softmax"  # the registered name of the attention of softmax_layers


def parse_softmax_layers(text: str | None, layers: int, attention: str) -> tuple[int, ...]:
    """Return the layers that the option softmax_layers names, in increasing order.

    Args:
        text: numbers of layers, counted from 0 and separated by commas; empty or None for no layer.
        layers: number of layers of the encoder.
        attention: the registered name of the mechanism of the other layers.

    Raises:
        ValueError: if a number is missing or not one of a layer, or the mechanism replaces whole layers.
    """
    if not text:
        return ()
    reject_layer_mechanism(attention, "does not support softmax_layers")
    numbers = set()
    for number in text.split(","):
        if not number.strip().isdecimal() or int(number) >= layers:
            raise ValueError(
                f"softmax_layers must be numbers from 0 to {layers - 1}, separated by commas, got '{text}'"
            )
        numbers.add(int(number))
    return tuple(sorted(numbers))


class LLNEncoderLayer(TransformerEncoderLayerBase):
    """fairseq's encoder layer with a pluggable attention.

    Args:
        cfg: fairseq's configuration of the encoder.
        attention: the registered name of the attention.
        options: the options of the attention. They are passed separately because TransformerConfig drops keys that it
            does not know.
        feed_forward_tokens: compute the feed-forward part for about this many tokens at a time, and again in the
            backward pass. Only one piece of its inner activations, which are most of a layer's memory, then exists at
            any time. 0: compute it for all tokens at once.
        rotary: apply the rotary position embedding to queries and keys.
    """

    def __init__(
        self,
        cfg: TransformerConfig,
        attention: str,
        options: dict[str, Any],
        feed_forward_tokens: int = 0,
        rotary: bool = False,
    ) -> None:
        # super().__init__ calls build_self_attention, which reads these.
        self.attention_name = attention
        self.attention_options = options
        self.feed_forward_tokens = feed_forward_tokens
        self.rotary = rotary
        super().__init__(cfg)
        # In evaluation fairseq 0.12.2 would otherwise use PyTorch's fused layer in place of the attention.
        self.can_use_fastpath = False

    def forward(
        self,
        x: Tensor,
        encoder_padding_mask: Tensor | None,
        attn_mask: Tensor | None = None,
        segment_lengths: Tensor | None = None,
    ) -> Tensor:
        """Apply the layer to x (T, B, C), and return the same shape.

        Args:
            x: (T, B, C).
            encoder_padding_mask: (B, T), True or nonzero = padded, or None.
            attn_mask: must be None.
            segment_lengths: the attention's `segment_lengths` for this call, (B,); None leaves it unchanged. See
                `pass_segment_lengths`.
        """
        if segment_lengths is not None:
            self.self_attn.attention.segment_lengths = segment_lengths
        positions_per_piece = x.shape[0]
        if self.feed_forward_tokens:
            batch_size = max(x.shape[1], 1)
            positions_per_piece = max(self.feed_forward_tokens // batch_size, 1)
        is_split = x.shape[0] > positions_per_piece
        is_packed = isinstance(self.fc1, PackedLinear) and not self.training
        if not (is_split or is_packed):
            return super().forward(x, encoder_padding_mask, attn_mask)
        # The rest is fairseq's forward with the feed-forward part in pieces, or with the activation inside fc1.
        attended = self.self_attn_layer_norm(x) if self.normalize_before else x
        attended, _ = self.self_attn(attended, attended, attended, encoder_padding_mask, False, attn_mask)
        x = x + self.dropout_module(attended)
        if not self.normalize_before:
            x = self.self_attn_layer_norm(x)
        if not is_split:
            return self._feed_forward(x)
        pieces = x.split(positions_per_piece)
        return torch.cat([checkpoint(self._feed_forward, piece, use_reentrant=False) for piece in pieces])

    def _feed_forward(self, x: Tensor) -> Tensor:
        """Apply the feed-forward part with its residual connection and layer norm to some tokens (T, B, C)."""
        inner = self.final_layer_norm(x) if self.normalize_before else x
        if isinstance(self.fc1, PackedLinear) and self.activation_fn is gelu:
            inner = self.fc1(inner, gelu=True)
        else:
            inner = self.activation_fn(self.fc1(inner))
        inner = self.activation_dropout_module(inner)
        x = x + self.dropout_module(self.fc2(inner))
        if self.normalize_before:
            return x
        return self.final_layer_norm(x)

    def build_self_attention(self, embed_dim: int, cfg: TransformerConfig) -> LLNMultiheadAttention:
        """Build the attention. fairseq calls this hook."""
        return LLNMultiheadAttention(
            embed_dim,
            cfg.encoder.attention_heads,
            attention=self.attention_name,
            options=self.attention_options,
            max_positions=cfg.max_source_positions,
            dropout=cfg.attention_dropout,
            q_noise=self.quant_noise,
            qn_block_size=self.quant_noise_block_size,
            rotary=self.rotary,
        )


def pass_segment_lengths(
    layer: LLNEncoderLayer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Add the segment lengths of the attention to the arguments of the layer; a forward pre-hook.

    Activation checkpointing calls the layer with these arguments again in the backward pass. By then, another forward
    pass, such as that of the second tower, can have replaced the lengths in the attention.
    """
    attention = layer.self_attn.attention
    if attention.needs_segments:
        kwargs = {**kwargs, "segment_lengths": attention.segment_lengths}
    return args, kwargs


class LLNTransformerEncoder(TransformerEncoder):
    """fairseq's transformer encoder with a pluggable mechanism in every layer.

    The layers that the option `softmax_layers` names have softmax attention instead. If the mechanism replaces whole
    layers, the encoder always has a layer norm after the last one.

    Args:
        args: fairseq's options of the model, plus `feed_forward_tokens`, `softmax_layers` and `rotary`.
        dictionary: the dictionary of the input tokens.
        embed_tokens: the embedding of the tokens.
        attention: the registered name of the mechanism.
        options: the options of the mechanism.

    Raises:
        ValueError: if the mechanism cannot be built, if `softmax_layers` names a layer that does not exist, or if the
            mechanism replaces whole layers and `args` contains options that only RoBERTa's own layers support.
    """

    layer_norm: nn.Module | None  # after the last layer; created by TransformerEncoder

    def __init__(
        self, args: Any, dictionary: Any, embed_tokens: nn.Embedding, attention: str, options: dict[str, Any]
    ) -> None:
        # super().__init__ calls build_encoder_layer, which reads these.
        self.attention_name = attention
        self.attention_options = options
        self.rotary = args.rotary
        self.feed_forward_tokens = args.feed_forward_tokens
        self.softmax_layers = parse_softmax_layers(args.softmax_layers, args.encoder_layers, attention)
        self.layers_built = 0
        self.shard: Shard | None = None
        super().__init__(args, dictionary, embed_tokens)
        if attention in LAYER_REGISTRY and self.layer_norm is None:
            # These layers normalize only their inputs, so the output of the last one still needs a norm.
            self.layer_norm = nn.LayerNorm(embed_tokens.embedding_dim)
        attentions = self._attentions()
        for layer, module in enumerate(attentions):
            module.set_depth(layer, len(attentions))

    def _attentions(self) -> list[Attention]:
        """Return the attentions of all layers, from the first layer to the last."""
        return [module for module in self.modules() if isinstance(module, Attention)]

    def set_shard(self, shard: Shard | None) -> None:
        """Set the shard of the tokens in the next forward passes. None: the tokens are whole sequences.

        The shard is kept for the backward pass, in which layers can be recomputed.
        """
        self.shard = shard
        group = None
        positions = None
        if shard is not None:
            group = shard.group
            positions = shard.positions - (self.padding_idx + 1)  # position 0 has this row in the table
        for module in self.modules():
            if isinstance(module, Attention):
                module.group = group
            elif isinstance(module, LLNMultiheadAttention):
                module.positions = positions

    def forward_embedding(self, src_tokens: Tensor, token_embedding: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Embed tokens and positions, as fairseq does, but with the positions of the shard if there is one.

        fairseq would count positions from the first token of the shard.

        Args:
            src_tokens: token ids (B, T).
            token_embedding: (B, T, C) or None. It is ignored if there is a shard.

        Returns:
            The input of the first layer and the scaled token embeddings, each (B, T, C).
        """
        if self.shard is None:
            return super().forward_embedding(src_tokens, token_embedding)
        embed = self.embed_scale * self.embed_tokens(src_tokens)
        x = embed
        table = self.embed_positions
        if table is not None:
            x = embed + F.embedding(self.shard.positions, table.weight, table.padding_idx)
        if self.layernorm_embedding is not None:
            x = self.layernorm_embedding(x)
        x = self.dropout_module(x)
        if self.quant_noise is not None:
            x = self.quant_noise(x)
        return x, embed

    def forward(
        self, src_tokens: Tensor, *args: Any, segment_lengths: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Return fairseq's dictionary, with the output of the last layer under the additional key `features`.

        The other arguments are those of fairseq's encoder.

        Args:
            src_tokens: token ids (B, T).
            segment_lengths: the lengths of the first segments (B,), for attentions that need them. None: those that
                src_tokens show, which are too short for a sequence that was cut inside its first segment.

        fairseq's NanDetector looks for a tensor among the values of every module's result. fairseq's dictionary has
        only lists, so without this tensor the detector would fail with a StopIteration that has no message.
        """
        self._set_segment_lengths(src_tokens, segment_lengths)
        out = super().forward(src_tokens, *args, **kwargs)
        return {**out, "features": out["encoder_out"][0]}

    def _set_segment_lengths(self, tokens: Tensor, lengths: Tensor | None) -> None:
        """Give the lengths (B,), or else those of tokens (B, T), to the attentions that need first segments."""
        attentions = [module for module in self._attentions() if module.needs_segments]
        if not attentions:
            return
        if lengths is None:
            lengths = first_segment_lengths(tokens, self.dictionary.eos())
        for module in attentions:
            module.segment_lengths = lengths

    def build_encoder_layer(self, cfg: Any) -> nn.Module:
        """Build a layer, wrapped for activation checkpointing and FSDP. fairseq calls this hook."""
        cfg = TransformerConfig.from_namespace(cfg)
        is_softmax = self.layers_built in self.softmax_layers
        self.layers_built += 1
        if self.attention_name in LAYER_REGISTRY:
            layer = self._build_replacement_layer(cfg)
        elif is_softmax:
            layer = LLNEncoderLayer(cfg, SOFTMAX, {}, self.feed_forward_tokens, self.rotary)
        else:
            options = self.attention_options
            layer = LLNEncoderLayer(cfg, self.attention_name, options, self.feed_forward_tokens, self.rotary)
        # The rest is copied from fairseq's build_encoder_layer.
        if cfg.checkpoint_activations:
            layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
            if isinstance(layer, LLNEncoderLayer):
                layer.register_forward_pre_hook(pass_segment_lengths, with_kwargs=True)
        min_num_params = 0 if cfg.checkpoint_activations else cfg.min_params_to_wrap
        return fsdp_wrap(layer, min_num_params=min_num_params)

    def _build_replacement_layer(self, cfg: TransformerConfig) -> nn.Module:
        """Build a mechanism that replaces a layer. Raise ValueError for options that it does not support."""
        if self.feed_forward_tokens:
            reject_layer_mechanism(self.attention_name, "does not support feed_forward_tokens")
        if cfg.quant_noise.pq:
            reject_layer_mechanism(self.attention_name, "does not support quant_noise_pq")
        if self.rotary:
            reject_layer_mechanism(self.attention_name, "does not support rotary")
        return build_layer(
            self.attention_name,
            dim=cfg.encoder.embed_dim,
            dropout=cfg.dropout,
            attention_dropout=cfg.attention_dropout,
            activation_dropout=cfg.activation_dropout,
            **self.attention_options,
        )


class LLNRobertaEncoder(RobertaEncoder):
    """fairseq's RoBERTa encoder with a pluggable mechanism, and with layer_norm_eps in its layer norms.

    `args` are those of `LLNTransformerEncoder`, plus `layer_norm_eps`. A mechanism that replaces a layer sets
    `args.no_token_positional_embeddings` in place and uses layer_norm_eps in its own norms; other mechanisms keep the
    ε of their norms.
    """

    def __init__(self, args: Any, dictionary: Any, attention: str, options: dict[str, Any]) -> None:
        # super().__init__ calls build_encoder, which reads these.
        self.attention_name = attention
        self.attention_options = options
        if attention in LAYER_REGISTRY:
            args.no_token_positional_embeddings = not LAYER_REGISTRY[attention].cls.positions
        super().__init__(args, dictionary)
        for name, module in self.named_modules():
            # LLNMultiheadAttention keeps the mechanism in `attention`. Norms of the mechanism keep their own ε.
            belongs_to_mechanism = ".attention." in name
            if name.endswith(("layer_norm", "layernorm_embedding")) and not belongs_to_mechanism:
                module.eps = args.layer_norm_eps

    def forward(
        self,
        src_tokens: Tensor,
        features_only: bool = False,
        return_all_hiddens: bool = False,
        masked_tokens: Tensor | None = None,
        shard: Shard | None = None,
        segment_lengths: Tensor | None = None,
        **unused: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Apply fairseq's encoder to the tokens of a shard, or to whole sequences if `shard` is None.

        `segment_lengths` is as for `LLNTransformerEncoder`.
        """
        if shard is not self.sentence_encoder.shard:
            self.sentence_encoder.set_shard(shard)
        # The rest is fairseq's forward, which has no way to pass the segment lengths.
        out = self.sentence_encoder(src_tokens, return_all_hiddens=return_all_hiddens, segment_lengths=segment_lengths)
        x = out["encoder_out"][0].transpose(0, 1)
        if not features_only:
            x = self.output_layer(x, masked_tokens=masked_tokens)
        inner_states = out["encoder_states"] if return_all_hiddens else None
        return x, {"inner_states": inner_states}

    def build_encoder(self, args: Any, dictionary: Any, embed_tokens: nn.Embedding) -> LLNTransformerEncoder:
        """Build the transformer encoder with BERT's initial values. fairseq calls this hook."""
        encoder = LLNTransformerEncoder(args, dictionary, embed_tokens, self.attention_name, self.attention_options)
        encoder.apply(init_bert_params)
        return encoder
