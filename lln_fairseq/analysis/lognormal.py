"""Test the paper's model of attention: matrices should be log-normal, queries and keys Gaussian.

P (..., N, N) is a tensor of attention matrices, and queries and keys are (..., N, D). Remove padding first, since it
would count as tokens. A fit has one value for each matrix, so the tensors of a fit have the shape (...). They are
float64 (float32 on an Apple GPU, which has no float64) and have no gradient.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor


class LogNormalFit(NamedTuple):
    """A log-normal distribution, ln P ~ N(μ, σ²), and the Kolmogorov-Smirnov distance between it and P, in [0, 1]."""

    mu: Tensor
    sigma2: Tensor
    ks: Tensor


class NormalFit(NamedTuple):
    """Moments of a sample, and the Kolmogorov-Smirnov distance between the sample and N(mean, std²), in [0, 1].

    `kurtosis` is the excess kurtosis. For a Gaussian, skewness and excess kurtosis are 0.
    """

    mean: Tensor
    std: Tensor
    skewness: Tensor
    kurtosis: Tensor
    ks: Tensor


class Moments(NamedTuple):
    """The mean μ and the variance σ² of ln P."""

    mu: float
    sigma2: float


def lognormal_fit(P: Tensor) -> LogNormalFit:
    """Fit a log-normal distribution to the entries of each matrix (Proposition 3.1).

    Some entries can be 0: outside the blocks of block-diagonal attention, with ReLU features, or by underflow. μ and σ²
    are computed from the positive entries only. The distance also counts the zeros, so it is at least the fraction of
    zeros. A matrix without a positive entry gives NaN, and a negative entry makes the distance NaN. If all entries are
    equal, σ² is 0 up to rounding, and the distance is NaN or meaningless.
    """
    entries = _flatten_matrices(P)
    logs = entries.log()  # -inf for 0, NaN for a negative entry
    positive = entries > 0
    count = positive.sum(-1)
    mu = logs.where(positive, 0.0).sum(-1) / count
    sigma2 = (logs - mu[..., None]).where(positive, 0.0).square().sum(-1) / count
    return LogNormalFit(mu, sigma2, _ks_distance(logs, mu, sigma2.sqrt()))


def normality(x: Tensor) -> NormalFit:
    """Fit a normal distribution to queries or keys x (..., N, D). Each fit pools all N tokens and D features of a head.

    If all entries are equal, skewness, kurtosis and distance are NaN. The paper's model (section 3) assumes N(0, σ²),
    and all its predictions for P depend on this assumption.
    """
    entries = _flatten_matrices(x)
    mean = entries.mean(-1)
    std = entries.std(-1, correction=0)
    z = (entries - mean[..., None]) / std[..., None]
    skewness = (z**3).mean(-1)
    kurtosis = (z**4).mean(-1) - 3
    return NormalFit(mean, std, skewness, kurtosis, _ks_distance(entries, mean, std))


def qq(values: Tensor | np.ndarray, points: int = 99) -> tuple[np.ndarray, np.ndarray]:
    """Return the points of a Q-Q plot of a vector of values against the standard normal distribution.

    If the values are Gaussian, the points lie on a straight line with slope σ and intercept μ. Useful values are ln P
    (see `log_entries`) and queries.

    Returns: the theoretical quantiles and the sample quantiles, each float64 (points,) in ascending order.
    """
    probabilities = (np.arange(points) + 0.5) / points
    return ndtri(probabilities), np.quantile(np.asarray(values, dtype=np.float64), probabilities)


def log_entries(P: Tensor) -> np.ndarray:
    """Return the logarithms of the positive entries of all matrices as one vector, for histograms and Q-Q plots."""
    entries = _flatten_matrices(P)
    return entries[entries > 0].log().cpu().numpy()


def softmax_moments(s: float, tokens: int) -> Moments:
    """Return the predicted moments of ln P of softmax attention, μ = -ln N - s/2 and σ² = s (Proposition 3.1).

    The proposition neglects two terms. The normalizer of row i varies with |q_i|², which for Gaussian queries and keys
    of head dimension D adds s²/(2D) to σ²: with D = 32, 2 % at s = 1 and 12 % at s = 8. And μ lacks the term σ_Σ²/2,
    where σ_Σ² is `fenton_variance(s, N)`: this is 0.05 at s = 4 and N = 512.

    Args:
        s: σ_q²σ_k² + C_cross.
        tokens: N, the number of tokens.
    """
    return Moments(-math.log(tokens) - s / 2, s)


def fenton_variance(sigma2: float, terms: int) -> float:
    """Return the approximate variance of the logarithm of a sum of n independent log-normals (Fenton 1960).

    It is σ_Σ² = ln((e^{σ²} - 1)/n + 1) (eq. 28). The approximation is good for σ² up to about 1.2. For larger σ², the
    largest term dominates the sum, and the approximation is too large (A.6, Figure 6b).

    Args:
        sigma2: σ², the variance of the logarithm of each term.
        terms: n, the number of terms.
    """
    return math.log1p(math.expm1(sigma2) / terms)


def _flatten_matrices(x: Tensor) -> Tensor:
    """Return the entries of each of the matrices x (..., N, M) as a vector (..., N·M), in float64 without gradient.

    On an Apple GPU, the result is in float32.
    """
    dtype = torch.float32 if x.device.type == "mps" else torch.float64
    return x.detach().to(dtype).flatten(-2)


def _ks_distance(values: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return the largest difference (...) between the distribution functions of samples (..., n) and N(mean, std²)."""
    count = values.shape[-1]
    rank = torch.arange(count, device=values.device)
    theory = torch.special.ndtr((values.sort(dim=-1).values - mean[..., None]) / std[..., None])
    return torch.maximum((rank + 1) / count - theory, theory - rank / count).amax(-1)
