"""Block-diagonal attention against its oracle. The tests of LLN+Diag cover its backward pass together with LLN's."""

import pytest
import torch

from lln_fairseq.ops import reference
from lln_fairseq.ops.block_diag import block_diag_attention
from tests.helpers import FLOAT32_FORWARD, FLOAT32_GRADIENT, poison_empty, random_padding, random_qkv, relative_rms


@pytest.mark.parametrize("block_size", [1, 16, 64, 100, 4096])
@pytest.mark.parametrize("length", [1, 63, 130])
def test_output_and_gradients_equal_oracle(length, block_size, monkeypatch):
    inputs = random_qkv(length=length)
    mask = random_padding(2, length, full_row=True)
    weight = torch.randn(inputs[0].shape)

    def run(function, dtype):
        tensors = [x.to(dtype).requires_grad_() for x in inputs]
        out = function(*tensors)
        return out, *torch.autograd.grad((out * weight.to(dtype)).sum(), tensors)

    expected = run(lambda q, k, v: reference.block_diag_matrix(q, k, block_size, mask) @ v, torch.float64)
    poison_empty(monkeypatch)
    actual = run(lambda q, k, v: block_diag_attention(q, k, v, mask, block_size), torch.float32)

    assert relative_rms(actual[0], expected[0]) <= FLOAT32_FORWARD
    for x, y in zip(actual[1:], expected[1:], strict=True):
        assert relative_rms(x, y) <= FLOAT32_GRADIENT


def test_default_block_is_the_head_dimension():
    q, k, v = random_qkv(length=130, dim=32)
    assert torch.equal(block_diag_attention(q, k, v), block_diag_attention(q, k, v, block_size=32))


def test_dropout_scales_kept_weights_and_follows_the_seed():
    q, k, _ = random_qkv(batch=4, heads=4, length=64, dim=64)
    v = torch.eye(64).expand_as(q)  # so that the output is the matrix of probabilities
    p = block_diag_attention(q, k, v)

    torch.manual_seed(7)
    dropped = block_diag_attention(q, k, v, dropout_p=0.25)
    torch.manual_seed(7)
    assert torch.equal(dropped, block_diag_attention(q, k, v, dropout_p=0.25))
    assert not torch.equal(dropped, block_diag_attention(q, k, v, dropout_p=0.25))

    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], p[kept] / 0.75)
    # The fraction of 65,536 weights has a standard deviation of 0.0017.
    assert abs(kept.float().mean().item() - 0.75) < 0.01


def test_gradients_with_dropout():
    inputs = [x.requires_grad_() for x in random_qkv(batch=1, heads=2, length=5, dim=4, dtype=torch.float64)]

    def function(q, k, v):
        torch.manual_seed(0)
        return block_diag_attention(q, k, v, block_size=3, dropout_p=0.5)

    assert torch.autograd.gradcheck(function, inputs)
