"""Linformer against the paper's formula, and its maximum length."""

import pytest
import torch

from lln_fairseq.attention import Context, build_attention
from tests.helpers import random_qkv


def build(**options):
    torch.manual_seed(0)
    return build_attention("linformer", num_heads=3, head_dim=32, max_positions=64, **options).eval()


def test_matches_formula():
    attention = build(projected_length=16).double()
    e = attention.key_projection[0]
    f = attention.value_projection[0]
    q, k, v = random_qkv(length=40, dtype=torch.float64)
    mask = torch.arange(40) >= torch.tensor([40, 17])[:, None]

    out = attention(q, k, v, Context(mask))

    for b, length in enumerate((40, 17)):
        keys = e[:, :length] @ k[b, :, :length]
        values = f[:, :length] @ v[b, :, :length]
        expected = torch.softmax(q[b] @ keys.mT / 32**0.5, dim=-1) @ values
        torch.testing.assert_close(out[b], expected)


def test_projected_length_is_limited_to_max_positions():
    assert build(projected_length=256).key_projection.shape == (1, 64, 64)


def test_longer_sequence_is_rejected():
    with pytest.raises(ValueError, match="built for 64 tokens, got 65"):
        build()(*random_qkv(length=65))
