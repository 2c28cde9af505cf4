"""Softmax attention, the baseline: torch's fused kernel, the same numbers as fairseq's own RoBERTa."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from lln_fairseq.attention.registry import Attention, register_attention
from lln_fairseq.ops import reference


@dataclass
class SoftmaxConfig:
    """No options."""


@register_attention("softmax", SoftmaxConfig)
class SoftmaxAttention(Attention):
    """softmax(q kᵀ / √D) v (Vaswani et al. 2017); a sequence without a real key gives 0."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        if key_padding_mask is None:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=self.active_dropout)
        # A sequence that is all padding keeps all its keys here: its softmax would otherwise be 0/0.
        empty = key_padding_mask.all(dim=1)
        allowed = ~key_padding_mask | empty[:, None]
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=allowed[:, None, None, :], dropout_p=self.active_dropout
        )
        return out.masked_fill(empty[:, None, None, None], 0.0)

    def attention_matrix(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        return reference.softmax_matrix(q, k, key_padding_mask)
