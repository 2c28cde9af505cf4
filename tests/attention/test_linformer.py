"""Linformer against the paper's formula, sharing, and the longest sentence it is built for."""

import pytest
import torch

from lln_fairseq.attention import build_attention
from tests.helpers import random_qkv


def build(**options):
    torch.manual_seed(0)
    return build_attention("linformer", num_heads=3, head_dim=32, max_positions=64, **options).eval()


@pytest.mark.parametrize(("sharing", "count"), [("none", 6), ("headwise", 2), ("key_value", 1)])
def test_the_formula_of_the_paper_with_each_sharing(sharing, count):
    attention = build(projected_length=16, sharing=sharing).double()
    assert sum(p.numel() for p in attention.parameters()) == count * 16 * 64
    q, k, v = random_qkv(length=40, dtype=torch.float64)
    e, f = attention.key_projection, attention.value_projection
    f = e if f is None else f
    for head in range(3):
        e_h, f_h = (x[head if sharing == "none" else 0, :, :40] for x in (e, f))
        for b in range(2):
            keys, values = e_h @ k[b, head], f_h @ v[b, head]
            expected = torch.softmax(q[b, head] @ keys.T / 32**0.5, dim=-1) @ values
            torch.testing.assert_close(attention(q, k, v)[b, head], expected)


def test_lengths():
    assert build(projected_length=256).key_projection.shape == (1, 64, 64)
    with pytest.raises(ValueError, match="built for 64 tokens, got 65"):
        build()(*random_qkv(length=65))
