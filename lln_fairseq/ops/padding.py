"""Padding may hold anything, NaN and inf too: what keeps it out of the results and gradients of the real tokens.

The keys and values of padding are 0 in every sum. A padded query is answered like any other, its output belongs to
nobody; only numbers that no computation would survive are taken as 0 in it. Selected, not multiplied: 0 · NaN is NaN.
"""

import torch
from torch import Tensor

# Numbers of a padded query from here on count as 0: all of float16 that can be told from inf, and α q and q·k stay
# finite. csrc/problem.h and the Triton kernels have the same limit.
PADDED_QUERY_LIMIT = 3e4


def written_out(key_padding_mask: Tensor | None, q: Tensor) -> Tensor:
    """Return the mask (B, N) of queries q (B, H, N, D), all False for None."""
    if key_padding_mask is not None:
        return key_padding_mask
    return torch.zeros(q.shape[0], q.shape[2], dtype=torch.bool, device=q.device)


def clear_padding(q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (B, H, N, D) with padding that can be computed with; no gradient flows to what is set to 0."""
    if key_padding_mask is None:
        return q, k, v
    padded = key_padding_mask[:, None, :, None]
    return clear_queries(q, padded), k.masked_fill(padded, 0.0), v.masked_fill(padded, 0.0)


def clear_queries(q: Tensor, padded: Tensor) -> Tensor:
    """q with 0 for the numbers of padded tokens that are not finite or too large; padded: bool, broadcasts to q."""
    return q.masked_fill(padded & ~(q.abs() < PADDED_QUERY_LIMIT), 0.0)
