"""Measures of rank collapse, in which attention makes all tokens alike: residual, composite norm and numerical rank.

Source: Dong, Cordonnier and Loukas 2021, "Attention is not all you need: pure attention loses rank doubly
exponentially with depth" (arXiv 2103.03404). X (..., N, C) holds N tokens with C features for each sequence. A
key_padding_mask is bool (B, N), True = padded, where B is the first dimension of X. Padding is left out.
"""

import torch
from torch import Tensor

from lln_fairseq.ops.dtypes import compute_dtype


def residual(X: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
    """Subtract the mean token from every token: return res(X) = X - 1 xᵀ, where x is the mean over the tokens.

    The mean minimizes ‖X - 1 xᵀ‖ over all vectors x in the Frobenius norm and in the spectral norm. The paper minimizes
    the composite norm, whose minimizer is another vector without a closed form. The composite norm of this residual is
    therefore an upper bound of the paper's minimum.

    Returns: (..., N, C) in float32, or in float64 if X is float64. The rows of padding are 0.
    """
    X = X.to(compute_dtype(X.dtype))
    if key_padding_mask is None:
        return X - X.mean(dim=-2, keepdim=True)
    padded = _over_heads(key_padding_mask, X)
    tokens = (~padded).sum(dim=-2, keepdim=True).clamp_min(1)
    mean = X.masked_fill(padded, 0.0).sum(dim=-2, keepdim=True) / tokens
    return (X - mean).masked_fill(padded, 0.0)


def composite_norm(X: Tensor) -> Tensor:
    """Return the composite norm ‖X‖_{1,∞} = √(‖X‖₁ ‖X‖_∞) of each matrix of X (..., N, M), with shape (...).

    ‖X‖₁ is the largest sum of the absolute values of a column, and ‖X‖_∞ the largest sum of the absolute values of a
    row. The composite norm violates the triangle inequality, so it is not a norm in the strict sense. But it is
    absolutely homogeneous and submultiplicative, which is all that the paper's bounds need.
    """
    X = X.abs()
    return (X.sum(dim=-2).amax(dim=-1) * X.sum(dim=-1).amax(dim=-1)).sqrt()


def relative_residual(X: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
    """Return ‖res(X)‖ / ‖X‖ in the composite norm for each sequence, with shape (...).

    The relative residual is 0 if all tokens are the same vector, and 1 if the mean of the tokens is 0. It can slightly
    exceed 1, because the mean token does not minimize the composite norm. A sequence that contains only padding, or
    only tokens that are 0, gives NaN.
    """
    X = X.to(compute_dtype(X.dtype))
    if key_padding_mask is not None:
        X = X.masked_fill(_over_heads(key_padding_mask, X), 0.0)
    return composite_norm(residual(X, key_padding_mask)) / composite_norm(X)


def numerical_rank(X: Tensor, tolerance: float = 1e-3) -> Tensor:
    """Return the number of singular values of X (..., N, M) above `tolerance` times the largest one, int64 (...)."""
    values = torch.linalg.svdvals(X.to(compute_dtype(X.dtype)))
    return (values > tolerance * values[..., :1]).sum(dim=-1)


def _over_heads(key_padding_mask: Tensor, X: Tensor) -> Tensor:
    """Return the mask (B, N) as (B, 1, ..., 1, N, 1), which broadcasts to X (B, ..., N, C)."""
    return key_padding_mask.unflatten(0, (-1, *[1] * (X.dim() - 3))).unsqueeze(-1)
