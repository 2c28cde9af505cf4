"""cosFormer's reweighting by distance, against its definition."""

import math

import pytest
import torch

from lln_fairseq.attention import build_attention
from tests.attention.definition import assert_matches_definition
from tests.helpers import random_padding, random_qkv


def definition(q, k, v, mask):
    """Compute P v as the paper defines it, sequence by sequence. The output is 0 at padding."""
    out = torch.zeros_like(v)
    for b, padded in enumerate(mask):
        is_real = ~padded
        num_real = is_real.sum()
        queries = q[b][:, is_real].clamp(min=0)
        keys = k[b][:, is_real].clamp(min=0)
        position = torch.arange(1, num_real + 1, dtype=q.dtype)
        cosines = torch.cos(math.pi / 2 * (position[:, None] - position[None, :]) / num_real)
        weights = queries @ keys.mT * cosines
        out[b][:, is_real] = weights / weights.sum(dim=-1, keepdim=True) @ v[b][:, is_real]
    return out


@pytest.mark.parametrize("side", ["right", "left"])
def test_matches_definition_with_padding(side):
    attention = build_attention("cosformer", num_heads=3, head_dim=32, max_positions=100)
    mask = random_padding(2, 97)
    if side == "left":
        mask = mask.flip(1)
    assert_matches_definition(attention, lambda q, k, v: definition(q, k, v, mask), random_qkv(), mask)
