"""How fast attention makes all tokens alike: residual, composite norm, numerical rank.

Source: Dong, Cordonnier and Loukas 2021, "Attention is not all you need: pure attention loses rank doubly
exponentially with depth" (arXiv 2103.03404), below with its numbers. X (..., N, C) holds the N tokens of a sequence.
key_padding_mask: bool (B, N), True = padded, for tensors that begin with B; padded tokens are left out.
"""

import torch
from torch import Tensor

from lln_fairseq.ops.dtypes import compute_dtype


def residual(X: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
    """res(X) = X - 1 xᵀ with x the mean token: what X is beyond one vector for all tokens, (..., N, C).

    The mean minimises ‖X - 1 xᵀ‖ both in the Frobenius and in the spectral norm, since res(X) = (I - 11ᵀ/N) X does not
    depend on x and a projection lengthens nothing. The minimiser in the composite norm is another vector, without
    closed form; what is shown for the mean bounds it from above. Padded rows are 0.
    """
    X = X.to(compute_dtype(X.dtype))
    if key_padding_mask is None:
        return X - X.mean(dim=-2, keepdim=True)
    padded = _rows(key_padding_mask, X)
    tokens = (~padded).sum(dim=-2, keepdim=True).clamp_min(1)
    mean = X.masked_fill(padded, 0.0).sum(dim=-2, keepdim=True) / tokens
    return (X - mean).masked_fill(padded, 0.0)


def composite_norm(X: Tensor) -> Tensor:
    """‖X‖_{1,∞} = √(‖X‖₁ ‖X‖_∞), the largest column sum times the largest row sum of moduli, (...).

    Not a norm: it violates the triangle inequality. It is absolutely homogeneous and submultiplicative, which is what
    the bounds need.
    """
    X = X.abs()
    return (X.sum(dim=-2).amax(dim=-1) * X.sum(dim=-1).amax(dim=-1)).sqrt()


def relative_residual(X: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
    """‖res(X)‖ / ‖X‖ in the composite norm, (...): 0 if all tokens are the same vector.

    About 1 if the tokens have no mean in common; a little more is possible, since the mean minimises other norms.
    """
    X = X.to(compute_dtype(X.dtype))
    if key_padding_mask is not None:
        X = X.masked_fill(_rows(key_padding_mask, X), 0.0)
    return composite_norm(residual(X, key_padding_mask)) / composite_norm(X)


def numerical_rank(X: Tensor, tolerance: float = 1e-3) -> Tensor:
    """The number of singular values of X (..., N, M) greater than `tolerance` times the largest, int64 (...)."""
    values = torch.linalg.svdvals(X.to(compute_dtype(X.dtype)))
    return (values > tolerance * values[..., :1]).sum(dim=-1)


def _rows(key_padding_mask: Tensor, X: Tensor) -> Tensor:
    """(B, N) -> (B, 1 ..., N, 1), which broadcasts to X."""
    return key_padding_mask.unflatten(0, (-1, *[1] * (X.dim() - 3))).unsqueeze(-1)
