"""Test the prototype of window attention: an independent formula, padding, and that sequences do not mix."""

import pytest
import torch

from lln_fairseq.attention import Context
from lln_fairseq.ops import reference
from scripts.research.window import WindowAttention, WindowConfig
from tests.helpers import FLOAT32_FORWARD, random_padding, random_qkv, relative_rms

SIZE = 8


def build():
    return WindowAttention(WindowConfig(SIZE), num_heads=3, head_dim=32, max_positions=128)


def masked_softmax(q, k, padding):
    """Return softmax over the keys of adjacent blocks, (B, H, N, N) in float64, from the weights of all pairs."""
    block = torch.arange(q.shape[2]) // SIZE
    is_near = (block[:, None] - block).abs() <= 1
    weights = reference.softmax_matrix(q.double(), k.double(), padding) * is_near
    total = weights.sum(dim=-1, keepdim=True)
    return weights / total.masked_fill(total == 0, 1.0)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("length", [3, 8, 13, 40, 70])
def test_output_has_the_definition(length, padded):
    q, k, v = random_qkv(length=length)
    padding = random_padding(2, length, full_row=True) if padded else None
    expected = masked_softmax(q, k, padding) @ v.double()

    out = build()(q, k, v, Context(padding))

    assert out.shape == v.shape
    assert relative_rms(out, expected) <= FLOAT32_FORWARD
    if padded:
        for x in (q, k, v):
            x[padding[:, None].expand(x.shape[:3])] = float("nan")
        real = ~padding[:, None, :, None].expand(out.shape)
        torch.testing.assert_close(build()(q, k, v, Context(padding))[real], out[real])


def test_queries_without_a_key_give_zero_and_finite_gradients():
    q, k, v = random_qkv(length=40)
    padding = torch.zeros(2, 40, dtype=torch.bool)
    padding[0, :24] = True  # the first two blocks see padding only
    inputs = [x.requires_grad_() for x in (q, k, v)]

    out = build()(*inputs, Context(padding))
    out.sum().backward()

    assert out[0, :, :16].eq(0).all()
    assert out[0, :, 16:].ne(0).all()
    assert all(x.grad.isfinite().all() for x in inputs)


def test_padding_at_the_end_changes_nothing():
    q, k, v = random_qkv(length=40)
    padding = torch.zeros(2, 40, dtype=torch.bool)
    padding[:, 21:] = True

    padded = build()(q, k, v, Context(padding))[:, :, :21]

    torch.testing.assert_close(padded, build()(q[:, :, :21], k[:, :, :21], v[:, :, :21]))
