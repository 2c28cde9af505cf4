"""fairseq's encoder layer with a pluggable attention mechanism."""

from typing import Any

import torch
import torch.nn.functional as F
from fairseq.models.transformer import TransformerConfig
from fairseq.modules.gelu import gelu
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lln_fairseq.attention import NO_CONTEXT, Context
from lln_fairseq.models.multihead_attention import LLNMultiheadAttention
from lln_fairseq.models.packed_linear.layer import PackedLinear
from lln_fairseq.ops.rotary import BASE


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
        rotary_base: the base of its frequencies.
    """

    def __init__(
        self,
        cfg: TransformerConfig,
        attention: str,
        options: dict[str, Any],
        feed_forward_tokens: int = 0,
        rotary: bool = False,
        rotary_base: float = BASE,
    ) -> None:
        self.mechanism = (attention, options, rotary, rotary_base)
        super().__init__(cfg)
        self.feed_forward_tokens = feed_forward_tokens

    def build_self_attention(self, embed_dim: int, cfg: TransformerConfig) -> LLNMultiheadAttention:
        """Build the attention. fairseq's constructor calls this hook, at its place in the order of random numbers."""
        attention, options, rotary, rotary_base = self.mechanism
        return LLNMultiheadAttention(
            embed_dim,
            cfg.encoder.attention_heads,
            attention=attention,
            options=options,
            max_positions=cfg.max_source_positions,
            dropout=cfg.attention_dropout,
            q_noise=self.quant_noise,
            qn_block_size=self.quant_noise_block_size,
            rotary=rotary,
            rotary_base=rotary_base,
        )

    def forward(self, x: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        """Apply the layer to x (T, B, C), and return the same shape."""
        attended = self.self_attn_layer_norm(x) if self.normalize_before else x
        attended = self.self_attn(attended, context)
        x = x + self.dropout_module(attended)
        if not self.normalize_before:
            x = self.self_attn_layer_norm(x)
        if self.feed_forward_tokens:
            pieces = x.split(max(self.feed_forward_tokens // max(x.shape[1], 1), 1))
            if len(pieces) > 1:
                return torch.cat([checkpoint(self._feed_forward, piece, use_reentrant=False) for piece in pieces])
        return self._feed_forward(x)

    def _feed_forward(self, x: Tensor) -> Tensor:
        """Apply the feed-forward part with its residual connection and layer norm to some tokens (T, B, C)."""
        inner = self.final_layer_norm(x) if self.normalize_before else x
        if self.activation_fn is not gelu:
            inner = self.activation_fn(self.fc1(inner))
        elif isinstance(self.fc1, PackedLinear) and not self.training:
            inner = self.fc1(inner, gelu=True)
        else:
            # fairseq's gelu converts to float32 and back. torch's kernel does so inside, with the same results.
            inner = F.gelu(self.fc1(inner))
        inner = self.activation_dropout_module(inner)
        x = x + self.dropout_module(self.fc2(inner))
        if self.normalize_before:
            return x
        return self.final_layer_norm(x)
