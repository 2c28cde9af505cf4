"""Linformer: softmax attention to learned projections of the keys and values (Wang et al. 2020, arXiv 2006.04768)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lln_fairseq.attention.context import NO_CONTEXT, Context
from lln_fairseq.attention.registry import Attention, option, register_attention
from lln_fairseq.ops.formula import clear_padding, softmax_attention


@dataclass
class LinformerConfig:
    projected_length: int = option(256, "projected keys of a sequence; at most the longest sequence", at_least=1)


@register_attention("linformer", LinformerConfig)
class LinformerAttention(Attention):
    """Compute softmax(q (E k)ᵀ / √D) F v with learned matrices E and F, each (M, max_positions) (eq. 7 of the paper).

    M is `projected_length`, or max_positions if that is smaller. Column j of E and F belongs to token j. So a model
    cannot process sequences longer than max_positions, and columns beyond the longest training sequence stay untrained.
    Padded keys and values count as 0. Attention dropout applies to the weights of the projected keys.

    E and F are initialized from N(0, 1/M), the random projections of Theorem 1. All heads of a layer share them, which
    the paper calls headwise sharing. Every layer has its own.

    Raises (in `forward`):
        ValueError: if a sequence is longer than max_positions.
    """

    config: LinformerConfig
    rows_sum_to_one = False  # F is an arbitrary matrix

    def __init__(
        self, config: LinformerConfig, num_heads: int, head_dim: int, max_positions: int, dropout: float
    ) -> None:
        super().__init__(config, num_heads, head_dim, max_positions, dropout)
        projected_length = min(config.projected_length, max_positions)
        shape = (1, projected_length, max_positions)  # checkpoints contain the leading 1
        self.key_projection = nn.Parameter(torch.randn(shape) * projected_length**-0.5)  # E
        self.value_projection = nn.Parameter(torch.randn(shape) * projected_length**-0.5)  # F

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        length = q.shape[2]
        if length > self.max_positions:
            raise ValueError(f"linformer was built for {self.max_positions} tokens, got {length}")
        q, k, v = clear_padding(q, k, v, context.padding)
        projected_k = _project(self.key_projection[0, :, :length], k)
        projected_v = _project(self.value_projection[0, :, :length], v)
        return softmax_attention(q, projected_k, projected_v, dropout_p=self.active_dropout)


def _project(weights: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("kn,bhnd->bhkd", weights.to(x.dtype), x)
