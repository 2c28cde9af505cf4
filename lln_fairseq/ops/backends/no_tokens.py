"""The part of a worker that has none of the tokens of a sequence: it only takes part in the exchange."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lln_fairseq.ops.backends import HybridSpec
from lln_fairseq.ops.dtypes import compute_dtype


def forward(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, mask: Tensor | None, mix: HybridSpec
) -> tuple[Tensor, Tensor, Tensor, Sequence[Tensor]]:
    """As the backends' for q, k, v (B, H, 0, D)."""
    assert mix.exchange is not None
    vector, square = _zeros(q)
    mix.exchange.merge_states(vector, vector, square)
    return torch.empty_like(q), alpha, beta, ()


def backward(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, mask: Tensor | None, mix: HybridSpec,
    saved: Sequence[Tensor], grad: Tensor, needed: Sequence[bool],
) -> Sequence[Tensor | None]:  # fmt: skip
    assert mix.exchange is not None
    vector, square = _zeros(q)
    mix.exchange.sum(square, vector)
    scalars = (torch.zeros_like(alpha) if need else None for need in needed)
    return *(torch.empty_like(x) for x in (q, k, v)), *scalars


def _zeros(q: Tensor) -> tuple[Tensor, Tensor]:
    """A sum of vectors and one of matrices over no token."""
    (batch, heads, _, dim), dtype = q.shape, compute_dtype(q.dtype)
    vector = torch.zeros(batch * heads, dim, dtype=dtype, device=q.device)
    return vector, torch.zeros(batch * heads, dim, dim, dtype=dtype, device=q.device)
