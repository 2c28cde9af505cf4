"""The rotary embedding against its definition, feature pair by feature pair."""

import math

import pytest
import torch

from lln_fairseq.ops.rotary import rotary_factors, rotate


def rotate_pairwise(x, position):
    """Rotate one vector (D,) by the angles of one position."""
    out = x.clone()
    half = len(x) // 2
    for f in range(half):
        angle = position * 10000 ** (-2 * f / len(x))
        out[f] = x[f] * math.cos(angle) - x[f + half] * math.sin(angle)
        out[f + half] = x[f] * math.sin(angle) + x[f + half] * math.cos(angle)
    return out


def test_vectors_are_rotated_by_the_angles_of_their_positions():
    x = torch.randn(5, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 1, 7, 500, 40_000])
    rotated = rotate(x, rotary_factors(positions[:, None], 6, torch.float64))
    for token, position in enumerate(positions.tolist()):
        for vector in range(3):
            torch.testing.assert_close(rotated[token, vector], rotate_pairwise(x[token, vector], position))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_exact_angles_of_distant_positions(dtype):
    x = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
    rotated = rotate(x, rotary_factors(torch.tensor(40_001), 8, torch.float32))
    assert rotated.dtype == dtype
    expected = rotate_pairwise(x.double(), 40_001)
    torch.testing.assert_close(rotated.double(), expected, rtol=0, atol=2 * torch.finfo(dtype).eps)
