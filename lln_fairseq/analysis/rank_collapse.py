"""Measures of rank collapse, in which attention makes all tokens alike: residual, composite norm and numerical rank.

Source: Dong, Cordonnier and Loukas 2021, "Attention is not all you need: pure attention loses rank doubly
exponentially with depth" (arXiv 2103.03404). X (..., N, C) holds the N tokens of a sequence. A key_padding_mask is bool
(B, N), True = padded, for tensors whose first dimension is B; padded tokens are left out.
"""

import torch
from torch import Tensor

from lln_fairseq.ops.dtypes import compute_dtype


def residual(X: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
    """Return res(X) = X - 1 xᵀ, where x is the mean token: the part of X that is not the same for all tokens.

    The mean minimizes ‖X - 1 xᵀ‖ both in the Frobenius and in the spectral norm, since res(X) = (I - 11ᵀ/N) X does not
    depend on x, and a projection lengthens nothing. The minimizer in the composite norm is another vector, without a
    closed form, so the composite norm of this residual is an upper bound of that minimum.

    Returns: (..., N, C) in float32 (float64 for float64 X); padded rows are 0.
    """
    X = X.to(compute_dtype(X.dtype))
    if key_padding_mask is None:
        return X - X.mean(dim=-2, keepdim=True)
    padded = _over_heads(key_padding_mask, X)
    tokens = (~padded).sum(dim=-2, keepdim=True).clamp_min(1)
    mean = X.masked_fill(padded, 0.0).sum(dim=-2, keepdim=True) / tokens
    return (X - mean).masked_fill(padded, 0.0)


def composite_norm(X: Tensor) -> Tensor:
    """Return ‖X‖_{1,∞} = √(‖X‖₁ ‖X‖_∞) for matrices X (..., N, M), with shape (...).

    ‖X‖₁ is the largest column sum of absolute values, ‖X‖_∞ the largest row sum.

    It is not a norm, as it violates the triangle inequality. It is absolutely homogeneous and submultiplicative, which
    the paper's bounds need.
    """
    X = X.abs()
    return (X.sum(dim=-2).amax(dim=-1) * X.sum(dim=-1).amax(dim=-1)).sqrt()


def relative_residual(X: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
    """Return ‖res(X)‖ / ‖X‖ in the composite norm, (...).

    It is 0 if all tokens are the same vector, and about 1 if the tokens have no mean in common (a little more is
    possible, since the mean minimizes other norms). A sequence without a real token gives NaN.
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
    """Return the mask (B, N) as (B, 1 ..., N, 1), which broadcasts to X (B, ..., N, C)."""
    return key_padding_mask.unflatten(0, (-1, *[1] * (X.dim() - 3))).unsqueeze(-1)
