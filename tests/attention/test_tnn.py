"""TNN against dense Toeplitz matrices and its formulas."""

import pytest
import torch

from lln_fairseq.attention import build_layer
from lln_fairseq.attention.tnn import EPSILON, toeplitz_product
from tests.helpers import FLOAT32_FORWARD, relative_rms

DIM = 4


def dense(weights, length):
    """T (E, N, N) of t_0 ... t_{N-1}, anything, t_{-N+1} ... t_{-1} (2 N, E), entry by entry."""
    matrix = torch.zeros(weights.shape[1], length, length, dtype=weights.dtype)
    for i in range(length):
        for j in range(length):
            matrix[:, i, j] = weights[i - j] if i >= j else weights[2 * length + i - j]
    return matrix


@pytest.mark.parametrize("length", [1, 2, 7, 64, 97])
def test_the_fft_is_a_product_with_a_dense_toeplitz_matrix(length):
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(2 * length, 5, generator=generator, dtype=torch.float64)
    v = torch.randn(3, length, 5, generator=generator, dtype=torch.float64)
    expected = torch.einsum("eij,bje->bie", dense(weights, length), v)
    torch.testing.assert_close(toeplitz_product(weights, v), expected)
    assert relative_rms(toeplitz_product(weights.float(), v.float()), expected) <= FLOAT32_FORWARD
    weights[length] = 1e6  # of no distance
    torch.testing.assert_close(toeplitz_product(weights, v), expected, rtol=1e-6, atol=1e-6)


def norm(x):
    return x / (x.square().mean(dim=-1, keepdim=True) + EPSILON).sqrt()


def silu(x):
    return x / (1 + torch.exp(-x))


def linear(layer, x):
    return x @ layer.weight.T + layer.bias


def plain_layer(layer, x, real, gamma):
    """One sequence x (N, d) whose tokens `real`, a list, are no padding -> (N, d) at these."""
    toeplitz, gated = layer.units
    u, v = (silu(linear(proj, norm(x))) for proj in (toeplitz.gate_proj, toeplitz.value_proj))
    mixed = torch.zeros_like(v)
    for i in real:
        for j in real:
            encoded = linear(toeplitz.rpe.layers[0], torch.tensor([i - j], dtype=x.dtype))
            for one in list(toeplitz.rpe.layers)[1:]:
                encoded = linear(one, norm(encoded).relu())
            mixed[i] = mixed[i] + gamma ** abs(i - j) * encoded * v[j]
    x = x + linear(toeplitz.out_proj, u * mixed)
    inner = silu(linear(gated.gate_proj, norm(x))) * linear(gated.value_proj, norm(x))
    return (x + linear(gated.out_proj, inner))[real]


@pytest.mark.parametrize(("gamma", "rpe_layers"), [(0.99, 6), (0.7, 0), (1.0, 1)])
def test_pair_by_pair(gamma, rpe_layers):
    torch.manual_seed(0)
    layer = build_layer("tnn", dim=DIM, gamma=gamma, rpe_layers=rpe_layers, rpe_dim=8).double().eval()
    x = torch.randn(11, 2, DIM, dtype=torch.float64)
    mask = torch.zeros(2, 11, dtype=torch.bool)
    mask[0, 8:] = mask[1, :2] = mask[1, 6] = True  # at the right, at the left and in between
    out = layer(x, mask)
    for b in range(2):
        real = (~mask[b]).nonzero()[:, 0].tolist()
        torch.testing.assert_close(out[real, b], plain_layer(layer, x[:, b], real, gamma))


def test_weights_in_half_precision_are_those_of_float32():
    """Distances from 2,049 on are no numbers of half precision."""
    torch.manual_seed(0)
    unit = build_layer("tnn", dim=DIM, gamma=1.0).half().units[0]
    found = unit.mixing_weights(3000, torch.device("cpu"))
    assert found.dtype == torch.float32
    assert torch.equal(found, unit.float().mixing_weights(3000, torch.device("cpu")))
    assert (found[2049] != found[2048]).any()


def test_only_distances_count():
    """A sequence behind padding has the outputs that it has at the start."""
    torch.manual_seed(0)
    layer, x = build_layer("tnn", dim=DIM).eval(), torch.randn(20, 1, DIM)
    mask = torch.arange(32)[None] < 12
    shifted = layer(torch.cat([torch.zeros(12, 1, DIM), x]), mask)[12:]
    torch.testing.assert_close(shifted, layer(x), rtol=1e-5, atol=1e-5)
