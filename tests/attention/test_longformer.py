"""Longformer against softmax written out pair by pair."""

import pytest
import torch

from lln_fairseq.attention import build_attention
from lln_fairseq.ops import reference
from tests.helpers import random_qkv


def build(window):
    return build_attention("longformer", num_heads=3, head_dim=32, max_positions=64, one_sided_window=window).eval()


def test_a_window_over_everything_is_softmax():
    q, k, v = random_qkv(length=40, dtype=torch.float64)
    mask = torch.arange(40) >= torch.tensor([40, 17])[:, None]
    for window in (39, 38, 500):
        allowed = torch.ones(40, 40, dtype=torch.bool)
        allowed[0, 39] = allowed[39, 0] = True  # the ends are further apart than 38, but token 0 is global
        expected = reference.softmax_matrix(q, k, mask, allowed) @ v
        torch.testing.assert_close(build(window)(q, k, v, mask), expected)


@pytest.mark.parametrize("window", [1, 4, 7, 8])
def test_pair_by_pair(window):
    q, k, v = random_qkv(length=23, dtype=torch.float64)
    mask = torch.zeros(2, 23, dtype=torch.bool)
    mask[0, 20:] = mask[1, :3] = True  # right padding, and left padding
    out = build(window)(q, k, v, mask)
    for b, (start, end) in enumerate([(0, 20), (3, 23)]):
        for i in range(start, end):
            keys = [j for j in range(start, end) if abs(i - j) <= window or start in (i, j)]
            weights = torch.softmax((k[b, :, keys] @ q[b, :, i, :, None])[..., 0] / 32**0.5, dim=-1)
            torch.testing.assert_close(out[b, :, i], (weights[:, None, :] @ v[b, :, keys])[:, 0])
