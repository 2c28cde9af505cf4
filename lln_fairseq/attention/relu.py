"""Kernel attention with κ = ReLU, of quadratic cost: one of the kernels of Figure 2 of arXiv 2311.13541."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lln_fairseq.attention.registry import Attention, register_attention
from lln_fairseq.ops import reference
from lln_fairseq.ops.dtypes import compute_dtype, without_autocast
from lln_fairseq.ops.padding import clear_padding


class ScoreKernelAttention(Attention):
    """P_ij = κ(q_i·k_j) / Σ_l κ(q_i·k_l), written out: N x N, for comparison and analysis.

    κ here is homogeneous, so that P depends neither on the scale of q and k nor on a temperature. A row without a
    single positive κ is the mean of the real values: the limit of κ + ε for ε -> 0. Computed in float32.
    """

    @without_autocast
    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        q, k, v = clear_padding(q, k, v, key_padding_mask)
        dtype = compute_dtype(v.dtype)
        weights, values = self.kernel(q.to(dtype) @ k.to(dtype).mT), v.to(dtype)
        count: int | Tensor = v.shape[-2]
        if key_padding_mask is not None:
            weights = weights.masked_fill(key_padding_mask[:, None, None, :], 0.0)
            count = (~key_padding_mask).sum(dim=1).clamp(min=1)[:, None, None, None]
        total = weights.sum(dim=-1, keepdim=True)
        empty = total == 0
        out = F.dropout(weights, self.active_dropout) @ values / total.masked_fill(empty, 1.0)
        return torch.where(empty, values.sum(dim=-2, keepdim=True) / count, out).to(v.dtype)

    def attention_matrix(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        return reference.normalize_rows(self.kernel(q @ k.transpose(-2, -1)), key_padding_mask)

    @staticmethod
    def kernel(scores: Tensor) -> Tensor:
        """κ, elementwise and non-negative."""
        raise NotImplementedError


@register_attention("relu")
class ReluAttention(ScoreKernelAttention):
    """κ(s) = max(s, 0); a query without a positive score attends to all tokens alike."""

    @staticmethod
    def kernel(scores: Tensor) -> Tensor:
        return scores.relu()
