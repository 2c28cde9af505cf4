"""Functions that keep the values at padding positions out of results and gradients, even if they are NaN or infinite.

Keys and values at padding positions are replaced by 0. Queries at padding positions have an output without meaning, but
it is computed like any other, so only their values that could overflow are replaced by 0. The values are replaced and
not multiplied by 0, because 0 · NaN is NaN.
"""

import torch
from torch import Tensor

# Values of a padding query with at least this magnitude are replaced by 0. The limit is about half of float16's largest
# number, and keeps α q and q·k finite. csrc/problem.h and the Triton kernels have the same limit.
PADDED_QUERY_LIMIT = 3e4


def explicit_mask(padding: Tensor | None, q: Tensor) -> Tensor:
    """Return the mask itself, or a mask (B, N) that is False everywhere if it is None.

    Args:
        padding: bool (B, N), True = padded, or None.
        q: (B, H, N, D). The new mask has its sizes B and N and its device.
    """
    if padding is not None:
        return padding
    return torch.zeros(q.shape[0], q.shape[2], dtype=torch.bool, device=q.device)


def clear_padding(q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v with finite values at the padding positions.

    Keys and values at padding positions become 0, and queries at padding positions are treated by `clear_queries`. No
    gradient flows to a value that was replaced.

    Args:
        q, k, v: (B, H, N, D). They are not changed.
        padding: bool (B, N), True = padded, or None.

    Returns: new tensors, or the tensors q, k and v themselves if the mask is None.
    """
    if padding is None:
        return q, k, v
    padded = padding[:, None, :, None]
    return clear_queries(q, padded), k.masked_fill(padded, 0.0), v.masked_fill(padded, 0.0)


def clear_queries(q: Tensor, padded: Tensor) -> Tensor:
    """Return a copy of the queries in which the values at padding positions are finite.

    A value at a padding position becomes 0 if it is NaN or if its magnitude is at least PADDED_QUERY_LIMIT.

    Args:
        q: any shape.
        padded: bool, broadcasts to q; True = padded.
    """
    return q.masked_fill(padded & ~(q.abs() < PADDED_QUERY_LIMIT), 0.0)
