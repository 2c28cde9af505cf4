"""FLASH against its formulas, pair by pair."""

import pytest
import torch

from lln_fairseq.attention import build_layer

DIM, KEY = 6, 4


def build(form, chunk_size, units=1):
    torch.manual_seed(0)
    layer = build_layer("flash", dim=DIM, form=form, chunk_size=chunk_size, key_dim=KEY, units=units).double().eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


def silu(x):
    return x / (1 + torch.exp(-x))


def turned(x, position):
    """Rotary embedding of one vector, pair by pair."""
    out, half = x.clone(), len(x) // 2
    for f in range(half):
        angle = torch.tensor(position * 10000.0 ** (-2 * f / len(x)), dtype=x.dtype)
        out[f] = x[f] * angle.cos() - x[f + half] * angle.sin()
        out[f + half] = x[f] * angle.sin() + x[f + half] * angle.cos()
    return out


def plain_unit(unit, x, real, form, chunk):
    """One sequence x (N, d) whose tokens `real`, a list, are no padding -> (N, d) at these."""
    mean, variance = x.mean(dim=1, keepdim=True), x.var(dim=1, keepdim=True, unbiased=False)
    x = (x - mean) / (variance + unit.layer_norm.eps).sqrt() * unit.layer_norm.weight + unit.layer_norm.bias
    u, v, z = (silu(x @ p.weight.T + p.bias) for p in (unit.gate_proj, unit.value_proj, unit.shared_proj))
    kinds = [z * scale + offset for scale, offset in zip(unit.scales, unit.offsets, strict=True)]
    out = torch.zeros_like(x)
    for i in real:
        attended = torch.zeros_like(v[0])
        for j in real:
            q, k, *linear = (turned(kind[at], at) for kind, at in zip(kinds, (i, j, i, j), strict=False))
            distance = max(-(chunk - 1), min(chunk - 1, i - j))
            bias = unit.distance_bias[distance + chunk - 1]
            if form == "quadratic" or i // chunk == j // chunk:
                score = q @ k / (len(real) if form == "quadratic" else chunk)
                attended = attended + max(score + bias, torch.tensor(0.0, dtype=x.dtype)) ** 2 * v[j]
            if linear:
                attended = attended + linear[0] @ linear[1] / len(real) * v[j]
        out[i] = unit.out_proj.weight @ (u[i] * attended) + unit.out_proj.bias
    return out[real]


@pytest.mark.parametrize(("form", "chunk"), [("chunked", 4), ("chunked", 30), ("quadratic", 5), ("quadratic", 30)])
def test_pair_by_pair(form, chunk):
    layer = build(form, chunk)
    x = torch.randn(13, 2, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mask = torch.zeros(2, 13, dtype=torch.bool)
    mask[0, 10:] = mask[1, :2] = mask[1, 6] = True  # at the right, at the left and in between
    out = layer(x, mask)
    for b in range(2):
        real = (~mask[b]).nonzero()[:, 0].tolist()
        expected = x[real, b] + plain_unit(layer.units[0], x[:, b].masked_fill(mask[b][:, None], 0), real, form, chunk)
        torch.testing.assert_close(out[real, b], expected)


def test_a_second_unit_adds_to_the_first():
    layer = build("chunked", 4, units=2)
    x = torch.randn(9, 1, DIM, dtype=torch.float64)
    first = x.transpose(0, 1) + layer.units[0](x.transpose(0, 1), None)
    torch.testing.assert_close(layer(x), (first + layer.units[1](first, None)).transpose(0, 1))
