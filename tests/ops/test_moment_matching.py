"""α and β: the variances that they match, what they depend on, and the shipped table."""

import math

import pytest
import torch

from lln_fairseq.ops import moment_matching as mm
from lln_fairseq.ops import reference
from tests.helpers import HEAD_DIMS, random_padding, random_qkv, with_representatives


def scale_inputs(q, k, s):
    """Return standard normal q and k with σ_q² σ_k² = s. σ_q and σ_k differ, for only their product may matter."""
    return 3 * math.sqrt(s) * q, k / 3


def matched_matrix(q, k):
    """Return the matrix of LLN attention with matched α and β."""
    alpha, beta = mm.match_moments(q, k)
    phi_q = (reference.per_head(alpha, q) * q).exp()
    phi_k = (reference.per_head(beta, k) * k).exp()
    return reference.kernel_matrix(phi_q, phi_k)


@pytest.mark.parametrize("dim", with_representatives(HEAD_DIMS, 64))
def test_matched_variance_is_within_5_percent_of_softmax(dim):
    q, k, _ = random_qkv(batch=1, heads=8, length=1024, dim=dim, dtype=torch.float64, seed=dim + 1)
    for s in (0.05, 0.2, 1.0, 2.0, 4.0, 8.0):
        scaled_q, scaled_k = scale_inputs(q, k, s)
        lln = matched_matrix(scaled_q, scaled_k).log().var()
        softmax = reference.softmax_matrix(scaled_q, scaled_k).log().var()
        assert abs(lln / softmax - 1) < 0.05, f"s = {s}"


def test_paper_constants_follow_the_papers_line():
    q, k, _ = random_qkv(length=200)
    alpha, beta = mm.match_moments(q, k, constants="paper")
    sigma_q = q.std(dim=(2, 3), correction=0)
    sigma_k = k.std(dim=(2, 3), correction=0)
    sigma2 = (sigma_q**2 * sigma_k**2 + 0.35487039130661086) / 0.14855178144710912
    torch.testing.assert_close(alpha, (sigma2 / 2).sqrt() / sigma_q)
    torch.testing.assert_close(beta, (sigma2 / 2).sqrt() / sigma_k)


def test_scope_head_ignores_other_sequences_and_padding():
    q, k, _ = random_qkv(batch=3, length=50)
    mask = random_padding(3, 50)
    alpha, beta = mm.match_moments(q, k, mask)
    for row in range(3):
        real = ~mask[row]
        expected_alpha, expected_beta = mm.match_moments(q[row : row + 1, :, real], k[row : row + 1, :, real])
        torch.testing.assert_close(alpha[row : row + 1], expected_alpha)
        torch.testing.assert_close(beta[row : row + 1], expected_beta)


def test_scope_batch_is_one_pair_over_the_real_tokens():
    q, k, _ = random_qkv(batch=3, length=50)
    mask = random_padding(3, 50)
    alpha, _ = mm.match_moments(q, k, mask, scope="batch")
    sigma_q, sigma_k = (x.transpose(1, 2)[~mask].std(correction=0) for x in (q, k))
    log_sigma2 = mm.interpolate(2 * (sigma_q * sigma_k).log(), *mm.calibration_table(q.shape[-1], q.device))
    torch.testing.assert_close(alpha, ((log_sigma2 / 2).exp() / (math.sqrt(2) * sigma_q)).expand(3, 3))


@pytest.mark.parametrize("scope", mm.SCOPES)
def test_large_mean_costs_no_digits(scope):
    q, k, _ = random_qkv(length=70, dim=32)
    mask = random_padding(2, 70)
    q = q + 1000
    k = k - 1000
    expected = mm.match_moments(q.double() - 1000, k.double() + 1000, mask, scope)
    for backend in ("torch", "auto", "triton"):
        actual = mm.match_moments(q, k, mask, scope, backend=backend)
        for x, y in zip(actual, expected, strict=True):
            torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=0)


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1e2])
def test_alpha_and_beta_are_finite_and_positive(scale):
    q, k, _ = random_qkv(length=9, scale=scale)
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[1] = True
    for backend in ("auto", "triton"):
        for x in mm.match_moments(q, k, mask, backend=backend):
            assert x.isfinite().all()
            assert (x > 0).all()
            assert not x.requires_grad


def test_smaller_simulation_reproduces_shipped_table():
    """It has another seed, so it differs by the sampling error."""
    log_s, log_sigma2 = mm.simulate_table(32, tokens=512, heads=8, seed=5)
    shipped_log_s, shipped_log_sigma2 = mm.calibration_table(32)
    assert (torch.tensor(log_s) - shipped_log_s).abs().max() < 1e-4
    assert (torch.tensor(log_sigma2) - shipped_log_sigma2).abs().max() < 0.1


def test_table_of_another_head_dimension_is_simulated_once(monkeypatch):
    simulated = []

    def simulate(dim):
        simulated.append(dim)
        return [0.0, 1.0], [0.5, 1.5]

    monkeypatch.setattr(mm, "simulate_table", simulate)
    q, k, _ = random_qkv(length=9, dim=24)
    mm.calibration_table.cache_clear()
    first = mm.match_moments(q, k)
    second = mm.match_moments(q, k)
    mm.calibration_table.cache_clear()

    assert torch.equal(torch.stack(first), torch.stack(second))
    assert simulated == [24]
