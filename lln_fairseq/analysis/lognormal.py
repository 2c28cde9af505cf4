"""Test the paper's model of attention: matrices should be log-normal, queries and keys Gaussian.

A matrix P has shape (..., N, N), and queries and keys
have (..., N, D). A key_padding_mask is bool (B, N), True = padded, for tensors whose first dimension is B; padded rows
and columns are left out. Every number of a fit has the shape (...), without gradient, in float64 (float32 on an Apple
GPU, which has no float64).
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor


class LogNormalFit(NamedTuple):
    """The log-normal distribution ln P ~ N(μ, σ²), and its Kolmogorov-Smirnov distance to P, in [0, 1]."""

    mu: Tensor
    sigma2: Tensor
    ks: Tensor


class NormalFit(NamedTuple):
    """Moments of a sample, and its Kolmogorov-Smirnov distance to N(mean, std²), in [0, 1].

    For a Gaussian, skewness and (excess) kurtosis are 0.
    """

    mean: Tensor
    std: Tensor
    skewness: Tensor
    kurtosis: Tensor
    ks: Tensor


class Moments(NamedTuple):
    """Mean and variance of ln P."""

    mu: float
    sigma2: float


def lognormal_fit(P: Tensor, key_padding_mask: Tensor | None = None) -> LogNormalFit:
    """Fit a log-normal distribution to the entries of each matrix (Proposition 3.1).

    Entries that are 0 (outside the blocks of block-diagonal attention, with ReLU features, or by underflow) have no
    logarithm. μ and σ² are those of the positive entries, but the distance includes the zeros, so it is at least the
    fraction of zeros. A matrix without a positive entry gives NaN, and a negative entry makes the distance NaN.
    """
    flat, real = _flatten_entries(P, key_padding_mask, is_square=True)
    logs = flat.log()  # -inf for 0, NaN for a negative entry
    positive = real & (flat > 0)
    count = positive.sum(-1)
    mu = logs.where(positive, 0.0).sum(-1) / count
    sigma2 = (logs - mu[..., None]).where(positive, 0.0).square().sum(-1) / count
    return LogNormalFit(mu, sigma2, _ks_distance(logs, real, mu, sigma2.sqrt()))


def normality(x: Tensor, key_padding_mask: Tensor | None = None) -> NormalFit:
    """Fit a normal distribution to queries or keys x (..., N, D), pooled over the tokens and features of each head.

    The model of section 3 assumes N(0, σ²), and every prediction for P rests on it.
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
    """Return Q-Q data against the standard normal: theoretical quantiles and sample quantiles, each (points,).

    The values, a vector, are Gaussian if the points lie on a straight line. Its slope is σ, and its intercept μ. Useful
    values are ln P (see `log_entries`) and queries.
    """
    probabilities = (np.arange(points) + 0.5) / points
    return ndtri(probabilities), np.quantile(np.asarray(values, dtype=np.float64), probabilities)


def log_entries(P: Tensor, key_padding_mask: Tensor | None = None) -> np.ndarray:
    """Return ln of the positive entries between real tokens of all matrices, one vector for histograms and Q-Q data."""
    flat, real = _flatten_entries(P, key_padding_mask, is_square=True)
    return flat[real & (flat > 0)].log().cpu().numpy()


def softmax_moments(s: float, tokens: int) -> Moments:
    """Return the predicted moments of ln P of softmax attention, μ = -ln N - s/2 and σ² = s (Proposition 3.1).

    s is σ_q²σ_k² + C_cross, and `tokens` is N. The proposition neglects that the row's normalizer varies with |q_i|²:
    for Gaussian inputs of head dimension D that adds s²/(2D) to σ², 2 % at s = 1 and 12 % at s = 8 for D = 32. It also
    drops σ_Σ²/2 (`fenton_variance` of s and N terms) from μ: 0.05 at s = 4, N = 512.
    """
    return Moments(-math.log(tokens) - s / 2, s)


def fenton_variance(sigma2: float, terms: int) -> float:
    """Return σ_Σ² = ln((e^{σ²} - 1)/n + 1), the log-variance of a sum of n independent log-normals (Fenton 1960).

    This is eq. 28. It is good for σ² up to about 1.2, and too large beyond, where the largest term dominates the sum
    (A.6, Figure 6b).
    """
    return math.log1p(math.expm1(sigma2) / terms)


def _flatten_entries(x: Tensor, key_padding_mask: Tensor | None, is_square: bool) -> tuple[Tensor, Tensor]:
    """Return the entries of x (..., N, M) as a vector for each matrix, and which of them are real.

    Args:
        x: matrices.
        key_padding_mask: bool (B, N), True = padded, or None.
        is_square: True if the columns are tokens too, so that an entry is real only between two real tokens.

    Returns: the entries (..., N·M) in the dtype of the fits, and bool (..., N·M).
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
    """Return sup |F_n - Φ((· - mean)/std)|, (...), where F_n is the distribution of the real values of the last axis.

    values and real are (..., n), mean and std (...).
    """
    count = real.sum(-1, keepdim=True)
    ordered = values.where(real, torch.inf).sort(dim=-1).values  # padding comes last
    rank = torch.arange(values.shape[-1], device=values.device)
    theory = torch.special.ndtr((ordered - mean[..., None]) / std[..., None])
    steps = torch.maximum((rank + 1) / count - theory, theory - rank / count)
    return steps.where(rank < count, 0.0).amax(-1)
