"""Hybrid attention on a worker that holds no tokens of the sequences that it shares with other workers.

The output and the gradients of such a worker are empty, but the worker must take part in the exchanges: otherwise the
other workers would wait for it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lln_fairseq.ops.backends import HybridSpec
from lln_fairseq.ops.dtypes import compute_dtype


def forward(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, mask: Tensor | None, spec: HybridSpec
) -> tuple[Tensor, Tensor, Tensor, Sequence[Tensor]]:
    """Exchange sums of zero and return an empty output; see `Backend.forward`.

    Args:
        q, k, v: (B, H, 0, D).
        alpha, beta: (B, H).
        mask: not used.
        spec: the settings of the call, with an exchange.

    Returns: an empty tensor like q, alpha, beta, and an empty sequence of tensors to save.
    """
    assert spec.exchange is not None
    dim = q.shape[-1]
    spec.exchange.merge_states(_zeros(q, dim), _zeros(q, dim), _zeros(q, dim, dim))
    return torch.empty_like(q), alpha, beta, ()


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor,
    mask: Tensor | None,
    spec: HybridSpec,
    saved: Sequence[Tensor],
    grad: Tensor,
    needed: Sequence[bool],
) -> Sequence[Tensor | None]:
    """Exchange gradients of zero; see `Backend.backward`.

    Returns: empty gradients of q, k and v (B, H, 0, D), then the gradients of α, β and the offset: zeros (B, H), or
        None if the gradient is not needed.
    """
    assert spec.exchange is not None
    dim = q.shape[-1]
    spec.exchange.sum(_zeros(q, dim, dim), _zeros(q, dim))
    gradients: list[Tensor | None] = [torch.empty_like(x) for x in (q, k, v)]
    for is_needed in needed:
        gradients.append(torch.zeros_like(alpha) if is_needed else None)
    return gradients


def _zeros(q: Tensor, *shape: int) -> Tensor:
    """Return zeros (B·H, *shape) in the compute dtype of q, the value of every sum over no tokens."""
    return torch.zeros(q.shape[0] * q.shape[1], *shape, dtype=compute_dtype(q.dtype), device=q.device)
