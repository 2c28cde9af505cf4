"""Landmarks: a sequence summed up in a few means, shared by the mechanisms of the Nyström family."""

import torch
from torch import Tensor

from lln_fairseq.ops.dtypes import without_autocast


class Landmarks:
    """Means over consecutive segments of the real tokens of each sequence.

    Token i of the n real ones belongs to segment ⌊i l / n⌋ of l = min(n, count), so segments differ by one token at
    most, and a sequence of at most `count` tokens is its own landmarks. What is padded or comes from other sequences
    changes nothing.

    Args:
        length, count: N and M, the tokens of the batch and the landmarks of a long sequence.
        key_padding_mask: bool (B, N), True = padded, or None.
    """

    def __init__(
        self,
        length: int,
        count: int,
        key_padding_mask: Tensor | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.length, self.count, self.padding = length, count, None
        if key_padding_mask is None and length % count == 0:
            return  # a reshape will do
        real = torch.ones(1, length, dtype=torch.bool, device=device) if key_padding_mask is None else ~key_padding_mask
        tokens = real.sum(dim=1, keepdim=True)
        segment = (real.cumsum(dim=1) - 1) * tokens.clamp(max=count) // tokens.clamp(min=1)
        index = torch.arange(count, device=real.device)
        members = (segment[:, None, :] == index[:, None]) & real[:, None, :]  # (B, M, N)
        self.weights = members / members.sum(dim=-1, keepdim=True).clamp(min=1)
        if key_padding_mask is not None:
            self.padding = index >= tokens  # (B, M): short sequences have fewer landmarks
            self.is_short = tokens[:, 0] <= count  # (B,)

    @without_autocast
    def means(self, x: Tensor) -> Tensor:
        """(B, H, N, D) -> (B, H, M, D); 0 for landmarks that a short sequence lacks."""
        if self.padding is None and self.length % self.count == 0:
            return x.unflatten(2, (self.count, -1)).mean(dim=3)
        # Heads beside features: one matrix of weights for all heads.
        tokens = x.transpose(1, 2).flatten(2)
        weights = self.weights.to(x.dtype).expand(x.shape[0], -1, -1)
        return (weights @ tokens).unflatten(2, (x.shape[1], x.shape[3])).transpose(1, 2)


def iterative_pinv(a: Tensor, iterations: int) -> Tensor:
    """The Moore-Penrose inverse of a (..., M, M), non-negative, by products alone (arXiv 2102.03902, Algorithm 1).

    Z_0 = aᵀ / (‖a‖_1 ‖a‖_∞),  Z_{j+1} = ¼ Z_j (13 I - a Z_j (15 I - a Z_j (7 I - a Z_j))).

    Singular values below some 3^-iterations of the largest stay damped. The norms are of each matrix on its own; the
    published code takes their maximum over the batch, so that batch mates change a sentence. Computed in the dtype of
    `a`, which must be float32 or float64: mixed precision does not apply.
    """
    with torch.autocast(a.device.type, enabled=False):
        norms = a.sum(dim=-2).amax(dim=-1) * a.sum(dim=-1).amax(dim=-1)
        z = a.mT / norms[..., None, None]
        eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
        for _ in range(iterations):
            az = a @ z
            z = z @ (3.25 * eye - az @ (3.75 * eye - az @ (1.75 * eye - 0.25 * az)))
    return z
