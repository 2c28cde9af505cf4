"""Landmarks and a pseudoinverse, for mechanisms that use a Nyström approximation.

A landmark is the mean over a segment of a sequence. A few landmarks represent all tokens of the sequence.
"""

import torch
from torch import Tensor

from lln_fairseq.ops.autocast import autocast_disabled, without_autocast


class Landmarks:
    """Divides each sequence into consecutive segments, and computes the means over them: the landmarks.

    The n tokens of a sequence that are not padding are divided into l = min(n, count) segments: token i belongs to
    segment ⌊i l / n⌋. So the lengths of the segments differ by at most one token, and in a sequence of at most `count`
    tokens every token is a landmark. Padding and the other sequences of the batch have no influence.

    Args:
        length: N, the length of the sequences including padding.
        count: M, the number of landmarks. A sequence with n < M tokens has only n landmarks.
        padding: bool (B, N), True = padded, or None.
        device: the device of the tokens. It is ignored if there is a mask.

    Attributes:
        padding: bool (B, M), True for each of the last M - n places, which a sequence with n < M tokens does not use.
            None without a mask.
        is_short: bool (B,), True for a sequence of at most M tokens. It exists only if there is a mask.
    """

    def __init__(
        self,
        length: int,
        count: int,
        padding: Tensor | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.length = length
        self.count = count
        self.padding: Tensor | None = None
        if padding is not None:
            real = ~padding
        elif length % count == 0:
            return  # all segments have one size, and `means` needs no weights
        else:
            real = torch.ones(1, length, dtype=torch.bool, device=device)
        tokens = real.sum(dim=1, keepdim=True)
        segment = (real.cumsum(dim=1) - 1) * tokens.clamp(max=count) // tokens.clamp(min=1)
        index = torch.arange(count, device=real.device)
        members = (segment[:, None, :] == index[:, None]) & real[:, None, :]  # (B, M, N)
        self.weights = members / members.sum(dim=-1, keepdim=True).clamp(min=1)
        if padding is not None:
            self.padding = index >= tokens
            self.is_short = tokens[:, 0] <= count

    @without_autocast
    def means(self, x: Tensor) -> Tensor:
        """Return the landmarks of x.

        Args:
            x: (B, H, N, D). With a mask, its values at padding positions must be finite.

        Returns: (B, H, M, D) in the dtype of x; 0 where `padding` is True.
        """
        if self.padding is None and self.length % self.count == 0:
            return x.unflatten(2, (self.count, -1)).mean(dim=3)
        # The weights are the same for all heads, so heads and features form one dimension for one product.
        tokens = x.transpose(1, 2).flatten(2)
        weights = self.weights.to(x.dtype).expand(x.shape[0], -1, -1)
        return (weights @ tokens).unflatten(2, (x.shape[1], x.shape[3])).transpose(1, 2)


def iterative_pinv(a: Tensor, iterations: int) -> Tensor:
    """Approximate the Moore-Penrose inverse of each matrix by matrix products (arXiv 2102.03902, Algorithm 1).

    Z_0 = aᵀ / (‖a‖_1 ‖a‖_∞),  Z_{j+1} = ¼ Z_j (13 I - a Z_j (15 I - a Z_j (7 I - a Z_j))).

    Singular values below about 3^-iterations times the largest singular value get inverses that are too small. Each
    matrix is divided by its own norms. The published code instead uses the largest norms in the batch, so that the
    sequences influence each other.

    Args:
        a: the matrices, (..., M, M), non-negative, float32 or float64. They are multiplied in this dtype, even under
            autocast.
        iterations: the number of steps from Z_0.

    Returns: (..., M, M) in the dtype of a.
    """
    with autocast_disabled(a):
        norms = a.sum(dim=-2).amax(dim=-1) * a.sum(dim=-1).amax(dim=-1)
        z = a.mT / norms[..., None, None]
        eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
        for _ in range(iterations):
            az = a @ z
            z = z @ (3.25 * eye - az @ (3.75 * eye - az @ (1.75 * eye - 0.25 * az)))
    return z
