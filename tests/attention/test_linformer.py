"""Linformer against the paper's formula, with every kind of sharing, and its maximum length."""

import pytest
import torch

from lln_fairseq.attention import build_attention
from tests.helpers import random_qkv


def build(**options):
    torch.manual_seed(0)
    return build_attention("linformer", num_heads=3, head_dim=32, max_positions=64, **options).eval()


@pytest.mark.parametrize(("sharing", "num_matrices"), [("none", 6), ("headwise", 2), ("key_value", 1)])
def test_matches_formula_with_each_sharing(sharing, num_matrices):
    attention = build(projected_length=16, sharing=sharing).double()
    assert sum(p.numel() for p in attention.parameters()) == num_matrices * 16 * 64

    q, k, v = random_qkv(length=40, dtype=torch.float64)
    mask = torch.arange(40) >= torch.tensor([40, 17])[:, None]
    out = attention(q, k, v, mask)
    for head in range(3):
        index = head if sharing == "none" else 0
        e = attention.key_projection[index]
        f = e if sharing == "key_value" else attention.value_projection[index]
        for b, length in enumerate((40, 17)):
            keys = e[:, :length] @ k[b, head, :length]
            values = f[:, :length] @ v[b, head, :length]
            expected = torch.softmax(q[b, head] @ keys.T / 32**0.5, dim=-1) @ values
            torch.testing.assert_close(out[b, head], expected)


def test_projected_length_is_limited_to_max_positions():
    assert build(projected_length=256).key_projection.shape == (1, 64, 64)


def test_longer_sequence_is_rejected():
    with pytest.raises(ValueError, match="built for 64 tokens, got 65"):
        build()(*random_qkv(length=65))
