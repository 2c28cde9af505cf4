"""The measures of concentration against closed forms, definitions and the theorems of the paper."""

import math

import pytest
import torch

from lln_fairseq.analysis import (
    entropy,
    linear_spectral_gap,
    spectral_gap,
    variance,
)
from lln_fairseq.attention import ATTENTION_REGISTRY, Attention, Context, build_attention
from lln_fairseq.ops.reference import lln_matrix, softmax_matrix
from tests.helpers import random_padding, random_qkv

LINEAR = [name for name, entry in ATTENTION_REGISTRY.items() if entry.cls.feature_maps is not Attention.feature_maps]


def softmax_at(temperature, seed=0, dim=64, length=80):
    q, k, _ = random_qkv(length=length, dim=dim, dtype=torch.float64, seed=seed)
    return softmax_matrix(q, k / temperature)


@pytest.mark.parametrize("n", [1, 2, 64])
def test_uniform_matrix(n):
    P = torch.full((2, 3, n, n), 1 / n)
    torch.testing.assert_close(entropy(P), torch.full((2, 3), math.log2(n)))
    torch.testing.assert_close(spectral_gap(P), torch.ones(2, 3, dtype=torch.float64))
    torch.testing.assert_close(variance(P), torch.zeros(2, 3))


def test_identity():
    P = torch.eye(50, dtype=torch.float64)
    assert entropy(P) == spectral_gap(P) == 0
    assert variance(P) == pytest.approx(1 / 50 - 1 / 50**2)


@pytest.mark.parametrize(("a", "b"), [(0.3, 0.2), (0.9, 0.8)])
def test_spectral_gap_of_two_states(a, b):
    """The eigenvalues are 1 and 1 - a - b, which is negative in the second case."""
    P = torch.tensor([[1 - a, a], [b, 1 - b]], dtype=torch.float64)
    assert spectral_gap(P) == pytest.approx(1 - abs(1 - a - b))


def test_cyclic_permutation_has_no_gap_and_no_entropy():
    """Its three eigenvalues have modulus 1, and two of them are complex."""
    P = torch.tensor([[0.0, 1, 0], [0, 0, 1], [1, 0, 0]])
    assert spectral_gap(P) == pytest.approx(0, abs=1e-12)
    assert entropy(P) == 0


@pytest.mark.parametrize(("measure", "sign"), [(entropy, 1), (variance, -1)])
def test_measure_is_monotone_in_the_temperature(measure, sign):
    """Theorems 3.2 and 3.4."""
    values = torch.stack([measure(softmax_at(temperature)) for temperature in (0.05, 0.2, 0.5, 1, 2, 5, 20)])
    assert (sign * values.diff(dim=0) > 0).all()


def test_entropy_at_high_temperature_is_nearly_that_of_the_uniform_matrix():
    assert (entropy(softmax_at(20)) > 0.999 * math.log2(80)).all()


def test_half_precision_is_measured_in_float32():
    P = torch.randn(4, 3000, generator=torch.Generator().manual_seed(0)).softmax(dim=-1).half()
    assert entropy(P).dtype == torch.float32
    assert entropy(P) == pytest.approx(entropy(P.double()).item(), rel=1e-5)


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("length", [1, 20, 150])
def test_features_give_the_matrix_and_its_spectral_gap(name, length):
    """For sequences with fewer and with more tokens than features."""
    torch.manual_seed(0)
    attention = build_attention(name, num_heads=3, head_dim=32, max_positions=200).double().eval()
    q, k, _ = random_qkv(length=length, dtype=torch.float64, scale=1.5)
    for mask in (None, random_padding(2, length, full_row=True)):
        phi_q, phi_k = attention.feature_maps(q, k, Context(mask))
        P = attention.attention_matrix(q, k, Context(mask))
        kernel = phi_q @ phi_k.mT
        if mask is not None:
            kernel = kernel.masked_fill(mask[:, None, None, :], 0.0)
        torch.testing.assert_close((kernel / kernel.sum(dim=-1, keepdim=True)).nan_to_num(), P)
    phi_q, phi_k = attention.feature_maps(q, k)
    expected = spectral_gap(attention.attention_matrix(q, k))
    torch.testing.assert_close(linear_spectral_gap(phi_q, phi_k), expected, rtol=0, atol=1e-8)


def test_linear_spectral_gap_with_extreme_inputs():
    """Exponents of several hundreds neither overflow nor change the result."""
    attention = build_attention("lln", num_heads=3, head_dim=32, max_positions=200, alpha=8.0, beta=8.0)
    q, k, _ = random_qkv(length=130, dtype=torch.float64, scale=30.0)
    gap = linear_spectral_gap(*attention.feature_maps(q, k))
    torch.testing.assert_close(gap, spectral_gap(lln_matrix(q, k, 8.0, 8.0)), rtol=0, atol=1e-8)


def test_matrix_that_is_not_finite_has_no_gap():
    P = torch.stack([torch.eye(4), torch.full((4, 4), torch.nan)])
    torch.testing.assert_close(spectral_gap(P), torch.tensor([0.0, torch.nan]).double(), equal_nan=True)
