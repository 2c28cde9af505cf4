"""Padding may hold any values, also NaN and inf. These functions keep them out of the results and gradients.

Padded keys and values are 0 in every sum. A padded query is computed like any other, and nobody reads its output; only
its values that would make a computation overflow become 0. Values are selected, not multiplied, because 0 · NaN is NaN.
"""

import torch
from torch import Tensor

# Values of a padded query from this size on count as 0. This is about half of float16's largest number, and keeps α q
# and q·k finite. csrc/problem.h and the Triton kernels have the same limit.
PADDED_QUERY_LIMIT = 3e4


def explicit_mask(key_padding_mask: Tensor | None, q: Tensor) -> Tensor:
    """Return the mask, bool (B, N), or for None one that is False everywhere. q: (B, H, N, D)."""
    if key_padding_mask is not None:
        return key_padding_mask
    return torch.zeros(q.shape[0], q.shape[2], dtype=torch.bool, device=q.device)


def clear_padding(q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v (B, H, N, D) with padding that can be computed with.

    Padded keys and values are 0, and padded queries are those of `clear_queries`. No gradient flows to values that were
    set to 0. The inputs are not changed; with mask None they are the result. Mask: bool (B, N), True = padded.
    """
    if key_padding_mask is None:
        return q, k, v
    padded = key_padding_mask[:, None, :, None]
    return clear_queries(q, padded), k.masked_fill(padded, 0.0), v.masked_fill(padded, 0.0)


def clear_queries(q: Tensor, padded: Tensor) -> Tensor:
    """Return q with 0 for those values of padded tokens that are NaN or at least PADDED_QUERY_LIMIT in modulus.

    `padded` is bool and broadcasts to q, which may have any shape.
    """
    return q.masked_fill(padded & ~(q.abs() < PADDED_QUERY_LIMIT), 0.0)
