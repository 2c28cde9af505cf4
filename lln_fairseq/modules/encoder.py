"""fairseq's encoder stack with our attention in every layer: three small overrides of its build_* hooks."""

from typing import Any

import torch
import torch.nn.functional as F
from fairseq.distributed import fsdp_wrap
from fairseq.models.roberta.model import RobertaEncoder
from fairseq.models.transformer import TransformerConfig, TransformerEncoder
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase
from fairseq.modules.transformer_sentence_encoder import init_bert_params
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lln_fairseq.attention import LAYER_REGISTRY, Attention, build_layer, require_attention
from lln_fairseq.modules.multihead_attention import LLNMultiheadAttention
from lln_fairseq.modules.token_shards import Shard


class LLNEncoderLayer(TransformerEncoderLayerBase):
    """fairseq's encoder layer; the attention and its options are given, since TransformerConfig drops such keys.

    With `feed_forward_tokens` the feed-forward part takes so many tokens at a time, and computes each part again in the
    backward pass: of its inner activations, most of what a layer keeps, there is then only one part.
    """

    def __init__(
        self, cfg: TransformerConfig, attention: str, options: dict[str, Any], feed_forward_tokens: int = 0
    ) -> None:
        self.attention_name, self.attention_options = attention, options  # the hook below runs inside super().__init__
        self.feed_forward_tokens = feed_forward_tokens
        super().__init__(cfg)
        self.can_use_fastpath = False  # fairseq 0.12.2 would otherwise go round custom attention in evaluation

    def forward(self, x: Tensor, encoder_padding_mask: Tensor | None, attn_mask: Tensor | None = None) -> Tensor:
        """x (T, B, C), mask (B, T) with True = padded -> (T, B, C)."""
        if not self.feed_forward_tokens:
            return super().forward(x, encoder_padding_mask, attn_mask)
        parts = x.split(max(self.feed_forward_tokens // max(x.shape[1], 1), 1))
        if len(parts) == 1:
            return super().forward(x, encoder_padding_mask, attn_mask)
        attended = self.self_attn_layer_norm(x) if self.normalize_before else x
        attended, _ = self.self_attn(attended, attended, attended, encoder_padding_mask, False, attn_mask)
        x = x + self.dropout_module(attended)
        if not self.normalize_before:
            x = self.self_attn_layer_norm(x)
        parts = x.split(parts[0].shape[0])
        return torch.cat([checkpoint(self._feed_forward, part, use_reentrant=False) for part in parts])

    def _feed_forward(self, x: Tensor) -> Tensor:
        """The second half of fairseq's forward, of some tokens."""
        inner = self.final_layer_norm(x) if self.normalize_before else x
        inner = self.activation_dropout_module(self.activation_fn(self.fc1(inner)))
        x = x + self.dropout_module(self.fc2(inner))
        return x if self.normalize_before else self.final_layer_norm(x)

    def build_self_attention(self, embed_dim: int, cfg: TransformerConfig) -> LLNMultiheadAttention:
        return LLNMultiheadAttention(
            embed_dim,
            cfg.encoder.attention_heads,
            attention=self.attention_name,
            options=self.attention_options,
            max_positions=cfg.max_source_positions,
            dropout=cfg.attention_dropout,
            q_noise=self.quant_noise,
            qn_block_size=self.quant_noise_block_size,
        )


class LLNTransformerEncoder(TransformerEncoder):
    layer_norm: nn.Module | None  # after the last layer; made by TransformerEncoder

    def __init__(
        self, args: Any, dictionary: Any, embed_tokens: nn.Embedding, attention: str, options: dict[str, Any]
    ) -> None:
        self.attention_name = attention
        self.attention_options = options
        self.feed_forward_tokens = args.feed_forward_tokens
        self.shard: Shard | None = None
        super().__init__(args, dictionary, embed_tokens)
        if attention in LAYER_REGISTRY and self.layer_norm is None:  # its units have their norms in front
            self.layer_norm = nn.LayerNorm(embed_tokens.embedding_dim)
        attentions = self._attentions()
        for layer, module in enumerate(attentions):
            module.place(layer, len(attentions))

    def _attentions(self) -> list[Attention]:
        return [module for module in self.modules() if isinstance(module, Attention)]

    def share(self, shard: Shard | None) -> None:
        """Says what part of their sequences the next tokens are; None: the whole. It holds for the backward pass too,
        where layers may be computed again."""
        self.shard = shard
        for module in self._attentions():
            module.group = None if shard is None else shard.group

    def forward_embedding(self, src_tokens: Tensor, token_embedding: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """fairseq's, but for the positions: it counts them from the first token that it sees."""
        if self.shard is None:
            return super().forward_embedding(src_tokens, token_embedding)
        table = self.embed_positions
        x = embed = self.embed_scale * self.embed_tokens(src_tokens)
        if table is not None:
            x = embed + F.embedding(self.shard.positions, table.weight, table.padding_idx)
        if self.layernorm_embedding is not None:
            x = self.layernorm_embedding(x)
        x = self.dropout_module(x)
        return x if self.quant_noise is None else self.quant_noise(x), embed

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        out = super().forward(*args, **kwargs)
        # fairseq's NanDetector hooks every module and wants a tensor among the values of a dictionary; these are lists,
        # and the search for the origin of a NaN would end in a bare StopIteration.
        return {**out, "features": out["encoder_out"][0]}

    def build_encoder_layer(self, cfg: Any) -> nn.Module:
        """Raises: ValueError for options that what replaces a layer does not have."""
        cfg = TransformerConfig.from_namespace(cfg)
        if self.attention_name in LAYER_REGISTRY:
            layer = self._replacement(cfg)
        else:
            layer = LLNEncoderLayer(cfg, self.attention_name, self.attention_options, self.feed_forward_tokens)
        # From here on as in fairseq's own build_encoder_layer.
        if cfg.checkpoint_activations:
            layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
        return fsdp_wrap(layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap)

    def _replacement(self, cfg: TransformerConfig) -> nn.Module:
        refused = {"feed_forward_tokens": self.feed_forward_tokens, "quant_noise_pq": cfg.quant_noise.pq}
        for option in [option for option, value in refused.items() if value]:
            require_attention(self.attention_name, f"does not know {option}")
        return build_layer(
            self.attention_name,
            dim=cfg.encoder.embed_dim,
            dropout=cfg.dropout,
            attention_dropout=cfg.attention_dropout,
            activation_dropout=cfg.activation_dropout,
            **self.attention_options,
        )


class LLNRobertaEncoder(RobertaEncoder):
    def __init__(self, args: Any, dictionary: Any, attention: str, options: dict[str, Any]) -> None:
        self.attention_name, self.attention_options = attention, options
        if attention in LAYER_REGISTRY:
            args.no_token_positional_embeddings = not LAYER_REGISTRY[attention].cls.positions
        super().__init__(args, dictionary)
        for name, module in self.named_modules():
            if name.endswith(("layer_norm", "layernorm_embedding")) and ".attention." not in name:  # a mechanism's own
                module.eps = args.layer_norm_eps

    def forward(self, *args: Any, shard: Shard | None = None, **kwargs: Any) -> tuple[Tensor, dict[str, Any]]:
        """fairseq's; with a shard for tokens that are a part of their sequences."""
        if shard is not self.sentence_encoder.shard:
            self.sentence_encoder.share(shard)
        return super().forward(*args, **kwargs)

    def build_encoder(self, args: Any, dictionary: Any, embed_tokens: nn.Embedding) -> LLNTransformerEncoder:
        encoder = LLNTransformerEncoder(args, dictionary, embed_tokens, self.attention_name, self.attention_options)
        encoder.apply(init_bert_params)
        return encoder
