"""What sets the joint mixes apart: they are softmax in one block, and their rows sum to 1. See test_backends.py."""

import pytest
import torch

from lln_fairseq.ops import reference
from lln_fairseq.ops.backends import load_backend
from lln_fairseq.ops.lln import lln_diag_attention
from tests.helpers import FLOAT32_FORWARD, FLOAT32_GRADIENT, random_qkv, relative_rms
from tests.ops.mixes import BLOCK, OFFSETS, attend, errors, holes, inputs, oracle, output_and_gradients

JOINT_MIXES = {"joint": None, "joint_offset": OFFSETS[:3]}


@pytest.fixture(params=["torch", "cpu", "triton"])
def backend(request):
    if reason := load_backend(request.param).is_supported(torch.empty(1, 1, 1, 32), BLOCK):
        pytest.skip(reason)
    return request.param


@pytest.mark.parametrize("mix", JOINT_MIXES)
@pytest.mark.parametrize(("length", "real"), [(16, 16), (11, 11), (40, 13)])
@pytest.mark.parametrize("factor", [0.5, 8.0])
def test_one_block_of_tokens_is_softmax_attention(factor, length, real, mix, backend):
    q, k, v = (x.requires_grad_() for x in random_qkv(batch=1, length=length))
    mask = (torch.arange(length) >= real)[None] if real < length else None
    rows = slice(0, real)
    offset = JOINT_MIXES[mix]
    out = lln_diag_attention(q, k, v, factor, factor, mask, BLOCK, backend, mix=mix, mix_parameter=offset)
    expected = reference.softmax_matrix(q.double(), k.double(), mask) @ v.double()
    assert relative_rms(out[:, :, rows], expected[:, :, rows]) < 1e-6
    grads = [torch.autograd.grad(x[:, :, rows].square().sum(), (q, k, v)) for x in (out, expected)]
    for x, y in zip(*grads, strict=True):
        assert relative_rms(x, y) < 1e-5


@pytest.mark.parametrize("padded", [False, True])
def test_rows_sum_to_1(padded, backend):
    """Those of queries too whose block has no real key; a sequence without one gives 0."""
    q, k, v, *others = inputs("joint_offset", batch=3)
    expected = torch.ones_like(v)
    mask = None
    if padded:
        mask = holes(3, 40)
        expected[2] = 0
    out = attend("joint_offset", backend, mask)(q, k, torch.ones_like(v), *others)
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("offset", [3.0, 20.0, 80.0])
def test_a_large_offset_does_not_multiply_rounding(offset, backend):
    """Concentrated attention leaves most rows nothing outside their block but the rounding of a difference."""
    q, k, v = random_qkv(length=40)
    factor = torch.full((2, 3), 3.0)
    tensors = [3 * q, 3 * k, v, factor, factor, torch.full((3,), offset)]
    expected = output_and_gradients(oracle("joint_offset"), tensors, torch.float64)
    found = output_and_gradients(attend("joint_offset", backend), tensors)
    torch.testing.assert_close(found.pop(), expected.pop().float(), rtol=1e-4, atol=1e-5)
    wrong = errors(found, expected)
    assert wrong.pop("out") <= FLOAT32_FORWARD
    assert max(wrong.values()) <= FLOAT32_GRADIENT
    rows = attend("joint_offset", backend)(3 * q, 3 * k, torch.ones_like(v), *tensors[3:])
    torch.testing.assert_close(rows, torch.ones_like(v), rtol=0, atol=1e-5)


def test_the_outside_grows_out_of_softmax_without_a_jump():
    """A first token beyond the block, nearly without weight, changes next to nothing, with either mix."""
    q, k, v = random_qkv(length=17)
    k[:, :, 16] = -8.0
    for mix in JOINT_MIXES:
        out = lln_diag_attention(q, k, v, 1.0, 1.0, None, BLOCK, mix=mix)[:, :, :16]
        expected = lln_diag_attention(q[:, :, :16], k[:, :, :16], v[:, :, :16], 1.0, 1.0, None, BLOCK, mix=mix)
        assert relative_rms(out, expected) < 0.01


def test_names_and_defaults(backend):
    q, k, v = random_qkv(length=40)
    joint = lln_diag_attention(q, k, v, 1.0, 1.0, None, BLOCK, backend, mix="joint")
    for parameter in (None, 0.0, torch.zeros(3), torch.zeros(2, 1)):
        offset = attend("joint_offset", backend)(q, k, v, 1.0, 1.0, parameter)
        assert torch.equal(offset, joint)
    average = lln_diag_attention(q, k, v, 1.0, 1.0, None, BLOCK, backend)
    assert torch.equal(average, lln_diag_attention(q, k, v, 1.0, 1.0, None, BLOCK, backend, mix="average"))
    assert relative_rms(average, joint) > 0.01


def test_dropout_keeps_the_mean_of_the_block_and_all_of_the_outside():
    q, k, _ = random_qkv(batch=8, heads=8, length=32)
    v = torch.eye(32).expand_as(q)  # the output is then the matrix
    plain = lln_diag_attention(q, k, v, 1.0, 1.0, None, BLOCK, mix="joint")
    torch.manual_seed(1)
    dropped = lln_diag_attention(q, k, v, 1.0, 1.0, None, BLOCK, mix="joint", dropout_p=0.25)
    block = torch.arange(32) // BLOCK
    same = (block[:, None] == block[None, :]).expand_as(plain)
    torch.testing.assert_close(dropped[~same], plain[~same])
    kept = dropped[same].abs() > 1e-6
    assert abs(kept.float().mean().item() - 0.75) < 0.015  # 32,768 weights: standard deviation 0.0024
    torch.testing.assert_close(dropped[same][kept], plain[same][kept] / 0.75, rtol=1e-4, atol=1e-6)
