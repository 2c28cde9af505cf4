"""Fits against scipy's, and the paper's closed forms on Gaussian inputs."""

import math

import pytest
import torch
from scipy import stats

from lln_fairseq.analysis import lognormal
from lln_fairseq.ops import reference
from tests.helpers import random_padding, random_qkv


def gaussian_inputs(s, length=512, dim=128, heads=6, seed=0):
    q, k, _ = random_qkv(batch=1, heads=heads, length=length, dim=dim, dtype=torch.float64, seed=seed)
    return 2 * math.sqrt(s) * q, k / 2  # σ_q and σ_k differ on purpose


@pytest.mark.parametrize("s", [0.1, 0.5, 1.0, 2.0, 4.0])
def test_softmax_of_gaussian_inputs_has_the_moments_of_proposition_3_1(s):
    dim, length = 128, 512
    fit = lognormal.lognormal_fit(reference.softmax_matrix(*gaussian_inputs(s, length, dim)))
    mu, sigma2 = lognormal.softmax_moments(s, length)
    # Four standard errors of the mean over heads, beside the normaliser's own variance that the docstring states.
    error = 4 * fit.sigma2.std() / math.sqrt(fit.sigma2.numel())
    assert abs(fit.sigma2.mean() - sigma2 - s**2 / (2 * dim)) < error
    assert error < 0.02 * s
    assert abs(fit.sigma2.mean() / sigma2 - 1) < 0.03
    assert abs(fit.mu.mean() - mu) < 0.01 + lognormal.fenton_variance(s, length) / 2
    assert fit.ks.max() < 0.03


def test_fit_is_scipys():
    q, k = gaussian_inputs(6.0, length=40, dim=8, heads=1)
    P = reference.softmax_matrix(q, k)
    fit = lognormal.lognormal_fit(P)
    logs = lognormal.log_entries(P)
    assert fit.mu.item() == pytest.approx(logs.mean())
    assert fit.sigma2.item() == pytest.approx(logs.var())
    expected = stats.kstest(P.flatten().numpy(), stats.lognorm(s=logs.std(), scale=math.exp(logs.mean())).cdf)
    assert fit.ks.item() == pytest.approx(expected.statistic)
    assert fit.ks.item() > 0.01  # a distance that could be wrong


def test_normality_is_scipys_and_tells_a_gaussian_from_a_uniform():
    generator = torch.Generator().manual_seed(3)
    x = torch.stack([torch.randn(200, 16, generator=generator), torch.rand(200, 16, generator=generator)])
    fit = lognormal.normality(x)
    for row, values in enumerate(x.double().flatten(1).numpy()):
        assert fit.skewness[row].item() == pytest.approx(stats.skew(values))
        assert fit.kurtosis[row].item() == pytest.approx(stats.kurtosis(values))
        expected = stats.kstest(values, stats.norm(values.mean(), values.std()).cdf).statistic
        assert fit.ks[row].item() == pytest.approx(expected)
    assert fit.ks[0] < 0.02 < 0.05 < fit.ks[1]


def test_padding_is_left_out():
    q, k, _ = random_qkv(batch=3, length=40, scale=1.5, dtype=torch.float64)
    mask = random_padding(3, 40, seed=1)
    assert mask.any()
    P = reference.softmax_matrix(q, k, mask)
    whole, spread = lognormal.lognormal_fit(P, mask), lognormal.normality(q, mask)
    for row in range(3):
        real = ~mask[row]
        alone = lognormal.lognormal_fit(P[row][:, real][:, :, real])
        torch.testing.assert_close(tuple(x[row] for x in whole), tuple(alone))
        torch.testing.assert_close(tuple(x[row] for x in spread), tuple(lognormal.normality(q[row][:, real])))
    real_pairs = (~mask).sum(1).square().sum().item() * 3
    assert len(lognormal.log_entries(P, mask)) == real_pairs


def test_zeros_count_in_the_distance_alone():
    q, k, _ = random_qkv(batch=1, heads=2, length=64, dtype=torch.float64)
    P = reference.block_diag_matrix(q, k, 16)
    fit = lognormal.lognormal_fit(P)
    logs = P[P > 0].log()
    assert fit.mu.mean().item() == pytest.approx(logs.mean().item())
    assert (fit.ks >= 0.75).all()
    assert lognormal.lognormal_fit(torch.zeros(1, 3, 3)).mu.isnan().all()


def test_qq_data_of_a_gaussian_is_a_line():
    generator = torch.Generator().manual_seed(0)
    theory, sample = lognormal.qq(3 + 2 * torch.randn(50_000, generator=generator))
    slope, intercept, r, *_ = stats.linregress(theory, sample)
    assert (slope, intercept) == (pytest.approx(2, rel=0.02), pytest.approx(3, rel=0.02))
    assert r > 0.999
    assert theory[0] == pytest.approx(-theory[-1])
    assert theory[-1] > 2
