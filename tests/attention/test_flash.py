"""FLASH against its formulas, computed for every pair of tokens separately."""

import pytest
import torch

from lln_fairseq.attention import Context, build_layer
from tests.ops.test_rotary import rotate_pairwise

DIM = 6
KEY_DIM = 4


def build(form, chunk_size, units=1):
    torch.manual_seed(0)
    layer = build_layer("flash", dim=DIM, form=form, chunk_size=chunk_size, key_dim=KEY_DIM, units=units)
    layer = layer.double().eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


def silu(x):
    return x / (1 + torch.exp(-x))


def layer_norm(x, norm):
    mean = x.mean(dim=1, keepdim=True)
    variance = x.var(dim=1, keepdim=True, unbiased=False)
    return (x - mean) / (variance + norm.eps).sqrt() * norm.weight + norm.bias


def pairwise_unit(unit, x, real, form, chunk):
    """Compute the unit for one sequence x (N, d), pair by pair. Return the rows of the real tokens, a list."""
    x = layer_norm(x, unit.layer_norm)
    u, v, z = (silu(x @ p.weight.T + p.bias) for p in (unit.gate_proj, unit.value_proj, unit.shared_proj))
    projections = [z * scale + offset for scale, offset in zip(unit.scales, unit.offsets, strict=True)]
    zero = torch.tensor(0.0, dtype=x.dtype)
    out = torch.zeros_like(x)
    for i in real:
        attended = torch.zeros_like(v[0])
        for j in real:
            q = rotate_pairwise(projections[0][i], i)
            k = rotate_pairwise(projections[1][j], j)
            distance = max(-(chunk - 1), min(chunk - 1, i - j))
            bias = unit.distance_bias[distance + chunk - 1]
            if form == "quadratic":
                attended = attended + max(q @ k / len(real) + bias, zero) ** 2 * v[j]
                continue
            if i // chunk == j // chunk:
                attended = attended + max(q @ k / chunk + bias, zero) ** 2 * v[j]
            q_linear = rotate_pairwise(projections[2][i], i)
            k_linear = rotate_pairwise(projections[3][j], j)
            attended = attended + q_linear @ k_linear / len(real) * v[j]
        out[i] = unit.out_proj.weight @ (u[i] * attended) + unit.out_proj.bias
    return out[real]


@pytest.mark.parametrize(("form", "chunk"), [("chunked", 4), ("chunked", 30), ("quadratic", 5), ("quadratic", 30)])
def test_layer_matches_pairwise_formula(form, chunk):
    layer = build(form, chunk)
    x = torch.randn(13, 2, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mask = torch.zeros(2, 13, dtype=torch.bool)
    mask[0, 10:] = True  # right padding
    mask[1, [0, 1, 6]] = True  # padding on the left and in the middle
    out = layer(x, Context(mask))
    for b in range(2):
        real = (~mask[b]).nonzero()[:, 0].tolist()
        sequence = x[:, b].masked_fill(mask[b][:, None], 0)
        expected = x[real, b] + pairwise_unit(layer.units[0], sequence, real, form, chunk)
        torch.testing.assert_close(out[real, b], expected)


def test_units_are_applied_in_turn_with_residuals():
    layer = build("chunked", 4, units=2)
    x = torch.randn(1, 9, DIM, dtype=torch.float64)
    first = x + layer.units[0](x, None)
    second = first + layer.units[1](first, None)
    torch.testing.assert_close(layer(x.transpose(0, 1)), second.transpose(0, 1))
