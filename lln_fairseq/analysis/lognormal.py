"""Test the paper's model of attention: matrices should be log-normal, queries and keys Gaussian.

P (..., N, N) is a tensor of attention matrices, and queries and keys are (..., N, D). A key_padding_mask is bool
(B, N), True = padded, where B is the first dimension of P or of the queries. The rows and columns of padding are left
out. A fit has one value for each matrix, so the tensors of a fit have the shape (...). They are float64 (float32 on an
Apple GPU, which has no float64) and have no gradient.
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


def lognormal_fit(P: Tensor, key_padding_mask: Tensor | None = None) -> LogNormalFit:
    """Fit a log-normal distribution to the entries of each matrix (Proposition 3.1).

    Some entries can be 0: outside the blocks of block-diagonal attention, with ReLU features, or by underflow. μ and σ²
    are computed from the positive entries only. The distance also counts the zeros, so it is at least the fraction of
    zeros. A matrix without a positive entry gives NaN, and a negative entry makes the distance NaN.
    """
    flat, real = _flatten_entries(P, key_padding_mask, is_square=True)
    logs = flat.log()  # -inf for 0, NaN for a negative entry
    positive = real & (flat > 0)
    count = positive.sum(-1)
    mu = logs.where(positive, 0.0).sum(-1) / count
    sigma2 = (logs - mu[..., None]).where(positive, 0.0).square().sum(-1) / count
    return LogNormalFit(mu, sigma2, _ks_distance(logs, real, mu, sigma2.sqrt()))


def normality(x: Tensor, key_padding_mask: Tensor | None = None) -> NormalFit:
    """Fit a normal distribution to queries or keys x (..., N, D). Each fit pools all N tokens and D features of a head.

    The paper's model (section 3) assumes N(0, σ²), and all its predictions for P depend on this assumption.
    """
    flat, real = _flatten_entries(x, key_padding_mask, is_square=False)
    count = real.sum(-1)

    def average(values: Tensor) -> Tensor:
        return values.where(real, 0.0).sum(-1) / count

    mean = average(flat)
    centered = flat - mean[..., None]
    std = average(centered.square()).sqrt()
    z = centered / std[..., None]
    return NormalFit(mean, std, average(z**3), average(z**4) - 3, _ks_distance(flat, real, mean, std))


def qq(values: Tensor | np.ndarray, points: int = 99) -> tuple[np.ndarray, np.ndarray]:
    """Return the points of a Q-Q plot of a vector of values against the standard normal distribution.

    If the values are Gaussian, the points lie on a straight line with slope σ and intercept μ. Useful values are ln P
    (see `log_entries`) and queries.

    Returns: the theoretical quantiles and the sample quantiles, each float64 (points,) in ascending order.
    """
    probabilities = (np.arange(points) + 0.5) / points
    return ndtri(probabilities), np.quantile(np.asarray(values, dtype=np.float64), probabilities)


def log_entries(P: Tensor, key_padding_mask: Tensor | None = None) -> np.ndarray:
    """Return the logarithms of all positive entries of P, as one vector for histograms and Q-Q plots.

    The rows and columns of padding are left out.
    """
    flat, real = _flatten_entries(P, key_padding_mask, is_square=True)
    return flat[real & (flat > 0)].log().cpu().numpy()


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


def _flatten_entries(x: Tensor, key_padding_mask: Tensor | None, is_square: bool) -> tuple[Tensor, Tensor]:
    """Flatten each matrix of x into a vector, and return the vectors with a mask of the entries that are not padding.

    Args:
        x: matrices (..., N, M).
        key_padding_mask: bool (B, N), True = padded, or None.
        is_square: True if the columns are tokens, too. The columns of padding then also count as padding.

    Returns: the entries (..., N·M) in float64 (float32 on an Apple GPU), and bool (..., N·M), False at padding.
    """
    x = x.detach().to(torch.float32 if x.device.type == "mps" else torch.float64)
    if key_padding_mask is None:
        real = torch.ones((), dtype=torch.bool, device=x.device)
    else:
        tokens = ~key_padding_mask.reshape(len(key_padding_mask), *[1] * (x.dim() - 3), -1)
        real = tokens[..., :, None]
        if is_square:
            real = real & tokens[..., None, :]
    return x.flatten(-2), real.expand(x.shape).flatten(-2)


def _ks_distance(values: Tensor, real: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return the Kolmogorov-Smirnov distance between each sample and N(mean, std²).

    Args:
        values: samples (..., n).
        real: bool (..., n), True for the values that belong to the sample.
        mean, std: (...).

    Returns: (...), the largest difference between the two distribution functions.
    """
    count = real.sum(-1, keepdim=True)
    ordered = values.where(real, torch.inf).sort(dim=-1).values  # padding comes last
    rank = torch.arange(values.shape[-1], device=values.device)
    theory = torch.special.ndtr((ordered - mean[..., None]) / std[..., None])
    steps = torch.maximum((rank + 1) / count - theory, theory - rank / count)
    return steps.where(rank < count, 0.0).amax(-1)
