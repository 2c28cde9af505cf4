"""The reweighting by distance, against its definition."""

import math

import pytest
import torch

from lln_fairseq.attention import build_attention
from tests.attention.definition import assert_equals_definition
from tests.helpers import random_padding, random_qkv


def definition(q, k, v, mask):
    """P as the paper defines it, sentence by sentence."""
    out = torch.zeros_like(v)
    for i, padded in enumerate(mask):
        real = ~padded
        q_, k_, v_ = (x[i][:, real] for x in (q, k, v))
        position = torch.arange(1, real.sum() + 1, dtype=q.dtype)
        cosines = torch.cos(math.pi / 2 * (position[:, None] - position[None, :]) / real.sum())
        weights = q_.clamp(min=0) @ k_.clamp(min=0).mT * cosines
        out[i][:, real] = weights / weights.sum(dim=-1, keepdim=True) @ v_
    return out


@pytest.mark.parametrize("side", ["right", "left"])
def test_is_the_definition_forward_and_backward_with_padding(side):
    attention = build_attention("cosformer", num_heads=3, head_dim=32, max_positions=100)
    mask = random_padding(2, 97)
    if side == "left":
        mask = mask.flip(1)
    assert_equals_definition(attention, lambda q, k, v: definition(q, k, v, mask), random_qkv(), mask)
