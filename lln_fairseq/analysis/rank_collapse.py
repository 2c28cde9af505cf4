"""Measures of rank collapse, in which attention makes all tokens alike: residual, composite norm and numerical rank.

Source: Dong, Cordonnier and Loukas 2021, "Attention is not all you need: pure attention loses rank doubly
exponentially with depth" (arXiv 2103.03404). X (..., N, C) holds N tokens with C features for each sequence. Remove
padding first, since it would count as tokens.
"""

import torch
from torch import Tensor

from lln_fairseq.ops.formula import compute_dtype


def residual(X: Tensor) -> Tensor:
    """Subtract the mean token from every token: return res(X) = X - 1 xᵀ, where x is the mean over the tokens.

    The mean minimizes ‖X - 1 xᵀ‖ over all vectors x in the Frobenius norm and in the spectral norm. The paper minimizes
    the composite norm, whose minimizer is another vector without a closed form. The composite norm of this residual is
    therefore an upper bound of the paper's minimum.

    Returns: (..., N, C) in float32, or in float64 if X is float64.
    """
    X = X.to(compute_dtype(X.dtype))
    return X - X.mean(dim=-2, keepdim=True)


def composite_norm(X: Tensor) -> Tensor:
    """Return the composite norm ‖X‖_{1,∞} = √(‖X‖₁ ‖X‖_∞) of each matrix of X (..., N, M), with shape (...).

    ‖X‖₁ is the largest sum of the absolute values of a column, and ‖X‖_∞ the largest sum of the absolute values of a
    row. The composite norm violates the triangle inequality, so it is not a norm in the strict sense. But it is
    absolutely homogeneous and submultiplicative, which is all that the paper's bounds need.
    """
    X = X.abs()
    return (X.sum(dim=-2).amax(dim=-1) * X.sum(dim=-1).amax(dim=-1)).sqrt()


def relative_residual(X: Tensor) -> Tensor:
    """Return ‖res(X)‖ / ‖X‖ in the composite norm for each sequence, with shape (...).

    The relative residual is 0 if all tokens are the same vector, and 1 if the mean of the tokens is 0. It can slightly
    exceed 1, because the mean token does not minimize the composite norm. If all tokens are 0, it is NaN.
    """
    return composite_norm(residual(X)) / composite_norm(X.to(compute_dtype(X.dtype)))


def numerical_rank(X: Tensor, tolerance: float = 1e-3) -> Tensor:
    """Return the number of singular values of X (..., N, M) above `tolerance` times the largest one, int64 (...)."""
    values = torch.linalg.svdvals(X.to(compute_dtype(X.dtype)))
    return (values > tolerance * values[..., :1]).sum(dim=-1)
