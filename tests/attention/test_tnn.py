"""TNN against dense Toeplitz matrices and its formulas."""

import pytest
import torch

from lln_fairseq.attention import Context, build_layer
from lln_fairseq.attention.baselines.tnn import EPSILON, toeplitz_product
from tests.helpers import FLOAT32_FORWARD, relative_rms

DIM = 4


def dense_toeplitz(weights, length):
    """Return the matrices T (E, N, N) with T_ij = t_{i-j}, for weights (2 N, E) in the layout of toeplitz_product."""
    matrix = torch.zeros(weights.shape[1], length, length, dtype=weights.dtype)
    for i in range(length):
        for j in range(length):
            matrix[:, i, j] = weights[(i - j) % (2 * length)]
    return matrix


@pytest.mark.parametrize("length", [1, 2, 7, 64, 97])
def test_fft_equals_product_with_dense_toeplitz_matrix(length):
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(2 * length, 5, generator=generator, dtype=torch.float64)
    v = torch.randn(3, length, 5, generator=generator, dtype=torch.float64)
    expected = torch.einsum("eij,bje->bie", dense_toeplitz(weights, length), v)
    torch.testing.assert_close(toeplitz_product(weights, v), expected)
    assert relative_rms(toeplitz_product(weights.float(), v.float()), expected) <= FLOAT32_FORWARD

    weights[length] = 1e6  # this row belongs to no distance
    torch.testing.assert_close(toeplitz_product(weights, v), expected, rtol=1e-6, atol=1e-6)


def norm(x):
    return x / (x.square().mean(dim=-1, keepdim=True) + EPSILON).sqrt()


def silu(x):
    return x / (1 + torch.exp(-x))


def linear(layer, x):
    return x @ layer.weight.T + layer.bias


def pairwise_layer(layer, x, real, gamma):
    """Compute the layer for one sequence x (N, d), pair by pair. Return the rows of the real tokens, a list."""
    toeplitz, gated = layer.units
    first, *rest = toeplitz.rpe.layers
    u = silu(linear(toeplitz.gate_proj, norm(x)))
    v = silu(linear(toeplitz.value_proj, norm(x)))
    mixed = torch.zeros_like(v)
    for i in real:
        for j in real:
            encoded = linear(first, torch.tensor([i - j], dtype=x.dtype))
            for rpe_layer in rest:
                encoded = linear(rpe_layer, norm(encoded).relu())
            mixed[i] = mixed[i] + gamma ** abs(i - j) * encoded * v[j]
    x = x + linear(toeplitz.out_proj, u * mixed)
    inner = silu(linear(gated.gate_proj, norm(x))) * linear(gated.value_proj, norm(x))
    return (x + linear(gated.out_proj, inner))[real]


@pytest.mark.parametrize(("gamma", "rpe_layers"), [(0.99, 6), (0.7, 0), (1.0, 1)])
def test_layer_matches_pairwise_formula(gamma, rpe_layers):
    torch.manual_seed(0)
    layer = build_layer("tnn", dim=DIM, gamma=gamma, rpe_layers=rpe_layers, rpe_dim=8).double().eval()
    x = torch.randn(11, 2, DIM, dtype=torch.float64)
    mask = torch.zeros(2, 11, dtype=torch.bool)
    mask[0, 8:] = True  # right padding
    mask[1, [0, 1, 6]] = True  # padding on the left and in the middle
    out = layer(x, Context(mask))
    for b in range(2):
        real = (~mask[b]).nonzero()[:, 0].tolist()
        torch.testing.assert_close(out[real, b], pairwise_layer(layer, x[:, b], real, gamma))


def test_mixing_weights_of_half_precision_model_are_float32():
    """Half precision cannot represent distances from 2,049 on."""
    torch.manual_seed(0)
    unit = build_layer("tnn", dim=DIM, gamma=1.0).half().units[0]
    weights = unit.mixing_weights(3000, torch.device("cpu"))
    assert weights.dtype == torch.float32
    assert torch.equal(weights, unit.float().mixing_weights(3000, torch.device("cpu")))
    assert (weights[2049] != weights[2048]).any()
