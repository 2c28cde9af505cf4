"""How fast attention makes all tokens alike: residual, composite norm, numerical rank, the bound on their decay.

Source: Dong, Cordonnier and Loukas 2021, "Attention is not all you need: pure attention loses rank doubly
exponentially with depth" (arXiv 2103.03404), below with its numbers. X (..., N, C) holds the N tokens of a sequence.
key_padding_mask: bool (B, N), True = padded, for tensors that begin with B; padded tokens are left out.
"""

import math

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


def collapse_bound(residual_norm: float, beta: float, head_dim: int, layers: int, heads: int = 1) -> float:
    """log10 of (4 H β / √D)^{(3^L - 1)/2} ‖res X‖^{3^L}, the most that ‖res SAN(X)‖ can be (Theorem 2.2).

    SAN(X) is L layers of H heads of softmax attention without skip connections, MLPs or layer norms; β is at least
    ‖W_QK‖₁ ‖W_h‖_{1,∞} in every head of every layer, see `weight_factor`. A logarithm, since 3^12 is half a million.
    It tends to -∞ with L, doubly exponentially, only where 4 H β ‖res X‖² / √D < 1, and it presupposes scores within
    a row that differ by at most 1.256 (Lemma A.3 of the source). With skip connections there is no such bound: the
    path that skips every layer keeps the residual, see `paths`.
    """
    power = 3**layers
    return (power - 1) / 2 * math.log10(4 * heads * beta / math.sqrt(head_dim)) + power * math.log10(residual_norm)


def weight_factor(w_qk: Tensor, w_h: Tensor) -> Tensor:
    """‖W_QK‖₁ ‖W_h‖_{1,∞} with scores X W_QK Xᵀ / √D and output P X W_h, W_h = W_V W_O; both (..., C, C) -> (...)."""
    return torch.linalg.matrix_norm(w_qk, ord=1) * composite_norm(w_h)


def paths(X: Tensor, matrices: list[Tensor], weights: list[Tensor]) -> Tensor:
    """Path decomposition (Theorem 2.1) of X -> X + Σ_h P_h X W_h, layer after layer, by the length of the paths.

    A path takes one head or the skip connection in every layer, [H + 1]^L in all; its length is how many heads it
    takes. Entry l of the result (L + 1, N, C) is the sum over the paths of length l: their sum is the output with skip
    connections, entry L that without.

    Args: X (N, C); for every layer its attention matrices P (H, N, N) and weights W (H, C, C).
    """
    terms = [X, *(torch.zeros_like(X) for _ in matrices)]
    for depth, (P, W) in enumerate(zip(matrices, weights, strict=True), start=1):
        for length in range(depth, 0, -1):  # from the longest: each takes what the shorter one was before this layer
            terms[length] = terms[length] + (P @ terms[length - 1] @ W).sum(dim=0)
    return torch.stack(terms)


def _rows(key_padding_mask: Tensor, X: Tensor) -> Tensor:
    """(B, N) -> (B, 1 ..., N, 1), which broadcasts to X."""
    return key_padding_mask.unflatten(0, (-1, *[1] * (X.dim() - 3))).unsqueeze(-1)
