"""The properties of the joint form: softmax in one block, and rows that sum to 1. See also test_backends.py."""

import pytest
import torch

from lln_fairseq.ops import formula, reference
from lln_fairseq.ops.formula import JOINT, Inputs, Spec
from lln_fairseq.ops.lln import lln_diag_attention
from tests.helpers import random_qkv, relative_rms
from tests.ops.mixes import BLOCK, OFFSETS, assert_float32_accuracy, attend, oracle, output_and_gradients


@pytest.mark.parametrize(
    ("length", "real", "factor", "offset"),
    [(16, 16, 0.5, OFFSETS[:3]), (11, 11, 8.0, None), (40, 13, 0.5, None), (40, 13, 8.0, OFFSETS[:3])],
)
def test_one_block_of_real_tokens_is_softmax_attention(factor, length, real, offset, backend):
    q, k, v = (x.requires_grad_() for x in random_qkv(batch=1, length=length))
    mask = (torch.arange(length) >= real)[None] if real < length else None
    rows = slice(0, real)

    out = lln_diag_attention(q, k, v, factor, factor, mask, BLOCK, backend, mix="joint_offset", mix_parameter=offset)
    expected = reference.softmax_matrix(q.double(), k.double(), mask) @ v.double()

    assert relative_rms(out[:, :, rows], expected[:, :, rows]) < 1e-6
    grads = [torch.autograd.grad(x[:, :, rows].square().sum(), (q, k, v)) for x in (out, expected)]
    for x, y in zip(*grads, strict=True):
        assert relative_rms(x, y) < 1e-5


@pytest.mark.parametrize("global_tokens", [None, 5])
def test_one_block_without_gradients_is_the_joint_form(global_tokens):
    """Without gradients, LLN is not computed for a sequence in one block; a sequence without a real key gives 0."""
    q, k, v = random_qkv(batch=3, length=BLOCK)
    mask = torch.zeros(3, BLOCK, dtype=torch.bool)
    mask[1, 7:] = True
    mask[2] = True
    options = dict(key_padding_mask=mask, block_size=BLOCK, mix="joint_offset", mix_parameter=0.7)
    expected = lln_diag_attention(q, k, v, **options, global_tokens=global_tokens)
    with torch.no_grad():
        actual = lln_diag_attention(q, k, v, torch.nan, torch.nan, **options, global_tokens=global_tokens)
    torch.testing.assert_close(actual[~mask[:, None].expand(-1, 3, -1)], expected[~mask[:, None].expand(-1, 3, -1)])
    assert not actual[2].any()


@pytest.mark.parametrize("offset", [3.0, 20.0, 80.0])
def test_large_offset_does_not_amplify_rounding(offset, backend):
    """With concentrated attention, the mass outside the block is only a rounding error in most rows."""
    q, k, v = random_qkv(length=40)
    factor = torch.full((2, 3), 3.0)
    tensors = [3 * q, 3 * k, v, factor, factor, torch.full((3,), offset)]

    expected = output_and_gradients(oracle("joint_offset"), tensors, torch.float64)
    actual = output_and_gradients(attend("joint_offset", backend), tensors)
    row_sums = attend("joint_offset", backend)(3 * q, 3 * k, torch.ones_like(v), *tensors[3:])

    torch.testing.assert_close(actual.pop(), expected.pop().float(), rtol=1e-4, atol=1e-5)
    assert_float32_accuracy(actual, expected)
    torch.testing.assert_close(row_sums, torch.ones_like(v), rtol=0, atol=1e-5)


def test_first_token_beyond_the_block_changes_little():
    """If the token has nearly no weight, the step from softmax attention to the joint form is small."""
    q, k, v = random_qkv(length=17)
    k[:, :, 16] = -8.0

    attend_to_blocks = attend("joint_offset")
    out = attend_to_blocks(q, k, v, 1.0, 1.0)[:, :, :16]
    expected = attend_to_blocks(q[:, :, :16], k[:, :, :16], v[:, :, :16], 1.0, 1.0)

    assert relative_rms(out, expected) < 0.01


def test_default_offset_is_0_and_default_mix_is_average(backend):
    q, k, v = random_qkv(length=40)
    joint = lln_diag_attention(q, k, v, 1.0, 1.0, None, BLOCK, backend, mix="joint_offset")
    average = lln_diag_attention(q, k, v, 1.0, 1.0, None, BLOCK, backend, mix="average")

    for offset in (0.0, torch.zeros(3), torch.zeros(2, 1)):
        assert torch.equal(attend("joint_offset", backend)(q, k, v, 1.0, 1.0, offset), joint)
    assert torch.equal(lln_diag_attention(q, k, v, 1.0, 1.0, None, BLOCK, backend), average)
    assert relative_rms(average, joint) > 0.01


@pytest.mark.parametrize("padding", [None, torch.tensor([[False, False, False, False, True]])])
def test_formula_has_finite_gradients_if_all_keys_are_far_below_those_of_padding(padding):
    """A padding key is 0, so without its mask its feature would be e^100 times those of the real keys."""
    tensors = list(torch.randn(3, 1, 1, 5, 4, generator=torch.Generator().manual_seed(0)))
    tensors[1][..., 0] -= 100.0
    for x in tensors:
        x.requires_grad_()
    ones = torch.ones(1, 1)

    out = formula.hybrid_formula(Spec(JOINT, 2), Inputs(*tensors, ones, ones, 0 * ones, padding))

    for gradient in torch.autograd.grad(out.sum(), tensors):
        assert gradient.isfinite().all()
