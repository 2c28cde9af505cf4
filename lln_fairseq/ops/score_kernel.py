"""Attention by a kernel of the score q·k other than the exponential: quadratic in N, for comparison and analysis."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lln_fairseq.ops.dtypes import compute_dtype, without_autocast


@without_autocast
def score_kernel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel: Callable[[Tensor], Tensor],
    key_padding_mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """out_i = Σ_j κ(q_i·k_j) v_j / Σ_l κ(q_i·k_l) (arXiv 2311.13541, eq. 1 with another κ), computed in float32.

    A row without a single positive κ is the mean of the real values: the limit of κ + ε for ε -> 0.

    Args:
        q, k, v: (B, H, N, D); key_padding_mask: bool (B, N), True = padded.
        kernel: κ, elementwise and non-negative, on scores (B, H, N, N).
        dropout_p: probability of dropping a weight.

    Returns: (B, H, N, D) in the dtype of v; a sequence without a real key gives 0.
    """
    dtype = compute_dtype(v.dtype)
    weights, values = kernel(q.to(dtype) @ k.to(dtype).mT), v.to(dtype)
    count: int | Tensor = v.shape[-2]
    if key_padding_mask is not None:
        weights = weights.masked_fill(key_padding_mask[:, None, None, :], 0.0)
        values = values.masked_fill(key_padding_mask[:, None, :, None], 0.0)
        count = (~key_padding_mask).sum(dim=1).clamp(min=1)[:, None, None, None]
    total = weights.sum(dim=-1, keepdim=True)
    empty = total == 0
    out = F.dropout(weights, dropout_p) @ values / total.masked_fill(empty, 1.0)
    return torch.where(empty, values.sum(dim=-2, keepdim=True) / count, out).to(v.dtype)
