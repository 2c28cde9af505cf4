"""Padding can hold any values, including NaN and inf. These functions keep them out of the results and gradients.

Padded keys and values count as 0 in every sum. Padded queries are computed like the others, but their output is
meaningless; only values that could overflow are replaced by 0. Values are replaced, not multiplied, as 0 · NaN is NaN.
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
    """Return q, k, v (B, H, N, D) with finite padding.

    Padded keys and values are 0, and padded queries go through `clear_queries`. No gradient flows to values that were
    set to 0. The inputs are not modified; without a mask they are returned as they are. A mask is bool (B, N).
    """
    if key_padding_mask is None:
        return q, k, v
    padded = key_padding_mask[:, None, :, None]
    return clear_queries(q, padded), k.masked_fill(padded, 0.0), v.masked_fill(padded, 0.0)


def clear_queries(q: Tensor, padded: Tensor) -> Tensor:
    """Return q with 0 in place of the values of padded tokens that are NaN or at least PADDED_QUERY_LIMIT in modulus.

    `padded` is bool and broadcasts to q, which may have any shape.
    """
    return q.masked_fill(padded & ~(q.abs() < PADDED_QUERY_LIMIT), 0.0)
