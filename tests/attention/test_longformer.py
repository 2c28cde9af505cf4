"""Longformer against softmax, computed for every query separately."""

import pytest
import torch

from lln_fairseq.attention import Context, build_attention
from lln_fairseq.ops import reference
from tests.helpers import random_qkv


def build(window):
    return build_attention("longformer", num_heads=3, head_dim=32, max_positions=64, one_sided_window=window).eval()


def test_window_over_whole_sequence_is_softmax():
    q, k, v = random_qkv(length=40, dtype=torch.float64)
    mask = torch.arange(40) >= torch.tensor([40, 17])[:, None]
    expected = reference.softmax_matrix(q, k, mask) @ v
    # With 38, the first and the last token are too far apart, but the first token is global.
    for window in (38, 39, 500):
        torch.testing.assert_close(build(window)(q, k, v, Context(mask)), expected)


@pytest.mark.parametrize("window", [1, 4, 7, 8])
def test_matches_softmax_of_each_query(window):
    q, k, v = random_qkv(length=23, dtype=torch.float64)
    bounds = [(0, 20), (3, 23)]  # real tokens: with right padding, and with left padding
    mask = torch.ones(2, 23, dtype=torch.bool)
    for b, (start, end) in enumerate(bounds):
        mask[b, start:end] = False

    out = build(window)(q, k, v, Context(mask))
    for b, (start, end) in enumerate(bounds):
        for i in range(start, end):
            keys = [j for j in range(start, end) if abs(i - j) <= window or start in (i, j)]
            scores = (k[b, :, keys] @ q[b, :, i, :, None])[..., 0] / 32**0.5
            weights = torch.softmax(scores, dim=-1)
            torch.testing.assert_close(out[b, :, i], (weights[:, None, :] @ v[b, :, keys])[:, 0])
