"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864)."""

import torch
from torch import Tensor

BASE = 10000.0  # the usual base: the rotation of the features f and f + D/2 has a period of 2π · base^(2f/D) tokens


def rotary_factors(positions: Tensor, features: int, dtype: torch.dtype, base: float = BASE) -> tuple[Tensor, Tensor]:
    """Compute the cosines and sines of the angles p · base^(-2f/D) for positions p and features f < D/2.

    Args:
        positions: the positions p of tokens, of any shape (...).
        features: D, the number of features to rotate. It must be even.
        dtype: the dtype of the result, float32 or float64. In half precision, angles would be wrong by several turns.
        base: the base of the frequencies.

    Returns:
        The cosines and the sines, each (..., D/2).
    """
    half = features // 2
    frequencies = base ** (-torch.arange(half, device=positions.device).to(dtype) / half)
    angles = positions.to(dtype)[..., None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, factors: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the features f and f + D/2 of every vector by the angle of its position.

    The dot product of two rotated vectors then depends on their positions only through the difference of the two.

    Args:
        x: vectors (..., D).
        factors: cosines and sines from `rotary_factors`, which broadcast to (..., D/2).

    Returns:
        (..., D) in the dtype of x.
    """
    cos, sin = factors
    first, second = x.chunk(2, dim=-1)
    rotated_first = first * cos - second * sin
    rotated_second = second * cos + first * sin
    return torch.cat((rotated_first, rotated_second), dim=-1).to(x.dtype)


def extend_base(base: float, features: int, factor: float) -> float:
    """Return the base for texts that are `factor` times as long as those that a model with this base was trained with.

    This is "NTK-aware" scaling: the slowest rotation gets slower by the factor, and the fastest stays as it is. The
    result is the base itself if the factor is not above 1.
    """
    return base * max(factor, 1.0) ** (features / (features - 2))
