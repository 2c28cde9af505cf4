"""The rotary embedding against its definition, feature pair by feature pair."""

import math

import pytest
import torch

from lln_fairseq.ops.rotary import extend_base, rotary_factors, rotate


def rotate_pairwise(x, position, base=10000):
    """Rotate one vector (D,) by the angles of one position."""
    out = x.clone()
    half = len(x) // 2
    for f in range(half):
        angle = position * base ** (-2 * f / len(x))
        out[f] = x[f] * math.cos(angle) - x[f + half] * math.sin(angle)
        out[f + half] = x[f] * math.sin(angle) + x[f + half] * math.cos(angle)
    return out


@pytest.mark.parametrize("base", [10000, 500])
def test_vectors_are_rotated_by_the_angles_of_their_positions(base):
    x = torch.randn(5, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 1, 7, 500, 40_000])
    rotated = rotate(x, rotary_factors(positions[:, None], 6, torch.float64, base))
    for token, position in enumerate(positions.tolist()):
        for vector in range(3):
            torch.testing.assert_close(rotated[token, vector], rotate_pairwise(x[token, vector], position, base))


def test_extended_base_slows_down_the_slowest_rotation():
    frequencies = []
    for base in (10000, extend_base(10000, 8, 3)):
        cos, sin = rotary_factors(torch.tensor(1), 8, torch.float64, base)
        frequencies.append(torch.atan2(sin, cos))
    assert frequencies[1][0] == frequencies[0][0]
    assert frequencies[1][-1].item() == pytest.approx(frequencies[0][-1].item() / 3)
    assert extend_base(10000, 8, 0.5) == 10000


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_exact_angles_of_distant_positions(dtype):
    x = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
    rotated = rotate(x, rotary_factors(torch.tensor(40_001), 8, torch.float32))
    assert rotated.dtype == dtype
    expected = rotate_pairwise(x.double(), 40_001)
    torch.testing.assert_close(rotated.double(), expected, rtol=0, atol=2 * torch.finfo(dtype).eps)
