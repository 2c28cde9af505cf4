"""Measures of how concentrated attention is: entropy, spectral gap and variance (arXiv 2311.13541, sections 3 and A.4).

P (..., N, N) is a tensor of attention matrices; each row of a matrix is a distribution over the keys. The measures have
one value for each matrix, so their shape is (...). Remove padding first, since it would count as tokens. For entropy
and variance, P can also be a selection of R rows, (..., R, N).
"""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from lln_fairseq.ops import reference
from lln_fairseq.ops.formula import PAPER_A, PAPER_B, compute_dtype, interpolate
from lln_fairseq.ops.moment_matching import calibration_table


def entropy(P: Tensor) -> Tensor:
    """Return the mean entropy of the rows in bits, H(P) = -1/N Σ_ij P_ij log2 P_ij (eq. 7).

    The entropy is log2 N for the uniform P and 0 for the identity. For softmax it grows with the temperature
    (Theorem 3.2).
    """
    row_entropies = torch.special.entr(P.to(compute_dtype(P.dtype))).sum(dim=-1) / math.log(2)
    return row_entropies.mean(dim=-1)


def variance(P: Tensor) -> Tensor:
    """Return the mean variance of the rows, 1/N Σ_i 1/N Σ_j (P_ij - mean of row i)² (eq. 21).

    If every row of P sums to 1, all rows have the mean 1/N, so this is also the variance of all entries of P. For
    softmax the variance falls as the temperature grows (Theorem 3.4).
    """
    row_variances = P.to(compute_dtype(P.dtype)).var(dim=-1, correction=0)
    return row_variances.mean(dim=-1)


def spectral_gap(P: Tensor) -> Tensor:
    """Return 1 - |λ2|, where λ2 is the eigenvalue with the second largest modulus (section 3.2.2).

    The gap is 1 for the uniform P and for N = 1, 0 for the identity, and NaN for a matrix with an entry that is not
    finite. Eigenvalues are computed in float64 on the CPU, which takes about 0.15 s for a matrix of N = 512 on one core
    and grows like N³. For linear mechanisms, `linear_spectral_gap` is faster.

    Returns: (...) in float64, on the device of P.
    """
    return _gap(P.double())


def linear_spectral_gap(phi_q: Tensor, phi_k: Tensor) -> Tensor:
    """Return the spectral gap of P = diag(1/z) φ(Q) φ(K)ᵀ, where z are the row sums of φ(Q) φ(K)ᵀ.

    The result is that of `spectral_gap`, but P is not formed if F is smaller than N. For any matrices X and Y, XY and
    YX have the same nonzero eigenvalues. The nonzero eigenvalues of P (N x N) are therefore those of
    φ(K)ᵀ diag(1/z) φ(Q) (F x F). To compute them takes O(N F² + F³) operations instead of O(N³).

    Args:
        phi_q, phi_k: non-negative features (..., N, F), as `Attention.feature_maps` returns them. If a row sum is 0,
            the row of P is 0.

    Returns: (...) in float64.
    """
    phi_q = phi_q.double()
    phi_k = phi_k.double()
    if phi_q.shape[-1] >= phi_q.shape[-2]:  # the F x F matrix would not be smaller than P
        return _gap(reference.kernel_matrix(phi_q, phi_k))
    normalizer = phi_q @ phi_k.sum(dim=-2).unsqueeze(-1)
    rows = phi_q / normalizer.masked_fill(normalizer == 0, 1.0)
    return _gap(phi_k.mT @ rows)


def lln_log_variance(sigma_tilde2: Tensor, head_dim: int, constants: str = "calibrated") -> Tensor:
    """Return σ_lln², the s = σ_q²σ_k² for which moment matching chooses σ̃² = α²σ_q² + β²σ_k².

    With the constants "calibrated", σ_lln² is the variance of log P of LLN attention. With "paper" it is the line
    a σ̃² + b (eq. 34), and 0 where the line is negative. The result has the shape of sigma_tilde2, which is any.
    """
    if constants == "paper":
        return (PAPER_A * sigma_tilde2 + PAPER_B).clamp_min(0)
    log_s, log_sigma2 = calibration_table(head_dim, sigma_tilde2.device)
    return interpolate(sigma_tilde2.log(), log_sigma2, log_s).exp()


def _gap(matrices: Tensor) -> Tensor:
    """Return 1 - |λ2| of each of the matrices (..., F, F), with shape (...) in float64."""
    flat = matrices.detach().cpu().reshape(-1, *matrices.shape[-2:]).numpy()
    # One thread for each matrix. At this size the threads of a BLAS gain nothing, and cost a lot where cores are few.
    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(torch.get_num_threads()) as pool:
        moduli = list(pool.map(_second_modulus, flat))
    return 1 - torch.tensor(moduli, dtype=torch.float64, device=matrices.device).view(matrices.shape[:-2])


def _second_modulus(matrix: np.ndarray) -> float:
    """Return the second largest modulus of the eigenvalues of a square matrix.

    It is 0 for a 1 x 1 matrix, and NaN for a matrix with an entry that is not finite.
    """
    if not np.isfinite(matrix).all():
        return math.nan
    # This uses numpy's LAPACK, because that of torch does not converge for the uniform matrix of N = 64.
    moduli = np.sort(np.abs(np.linalg.eigvals(matrix)))
    return moduli[-2] if len(moduli) > 1 else 0.0
