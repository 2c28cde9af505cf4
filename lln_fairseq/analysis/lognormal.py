"""Is an attention matrix log-normal, are queries and keys Gaussian: fits, distances, Q-Q data, predicted moments.

A matrix P has shape (..., N, N), queries and keys (..., N, D); a key padding mask is bool (B, N), True = padded, with
B the first axis of what it masks. Padded rows and columns are left out. Every fit is one number for each matrix, of
shape (...), in float64 except on devices that have none, without gradient.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor


class LogNormalFit(NamedTuple):
    """ln P ~ N(μ, σ²) and the Kolmogorov-Smirnov distance between P and that log-normal distribution, in [0, 1]."""

    mu: Tensor
    sigma2: Tensor
    ks: Tensor


class NormalFit(NamedTuple):
    """Moments (skewness and excess kurtosis are 0 for a Gaussian) and the KS distance to N(mean, std²), in [0, 1]."""

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
    """μ and σ² of ln P over the entries of each matrix, and how far P is from that log-normal (Proposition 3.1).

    A log-normal variable is never 0. Entries that are 0 (outside the blocks of block-diagonal attention, for ReLU
    features, or by underflow) have no logarithm: μ and σ² are those of the positive entries, while the distance counts
    the zeros, so that it is at least their share. NaN for a matrix without a positive entry.
    """
    flat, real = _flat(P, key_padding_mask, square=True)
    logs = flat.log()  # -inf for 0; a negative entry is no probability and gives NaN
    positive = real & (flat > 0)
    count = positive.sum(-1)
    mu = logs.where(positive, 0.0).sum(-1) / count
    sigma2 = (logs - mu[..., None]).where(positive, 0.0).square().sum(-1) / count
    return LogNormalFit(mu, sigma2, _ks_distance(logs, real, mu, sigma2.sqrt()))


def normality(x: Tensor, key_padding_mask: Tensor | None = None) -> NormalFit:
    """How Gaussian the entries of queries or keys x (..., N, D) are, pooled over tokens and features of each head.

    The model of section 3 takes them for N(0, σ²); every prediction for P rests on it.
    """
    flat, real = _flat(x, key_padding_mask, square=False)
    count = real.sum(-1)

    def average(values: Tensor) -> Tensor:
        return values.where(real, 0.0).sum(-1) / count

    mean = average(flat)
    centred = flat - mean[..., None]
    std = average(centred.square()).sqrt()
    z = centred / std[..., None]
    return NormalFit(mean, std, average(z**3), average(z**4) - 3, _ks_distance(flat, real, mean, std))


def qq(values: Tensor | np.ndarray, points: int = 99) -> tuple[np.ndarray, np.ndarray]:
    """Q-Q data against the standard normal: theoretical and sample quantiles, each (points,).

    Give ln P (`log_entries`) or queries, flattened. On a straight line of slope σ through (0, μ) they are Gaussian.
    """
    probabilities = (np.arange(points) + 0.5) / points
    return ndtri(probabilities), np.quantile(np.asarray(values, dtype=np.float64), probabilities)


def log_entries(P: Tensor, key_padding_mask: Tensor | None = None) -> np.ndarray:
    """ln of the positive entries between real tokens of all matrices, one vector: for histograms and Q-Q plots."""
    flat, real = _flat(P, key_padding_mask, square=True)
    return flat[real & (flat > 0)].log().cpu().numpy()


def softmax_moments(s: float, tokens: int) -> Moments:
    """μ = -ln N - s/2, σ² = s of ln P of softmax attention, s = σ_q²σ_k² + C_cross (Proposition 3.1).

    The proposition leaves out that the row's normaliser varies with |q_i|². For Gaussian inputs of head dimension D
    that adds s²/(2D) to σ²: 2 % at s = 1, 12 % at s = 8 for D = 32. It also drops σ_Σ²/2 (`fenton_variance` of s and
    N terms) from μ: 0.05 at s = 4, N = 512.
    """
    return Moments(-math.log(tokens) - s / 2, s)


def fenton_variance(sigma2: float, terms: int) -> float:
    """σ_Σ² = ln((e^{σ²} - 1)/n + 1), the log-variance of a sum of n independent log-normals (Fenton 1960; eq. 28).

    Good for σ² up to about 1.2; beyond, it overestimates, since the largest term dominates the sum (A.6, Figure 6b).
    """
    return math.log1p(math.expm1(sigma2) / terms)


def _flat(x: Tensor, key_padding_mask: Tensor | None, square: bool) -> tuple[Tensor, Tensor]:
    """x (..., N, M) as (..., N*M) in double precision, and which entries are between real tokens."""
    x = x.detach().to(torch.float32 if x.device.type == "mps" else torch.float64)
    if key_padding_mask is None:
        real = torch.ones((), dtype=torch.bool, device=x.device).expand(x.shape)
    else:
        tokens = ~key_padding_mask.reshape(len(key_padding_mask), *[1] * (x.dim() - 3), -1)
        real = tokens[..., :, None] & (tokens[..., None, :] if square else True)
        real = real.expand(x.shape)
    return x.flatten(-2), real.flatten(-2)


def _ks_distance(values: Tensor, real: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """sup |F_n - Φ((· - mean)/std)| over the real entries of the last axis."""
    count = real.sum(-1, keepdim=True)
    ordered = values.where(real, torch.inf).sort(dim=-1).values  # what is not real goes to the end
    rank = torch.arange(values.shape[-1], device=values.device)
    theory = torch.special.ndtr((ordered - mean[..., None]) / std[..., None])
    steps = torch.maximum((rank + 1) / count - theory, theory - rank / count)
    return steps.where(rank < count, 0.0).amax(-1)
