"""What only a GPU shows: races, reads beyond a tensor, every dtype and head dim, a million tokens.

In the interpreter on a CPU, where there is neither a race nor real memory, small cases show that the tests run."""

import pytest
import torch

from lln_fairseq.ops.backends import triton
from tests import helpers
from tests.ops.backends.test_triton import DEVICE, HALF, every_mix, mask_of, native
from tests.ops.mixes import MIXES, attend, errors, inputs, output_and_gradients

pytestmark = pytest.mark.skipif(
    (reason := triton.is_supported(torch.empty(1, 1, 1, 64, device=DEVICE))) is not None, reason=str(reason)
)
ON_GPU = DEVICE == "cuda"
REPEATS = 250 if ON_GPU else 2
LENGTH = 3001 if ON_GPU else 70
DIM = 64 if ON_GPU else 16
DTYPES = [torch.float32, *HALF] if ON_GPU else [torch.float32]
BEYOND = 64  # tokens of memory after a sequence, full of NaN


def tensors_of(mix, **options):
    """Return q, k, v, α, β; the offsets of joint_offset stay 0."""
    return inputs(mix, device=DEVICE, **options)[:5]


@every_mix
@pytest.mark.parametrize("dtype", DTYPES)
def test_repeats_are_equal_to_the_bit(mix, dtype):
    tensors = tensors_of(mix, length=LENGTH, dim=DIM, dtype=dtype)
    function = attend(mix, "triton", mask_of(2, LENGTH), 64)
    first = output_and_gradients(function, tensors)
    for _ in range(REPEATS - 1):
        assert all(map(torch.equal, first, output_and_gradients(function, tensors)))


@every_mix
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_read_beyond_the_tokens(mix, dtype):
    """q, k, v and the gradient are windows of larger tensors: with NaN around them, and with zeros."""
    tensors = tensors_of(mix, length=LENGTH, dim=DIM, dtype=dtype)
    results = []
    for around in (0.0, float("nan")):
        windows = []
        for x in (*tensors[:3], torch.ones_like(tensors[0])):
            batch, heads, length, dim = x.shape
            large = torch.full((batch, heads, length + 2 * BEYOND, dim), around, device=DEVICE, dtype=dtype)
            large[:, :, BEYOND:-BEYOND] = x
            windows.append(large[:, :, BEYOND:-BEYOND])
        leaves = [x.detach().requires_grad_() for x in (*windows[:3], *tensors[3:])]
        out = attend(mix, "triton", mask_of(2, LENGTH), 64)(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, windows[3])])
    assert all(map(torch.equal, *results))
    assert all(x.isfinite().all() for x in results[0])


@native
@pytest.mark.gpu
@every_mix
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("dim", [16, 32, 64, 128])
@pytest.mark.parametrize("padded", [False, True])
def test_every_dtype_and_head_dim(mix, dtype, dim, padded):
    """Output and gradients beside the PyTorch path in float64, whose own error in the same dtype is the measure."""
    tensors = tensors_of(mix, length=1000, dim=dim, dtype=dtype)
    mask = mask_of(2, 1000, full_row=True) if padded else None
    exact = output_and_gradients(attend(mix, "torch", mask, dim), tensors, torch.float64)
    found = errors(output_and_gradients(attend(mix, "triton", mask, dim), tensors), exact)
    if dtype == torch.float32:
        assert found.pop("out") <= helpers.FLOAT32_FORWARD
        assert max(found.values()) <= helpers.FLOAT32_GRADIENT
        return
    plain = errors(output_and_gradients(attend(mix, "torch", mask, dim), tensors), exact)
    assert found["out"] <= helpers.HALF_FORWARD_FACTOR * plain["out"] + 1e-3
    assert all(found[name] <= helpers.HALF_GRADIENT_FACTOR * plain[name] + 5e-3 for name in found)


@native
@pytest.mark.gpu
@every_mix
def test_a_million_tokens_forward_and_backward(mix):
    """The last block's output and the first token's gradient, beside float32 PyTorch on one head."""
    tensors = tensors_of(mix, batch=1, heads=2, length=2**20, dim=64, dtype=torch.float16)
    grad = torch.randn_like(tensors[0])
    found = output_and_gradients(attend(mix, "triton", None, 64), tensors, grad=grad)
    one = [x[:, 1:].float() for x in tensors]
    expected = output_and_gradients(attend(mix, "torch", None, 64), one, grad=grad[:, 1:])
    assert max(errors([x[:, 1:] for x in found[:4]], expected).values()) < 1e-2


@native
@pytest.mark.gpu
@pytest.mark.parametrize("mix", MIXES[1:])
def test_dropout_keeps_the_mean(mix):
    """Over many seeds the mean of the outputs is the output without dropout, within its standard error."""
    tensors = tensors_of(mix, batch=1, heads=2, length=256, dim=64, dtype=torch.float16)
    torch.manual_seed(0)
    dropping = attend(mix, "triton", None, 64, dropout_p=0.2)
    outs = torch.stack([dropping(*tensors).float() for _ in range(400)])
    expected = attend(mix, "triton", None, 64)(*tensors).float()
    standard_error = outs.std(dim=0) / 20
    assert ((outs.mean(dim=0) - expected).abs() <= 6 * standard_error + 2e-3).all()
