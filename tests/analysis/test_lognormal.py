"""Fits against those of scipy, and the paper's closed forms for Gaussian inputs."""

import math

import pytest
import torch
from scipy import stats

from lln_fairseq.analysis import lognormal
from lln_fairseq.ops import reference
from tests.helpers import random_qkv


def gaussian_inputs(s, length=512, dim=128, heads=6, seed=0):
    """Return q and k with σ_q² σ_k² = s. σ_q and σ_k differ, for only their product may matter."""
    q, k, _ = random_qkv(batch=1, heads=heads, length=length, dim=dim, dtype=torch.float64, seed=seed)
    return 2 * math.sqrt(s) * q, k / 2


@pytest.mark.parametrize("s", [0.1, 0.5, 1.0, 2.0, 4.0])
def test_softmax_of_gaussian_inputs_has_the_moments_of_proposition_3_1(s):
    dim = 128
    length = 512
    fit = lognormal.lognormal_fit(reference.softmax_matrix(*gaussian_inputs(s, length, dim)))
    mu, sigma2 = lognormal.softmax_moments(s, length)

    # Four standard errors of the mean over heads, after the variance of the normalizer that the docstring states.
    error = 4 * fit.sigma2.std() / math.sqrt(fit.sigma2.numel())
    assert abs(fit.sigma2.mean() - sigma2 - s**2 / (2 * dim)) < error
    assert error < 0.02 * s
    assert abs(fit.sigma2.mean() / sigma2 - 1) < 0.03
    assert abs(fit.mu.mean() - mu) < 0.01 + lognormal.fenton_variance(s, length) / 2
    assert fit.ks.max() < 0.03


def test_lognormal_fit_equals_scipy():
    q, k = gaussian_inputs(6.0, length=40, dim=8, heads=1)
    P = reference.softmax_matrix(q, k)

    fit = lognormal.lognormal_fit(P)
    logs = lognormal.log_entries(P)

    assert fit.mu.item() == pytest.approx(logs.mean())
    assert fit.sigma2.item() == pytest.approx(logs.var())
    expected = stats.kstest(P.flatten().numpy(), stats.lognorm(s=logs.std(), scale=math.exp(logs.mean())).cdf)
    assert fit.ks.item() == pytest.approx(expected.statistic)
    assert fit.ks.item() > 0.01  # large enough that a wrong distance would differ


def test_normality_equals_scipy_and_distinguishes_gaussian_from_uniform():
    generator = torch.Generator().manual_seed(3)
    x = torch.stack([torch.randn(200, 16, generator=generator), torch.rand(200, 16, generator=generator)])

    fit = lognormal.normality(x)

    for row, values in enumerate(x.double().flatten(1).numpy()):
        assert fit.skewness[row].item() == pytest.approx(stats.skew(values))
        assert fit.kurtosis[row].item() == pytest.approx(stats.kurtosis(values))
        expected = stats.kstest(values, stats.norm(values.mean(), values.std()).cdf).statistic
        assert fit.ks[row].item() == pytest.approx(expected)
    assert fit.ks[0] < 0.02
    assert fit.ks[1] > 0.05


def test_zeros_count_only_in_the_distance():
    q, k, _ = random_qkv(batch=1, heads=2, length=64, dtype=torch.float64)
    P = reference.block_diag_matrix(q, k, 16)
    fit = lognormal.lognormal_fit(P)
    assert fit.mu.mean().item() == pytest.approx(P[P > 0].log().mean().item())
    assert (fit.ks >= 0.75).all()


def test_matrix_of_zeros_has_no_fit():
    assert lognormal.lognormal_fit(torch.zeros(1, 3, 3)).mu.isnan().all()


def test_qq_data_of_a_gaussian_is_a_line():
    generator = torch.Generator().manual_seed(0)
    theory, sample = lognormal.qq(3 + 2 * torch.randn(50_000, generator=generator))
    slope, intercept, correlation, *_ = stats.linregress(theory, sample)
    assert slope == pytest.approx(2, rel=0.02)
    assert intercept == pytest.approx(3, rel=0.02)
    assert correlation > 0.999
    assert theory[0] == pytest.approx(-theory[-1])
    assert theory[-1] > 2
