"""Measures of how concentrated attention is: entropy, spectral gap and variance (arXiv 2311.13541, sections 3 and A.4).

P (..., N, N) is a tensor of attention matrices; each row of a matrix is a distribution over the keys. The measures have
one value for each matrix, so their shape is (...). A key_padding_mask is bool (B, N), True = padded, where B is the
first dimension of P. The rows and columns of padding are left out of every measure, and a sequence that contains only
padding gives NaN. For entropy and variance without a mask, P can also be a selection of R rows, (..., R, N).
"""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from lln_fairseq.ops import reference
from lln_fairseq.ops.dtypes import compute_dtype
from lln_fairseq.ops.moment_matching import PAPER_A, PAPER_B, calibration_table, interpolate


def entropy(P: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
    """Return the mean entropy of the rows in bits, H(P) = -1/N Σ_ij P_ij log2 P_ij (eq. 7).

    The entropy is log2 N for the uniform P and 0 for the identity. For softmax it grows with the temperature
    (Theorem 3.2).
    """
    row_entropies = torch.special.entr(_without_padding(P, key_padding_mask)).sum(dim=-1) / math.log(2)
    return row_entropies.sum(dim=-1) / _count_tokens(P, key_padding_mask)


def variance(P: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
    """Return the mean variance of the rows, 1/N Σ_i 1/N Σ_j (P_ij - mean of row i)² (eq. 21).

    If every row of P sums to 1, all rows have the mean 1/N, so this is also the variance of all entries of P. For
    softmax the variance falls as the temperature grows (Theorem 3.4).
    """
    P = _without_padding(P, key_padding_mask)
    columns = _count_tokens(P, key_padding_mask, dim=-1)
    deviations = P - (P.sum(dim=-1) / columns[..., None])[..., None]
    squares = _without_padding(deviations, key_padding_mask).square().sum(dim=(-2, -1))
    return squares / columns / _count_tokens(P, key_padding_mask)


def spectral_gap(P: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
    """Return 1 - |λ2|, where λ2 is the eigenvalue with the second largest modulus (section 3.2.2).

    The gap is 1 for the uniform P and for N = 1, 0 for the identity, and NaN for a matrix with an entry that is not
    finite. Eigenvalues are computed in float64 on the CPU, which takes about 0.15 s for a matrix of N = 512 on one core
    and grows like N³. For linear mechanisms, `linear_spectral_gap` is faster.

    Returns: (...) in float64, on the device of P.
    """
    return _gap(_without_padding(P, key_padding_mask).double(), P.device, _count_tokens(P, key_padding_mask))


def linear_spectral_gap(phi_q: Tensor, phi_k: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
    """Return the spectral gap of P = diag(1/z) φ(Q) φ(K)ᵀ, where z are the row sums of φ(Q) φ(K)ᵀ.

    The result is that of `spectral_gap`, but P is not formed if F is smaller than N. For any matrices X and Y, XY and
    YX have the same nonzero eigenvalues. The nonzero eigenvalues of P (N x N) are therefore those of
    φ(K)ᵀ diag(1/z) φ(Q) (F x F). To compute them takes O(N F² + F³) operations instead of O(N³).

    Args:
        phi_q, phi_k: non-negative features (B, H, N, F), as `Attention.feature_maps` returns them. If a row sum is 0,
            the row of P is 0.
        key_padding_mask: bool (B, N), True = padded, or None.

    Returns: (B, H) in float64.
    """
    tokens = _count_tokens(phi_q, key_padding_mask)
    if key_padding_mask is not None:
        padded = key_padding_mask[:, None, :, None]
        phi_q = phi_q.masked_fill(padded, 0.0)
        phi_k = phi_k.masked_fill(padded, 0.0)
    phi_q = phi_q.double()
    phi_k = phi_k.double()
    if phi_q.shape[-1] >= phi_q.shape[-2]:  # the F x F matrix would not be smaller than P
        return _gap(reference.kernel_matrix(phi_q, phi_k), phi_q.device, tokens)
    normalizer = phi_q @ phi_k.sum(dim=-2).unsqueeze(-1)
    rows = phi_q / normalizer.masked_fill(normalizer == 0, 1.0)
    return _gap(phi_k.mT @ rows, phi_q.device, tokens)


def lln_log_variance(sigma_tilde2: Tensor, head_dim: int, constants: str = "calibrated") -> Tensor:
    """Return σ_lln², the s = σ_q²σ_k² for which moment matching chooses σ̃² = α²σ_q² + β²σ_k².

    Moment matching looks up σ̃² for s, and this function does the reverse. With the constants "calibrated", σ_lln² is
    the variance of log P of LLN attention.

    Args:
        sigma_tilde2: σ̃², of any shape.
        head_dim: the number of features of a head.
        constants: "calibrated" or "entropy" interpolate in the table of that name. "paper" uses the line a σ̃² + b
            (eq. 34), and 0 where the line is negative.

    Returns: σ_lln² in the shape of sigma_tilde2.
    """
    if constants == "paper":
        return (PAPER_A * sigma_tilde2 + PAPER_B).clamp_min(0)
    log_s, log_sigma2 = calibration_table(head_dim, sigma_tilde2.device, constants)
    return interpolate(sigma_tilde2.log(), log_sigma2, log_s).exp()


def _gap(matrices: Tensor, device: torch.device, tokens: Tensor) -> Tensor:
    """Return 1 - |λ2| of each matrix.

    Args:
        matrices: (..., F, F).
        device: the device of the result.
        tokens: the number of tokens of each sequence, which broadcasts to (...). Where it is 0, the result is NaN.

    Returns: (...) in float64.
    """
    flat = matrices.detach().cpu().reshape(-1, *matrices.shape[-2:]).numpy()
    # One thread for each matrix. At this size the threads of a BLAS gain nothing, and cost a lot where cores are few.
    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(torch.get_num_threads()) as pool:
        moduli = list(pool.map(_second_modulus, flat))
    gap = 1 - torch.tensor(moduli, dtype=torch.float64, device=device).view(matrices.shape[:-2])
    return gap.masked_fill(tokens == 0, torch.nan)


def _second_modulus(matrix: np.ndarray) -> float:
    """Return the second largest modulus of the eigenvalues of a square matrix.

    Return 0 for a 1 x 1 matrix, and NaN for a matrix with an entry that is not finite.
    """
    if not np.isfinite(matrix).all():
        return math.nan
    # This uses numpy's LAPACK, because that of torch does not converge for the uniform matrix of N = 64.
    moduli = np.sort(np.abs(np.linalg.eigvals(matrix)))
    return moduli[-2] if len(moduli) > 1 else 0.0


def _without_padding(P: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """Return P in float32, or in float64 if it is float64, with 0 in the rows and columns of padding."""
    P = P.to(compute_dtype(P.dtype))
    if key_padding_mask is None:
        return P
    padded = _over_heads(key_padding_mask, P)
    return P.masked_fill(padded[..., :, None] | padded[..., None, :], 0.0)


def _count_tokens(P: Tensor, key_padding_mask: Tensor | None, dim: int = -2) -> Tensor:
    """Return the number of rows (dim -2) or columns (dim -1) of each matrix that do not belong to padding.

    Returns: (...) in float32, or in float64 if P is float64.
    """
    dtype = compute_dtype(P.dtype)
    if key_padding_mask is None:
        return torch.full(P.shape[:-2], P.shape[dim], dtype=dtype, device=P.device)
    return (~_over_heads(key_padding_mask, P)).sum(dim=-1).to(dtype).expand(P.shape[:-2])


def _over_heads(key_padding_mask: Tensor, P: Tensor) -> Tensor:
    """Return the mask (B, N) as (B, 1, ..., 1, N), which broadcasts to P.shape[:-1]."""
    return key_padding_mask.unflatten(0, (-1, *[1] * (P.dim() - 3)))
