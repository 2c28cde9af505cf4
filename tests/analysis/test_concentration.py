"""The instruments of concentration against closed forms, definitions and the theorems of the paper."""

import math

import pytest
import torch

from lln_fairseq.analysis import (
    entropy,
    linear_spectral_gap,
    spectral_gap,
    variance,
)
from lln_fairseq.attention import ATTENTION_REGISTRY, Attention, build_attention
from lln_fairseq.ops.reference import lln_matrix, softmax_matrix
from tests.helpers import random_padding, random_qkv

OF_A_MATRIX = [entropy, variance, spectral_gap]


def softmax_at(temperature, seed=0, dim=64, length=80):
    q, k, _ = random_qkv(length=length, dim=dim, dtype=torch.float64, seed=seed)
    return softmax_matrix(q, k / temperature)


@pytest.mark.parametrize("n", [1, 2, 64])
def test_the_uniform_matrix(n):
    P = torch.full((2, 3, n, n), 1 / n)
    torch.testing.assert_close(entropy(P), torch.full((2, 3), math.log2(n)))
    torch.testing.assert_close(spectral_gap(P), torch.ones(2, 3, dtype=torch.float64))
    torch.testing.assert_close(variance(P), torch.zeros(2, 3))


def test_the_identity():
    P = torch.eye(50, dtype=torch.float64)
    assert entropy(P) == spectral_gap(P) == 0
    assert variance(P) == pytest.approx(1 / 50 - 1 / 50**2)


def test_a_chain_with_known_eigenvalues():
    for a, b in [(0.3, 0.2), (0.9, 0.8)]:  # eigenvalues 1 and 1 - a - b, once negative
        P = torch.tensor([[1 - a, a], [b, 1 - b]], dtype=torch.float64)
        assert spectral_gap(P) == pytest.approx(1 - abs(1 - a - b))
    turn = torch.tensor([[0.0, 1, 0], [0, 0, 1], [1, 0, 0]])  # three eigenvalues of modulus 1, two of them complex
    assert spectral_gap(turn) == pytest.approx(0, abs=1e-12)
    assert entropy(turn) == 0


def test_entropy_and_variance_are_monotone_in_the_temperature():
    """Theorems 3.2 and 3.4"""
    temperatures = [0.05, 0.2, 0.5, 1, 2, 5, 20]
    matrices = [softmax_at(t) for t in temperatures]
    for instrument, sign in ((entropy, 1), (variance, -1)):
        steps = torch.stack([instrument(P) for P in matrices]).diff(dim=0) * sign
        assert (steps > 0).all()
    assert (entropy(matrices[-1]) > 0.999 * math.log2(80)).all()


@pytest.mark.parametrize("instrument", OF_A_MATRIX)
def test_padding_does_not_count(instrument):
    lengths = (23, 64, 0)
    mask = torch.arange(64) >= torch.tensor(lengths)[:, None]
    q, k, _ = random_qkv(batch=3, length=64, dtype=torch.float64)
    P = softmax_matrix(q, k, mask)
    found = instrument(P, mask)
    assert found.shape == (3, 3)
    for row, length in enumerate(lengths[:2]):
        torch.testing.assert_close(found[row], instrument(P[row, :, :length, :length]))
    assert found[2].isnan().all()
    torch.testing.assert_close(instrument(P[:, 0], mask), found[:, 0], equal_nan=True)


def test_half_precision_is_measured_in_float32():
    P = torch.randn(4, 3000, generator=torch.Generator().manual_seed(0)).softmax(dim=-1).half()
    assert entropy(P).dtype == torch.float32
    assert entropy(P) == pytest.approx(entropy(P.double()).item(), rel=1e-5)


LINEAR = [name for name, entry in ATTENTION_REGISTRY.items() if entry.cls.feature_maps is not Attention.feature_maps]


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("length", [1, 20, 150])
def test_features_give_the_matrix_and_its_exact_gap(name, length):
    """Every mechanism with `feature_maps`; sequences shorter and longer than it has features."""
    torch.manual_seed(0)
    attention = build_attention(name, num_heads=3, head_dim=32, max_positions=200).double().eval()
    q, k, _ = random_qkv(length=length, dtype=torch.float64, scale=1.5)
    mask = random_padding(2, length, full_row=True)
    for padding in (None, mask):
        phi_q, phi_k = attention.feature_maps(q, k, padding)
        P = attention.attention_matrix(q, k, padding)
        kernel = phi_q @ phi_k.mT
        if padding is not None:
            kernel = kernel.masked_fill(padding[:, None, None, :], 0.0)
        torch.testing.assert_close((kernel / kernel.sum(dim=-1, keepdim=True)).nan_to_num(), P)
        found = linear_spectral_gap(phi_q, phi_k, padding)
        torch.testing.assert_close(found, spectral_gap(P, padding), rtol=0, atol=1e-8, equal_nan=True)


def test_the_exact_gap_of_lln_at_extreme_inputs():
    """The stable form: exponents of several hundreds neither overflow nor change the result."""
    attention = build_attention("lln", num_heads=3, head_dim=32, max_positions=200, alpha=8.0, beta=8.0)
    q, k, _ = random_qkv(length=130, dtype=torch.float64, scale=30.0)
    found = linear_spectral_gap(*attention.feature_maps(q, k))
    torch.testing.assert_close(found, spectral_gap(lln_matrix(q, k, 8.0, 8.0)), rtol=0, atol=1e-8)


def test_a_matrix_that_is_not_finite_has_no_gap():
    P = torch.stack([torch.eye(4), torch.full((4, 4), torch.nan)])
    torch.testing.assert_close(spectral_gap(P), torch.tensor([0.0, torch.nan]).double(), equal_nan=True)
