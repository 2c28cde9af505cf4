"""The Triton kernels of the joint form: several splits, layouts, half precision; test_joint.py has the rest."""

import pytest
import torch

from lln_fairseq.ops import reference
from lln_fairseq.ops.backends import triton
from lln_fairseq.ops.joint import Blocks, outside_mass, outside_weight
from lln_fairseq.ops.lln import lln_diag_attention
from tests import helpers
from tests.ops.backends.test_triton import DEVICE, HALF, errors, gradients, inputs, mask_of

pytestmark = pytest.mark.skipif(
    (reason := triton.is_supported(torch.empty(1, 1, 1, 64, device=DEVICE))) is not None, reason=str(reason)
)
OFFSET = 0.7


@pytest.fixture
def many_splits(monkeypatch):
    """Splits of 32 tokens, so that short sequences exercise the combining kernels."""
    for module in (triton, triton.joint):
        monkeypatch.setattr(module, "split_tokens", lambda length, dim: ((length + 31) // 32, 32))


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    helpers.poison_empty(monkeypatch)


def joint(mask, block, backend="triton", **options):
    def function(q, k, v, alpha, beta, parameter):
        return lln_diag_attention(q, k, v, alpha, beta, mask, block, backend, mix="joint_offset",
                                  mix_parameter=parameter, **options)  # fmt: skip

    return function


def oracle(mask, block):
    def function(q, k, v, alpha, beta, parameter):
        return reference.joint_matrix(q, k, alpha, beta, block, parameter, mask) @ v

    return function


def joint_inputs(**options):
    tensors, do = inputs(**options)
    return [*tensors, torch.full(tensors[3].shape, OFFSET, device=DEVICE)], do


@pytest.mark.parametrize("block", [16, 64])
def test_over_several_splits(many_splits, block):
    tensors, do = joint_inputs(length=130)
    mask = torch.zeros(2, 130, dtype=torch.bool, device=DEVICE)
    mask[0, 20:100] = True  # splits and blocks without a real key
    mask[1, 3:] = True
    found = errors(
        gradients(joint(mask, block), tensors, do),
        gradients(oracle(mask, block), [x.double() for x in tensors], do.double()),
    )
    assert found[0] <= helpers.FLOAT32_FORWARD
    assert max(found[1:]) <= helpers.FLOAT32_GRADIENT


def plain(mask, block):
    """The whole less the block with torch operations: matrices in the dtype of q, float32 exponentials and weights."""

    def function(q, k, v, alpha, beta, parameter):
        length, dtype = q.shape[-2], q.dtype
        y = (beta[..., None, None] * k.float()).masked_fill(mask[:, None, :, None], float("-inf"))
        a = (alpha[..., None, None] * q.float() + y.logsumexp(-2, keepdim=True)).softmax(-1).to(dtype)
        w = y.softmax(-2).to(dtype)
        of = torch.arange(length, device=q.device) // block
        same = (of[:, None] == of[None, :]) & ~mask[:, None, None, :]  # (B, 1, N, N)
        inside = (a @ w.mT).masked_fill(~same, 0.0)
        u, count = outside_mass(inside.float()), same.sum(-1, keepdim=True)
        blocks = Blocks((count == (~mask).sum(-1)[:, None, None, None]) & (count > 0), count == 0)
        c = outside_weight(u, parameter[..., None, None], blocks)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).float().masked_fill(~same, torch.finfo(torch.float32).min)
        p = scores.softmax(-1).masked_fill(~same, 0.0)
        weights = ((1 - c * u) * p - c * inside.float()).to(dtype)
        return (c * (a @ (w.mT @ v)) + weights @ v).to(dtype)

    return function


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("length", "dim", "block"), [(70, 128, 64), (97, 32, 48), (130, 64, 16)])
def test_half_precision_is_as_good_as_pytorch(length, dim, block, dtype):
    tensors, do = joint_inputs(heads=3, length=length, dim=dim, dtype=dtype)
    mask = mask_of(2, length)
    expected = gradients(oracle(mask, block), [x.double() for x in tensors], do.double())
    if (expected[-1].abs() < 1e-12).all():  # no query sees a key outside its block
        expected[-1].zero_()
    ours = errors(gradients(joint(mask, block), tensors, do), expected)
    theirs = errors(gradients(plain(mask, block), tensors, do), expected)
    print("ours", *(f"{x:.1e}" for x in ours), "pytorch", *(f"{x:.1e}" for x in theirs))
    for i, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        factor = helpers.HALF_GRADIENT_FACTOR if i else helpers.HALF_FORWARD_FACTOR
        assert our <= factor * their + helpers.HALF_FLOOR, i


def test_layouts_and_batch_mates_change_no_bit(many_splits):
    tensors, do = joint_inputs(batch=3, length=70)
    mask = mask_of(3, 70)
    whole = gradients(joint(mask, 32), tensors, do)
    by_token = [x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 else x for x in tensors]
    for x, y in zip(whole, gradients(joint(mask, 32), by_token, do), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)
    alone = gradients(joint(mask[1:2], 32), [x[1:2] for x in tensors], do[1:2])
    for x, y in zip(whole, alone, strict=True):
        torch.testing.assert_close(x[1:2], y, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_extreme_inputs_stay_finite(dtype):
    tensors, do = joint_inputs(length=97, dtype=dtype, scale=50.0)
    tensors[3:5] = [torch.full_like(x, 30.0) for x in tensors[3:5]]
    # the true gradients are some 1e5 times do, beyond float16: scale it as a mean over tokens would
    for x in gradients(joint(mask_of(2, 97, full_row=True), 32), tensors, do / 97):
        assert x.isfinite().all()
