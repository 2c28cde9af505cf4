"""The reweighting by distance, against its definition."""

import math

import torch

from lln_fairseq.attention import build_attention
from tests.helpers import FLOAT32_FORWARD, FLOAT32_GRADIENT, random_padding, random_qkv, relative_rms


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


def test_is_the_definition_forward_and_backward_with_padding_on_either_side():
    attention = build_attention("cosformer", num_heads=3, head_dim=32, max_positions=100)
    right = random_padding(2, 97)
    for mask in (right, right.flip(1)):
        inputs = [x.requires_grad_() for x in random_qkv()]
        exact = [x.detach().double().requires_grad_() for x in inputs]
        real = ~mask[:, None, :, None]
        out, expected = attention(*inputs, mask) * real, definition(*exact, mask)
        assert relative_rms(out, expected) <= FLOAT32_FORWARD
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        out.backward(grad)
        expected.backward(grad.double())
        for x, y in zip(inputs, exact, strict=True):
            assert relative_rms(x.grad, y.grad) <= FLOAT32_GRADIENT
