"""How concentrated attention is: entropy, spectral gap and variance (arXiv 2311.13541, sections 3, A.4).

Shapes: P (..., N, N), each row a distribution over the keys. key_padding_mask is bool (B, N) with
True = padded, for tensors that begin with B: rows and columns of padding are left out everywhere, and a sequence
without a real token has NaN. Entropy and variance also take some rows of a matrix, (..., R, N), without a mask.
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
    """H(P) = -1/N Σ_ij P_ij log2 P_ij, the mean entropy of the rows in bits (eq. 7), of shape (...).

    log2 N for the uniform P, 0 for the identity; for softmax it grows with the temperature (Theorem 3.2).
    """
    rows = torch.special.entr(_without_padding(P, key_padding_mask)).sum(dim=-1) / math.log(2)
    return rows.sum(dim=-1) / _tokens(P, key_padding_mask)


def variance(P: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
    """1/N Σ_i 1/N Σ_j (P_ij - mean of row i)², the mean variance of the rows (eq. 21), of shape (...).

    Rows of a stochastic P all have the mean 1/N, so this is the variance of its entries too. For softmax it falls with
    the temperature (Theorem 3.4).
    """
    P = _without_padding(P, key_padding_mask)
    columns = _tokens(P, key_padding_mask, dim=-1)
    deviations = P - (P.sum(dim=-1) / columns[..., None])[..., None]
    squares = _without_padding(deviations, key_padding_mask).square().sum(dim=(-2, -1))
    return squares / columns / _tokens(P, key_padding_mask)


def spectral_gap(P: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
    """1 - |λ2|, λ2 the eigenvalue of the second largest modulus (section 3.2.2), float64 of shape (...).

    1 for the uniform P (and for N = 1), 0 for the identity. All eigenvalues are computed, in float64 on the CPU:
    about 0.15 s for a matrix of N = 512 on one core, growing like N³. Linear mechanisms have `linear_spectral_gap`.
    """
    return _gap(_without_padding(P, key_padding_mask).double(), P.device, _tokens(P, key_padding_mask))


def linear_spectral_gap(phi_q: Tensor, phi_k: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
    """`spectral_gap` of P = diag(1/z) φ(Q) φ(K)ᵀ with z its row sums, exact at any length, float64 of shape (B, H).

    XY and YX have the same non-zero eigenvalues, so those of P (N x N, rank F at most) are those of the F x F matrix
    φ(K)ᵀ diag(1/z) φ(Q): O(N F² + F³) operations instead of O(N³).

    Args: phi_q, phi_k: features (B, H, N, F) as `Attention.feature_maps` gives them, with positive row sums z (a row
    without one is 0, as in `ops.linear_attention`).
    """
    tokens = _tokens(phi_q, key_padding_mask)
    if key_padding_mask is not None:
        padded = key_padding_mask[:, None, :, None]
        phi_q, phi_k = phi_q.masked_fill(padded, 0.0), phi_k.masked_fill(padded, 0.0)
    phi_q, phi_k = phi_q.double(), phi_k.double()
    if phi_q.shape[-1] >= phi_q.shape[-2]:  # no smaller than P itself
        return _gap(reference.kernel_matrix(phi_q, phi_k), phi_q.device, tokens)
    normaliser = phi_q @ phi_k.sum(dim=-2).unsqueeze(-1)
    rows = phi_q / normaliser.masked_fill(normaliser == 0, 1.0)
    return _gap(phi_k.mT @ rows, phi_q.device, tokens)


def lln_log_variance(sigma_tilde2: Tensor, head_dim: int, constants: str = "calibrated") -> Tensor:
    """σ_lln², the s for which moment matching would choose this σ̃² = α²σ_q² + β²σ_k².

    By the table of the constants read backwards, or by the paper's line a σ̃² + b (eq. 34), at least 0.
    """
    if constants == "paper":
        return (PAPER_A * sigma_tilde2 + PAPER_B).clamp_min(0)
    log_s, log_sigma2 = calibration_table(head_dim, sigma_tilde2.device, constants)
    return interpolate(sigma_tilde2.log(), log_sigma2, log_s).exp()


def _gap(matrices: Tensor, device: torch.device, tokens: Tensor) -> Tensor:
    flat = matrices.cpu().reshape(-1, *matrices.shape[-2:]).numpy()
    # A matrix a thread: the threads of a BLAS gain nothing at this size, and where cores are short they lose a lot.
    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(torch.get_num_threads()) as pool:
        second = list(pool.map(_second_modulus, flat))
    gap = 1 - torch.tensor(second, dtype=torch.float64, device=device).view(matrices.shape[:-2])
    return gap.masked_fill(tokens == 0, torch.nan)


def _second_modulus(matrix: np.ndarray) -> float:
    """|λ2|; NaN for a matrix that is not finite."""
    if not np.isfinite(matrix).all():
        return math.nan
    # numpy's LAPACK: the one in torch's builds does not converge for matrices as simple as the uniform one of N = 64.
    moduli = np.sort(np.abs(np.linalg.eigvals(matrix)))
    return moduli[-2] if len(moduli) > 1 else 0.0


def _without_padding(P: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """P in float32 or float64, with 0 in the rows and columns of padding."""
    P = P.to(compute_dtype(P.dtype))
    if key_padding_mask is None:
        return P
    padded = _over_heads(key_padding_mask, P)
    return P.masked_fill(padded[..., :, None] | padded[..., None, :], 0.0)


def _tokens(P: Tensor, key_padding_mask: Tensor | None, dim: int = -2) -> Tensor:
    """How many rows (columns: dim -1) of each matrix are real, (...)."""
    dtype = compute_dtype(P.dtype)
    if key_padding_mask is None:
        return torch.full(P.shape[:-2], P.shape[dim], dtype=dtype, device=P.device)
    return (~_over_heads(key_padding_mask, P)).sum(dim=-1).to(dtype).expand(P.shape[:-2])


def _over_heads(key_padding_mask: Tensor, P: Tensor) -> Tensor:
    """(B, N) -> (B, 1 ..., N), which broadcasts to P.shape[:-1]."""
    return key_padding_mask.unflatten(0, (-1, *[1] * (P.dim() - 3)))
