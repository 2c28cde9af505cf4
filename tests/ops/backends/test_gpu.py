"""What only a GPU shows: races, reads beyond a tensor, every dtype and head dim, a million tokens.

In the interpreter on a CPU, where there is neither a race nor real memory, small cases show that the tests run."""

import pytest
import torch

from lln_fairseq.ops.backends import triton
from lln_fairseq.ops.lln import lln_attention, lln_diag_attention
from tests import helpers
from tests.ops.backends.test_triton import DEVICE, HALF, errors, gradients, inputs, mask_of, native

pytestmark = pytest.mark.skipif(
    (reason := triton.is_supported(torch.empty(1, 1, 1, 64, device=DEVICE))) is not None, reason=str(reason)
)
ON_GPU = DEVICE == "cuda"
MIXES = ("lln", "average", "joint_offset")
REPEATS = 250 if ON_GPU else 2
LENGTH = 3001 if ON_GPU else 70
BEYOND = 64  # tokens of memory after a sequence, full of NaN

every_mix = pytest.mark.parametrize("mix", MIXES)


def attention(mix, mask=None, block_size=64, backend="triton", **options):
    """A mechanism as a function of q, k, v, α, β."""
    if mix == "lln":
        return lambda q, k, v, alpha, beta: lln_attention(q, k, v, alpha, beta, mask, backend)
    return lambda q, k, v, alpha, beta: lln_diag_attention(
        q, k, v, alpha, beta, mask, block_size, backend, mix=mix, **options
    )


@every_mix
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_repeats_are_equal_to_the_bit(mix, dtype):
    tensors, do = inputs(length=LENGTH, dim=64 if ON_GPU else 16, dtype=dtype)
    mask = mask_of(2, LENGTH)
    first = gradients(attention(mix, mask), tensors, do)
    for _ in range(REPEATS - 1):
        again = gradients(attention(mix, mask), tensors, do)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@every_mix
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_nothing_is_read_beyond_the_tokens(mix, dtype):
    """q, k, v and the gradient are windows of larger tensors: with NaN around them, and with zeros."""
    tensors, do = inputs(length=LENGTH, dim=64 if ON_GPU else 16, dtype=dtype)
    results = []
    for around in (0.0, float("nan")):
        windows = []
        for x in (*tensors[:3], do):
            batch, heads, length, dim = x.shape
            large = torch.full((batch, heads, length + 2 * BEYOND, dim), around, device=DEVICE, dtype=dtype)
            large[:, :, BEYOND:-BEYOND] = x
            windows.append(large[:, :, BEYOND:-BEYOND])
        leaves = [x.detach().requires_grad_() for x in (*windows[:3], *tensors[3:])]
        out = attention(mix, mask_of(2, LENGTH))(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, windows[3])])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    assert all(x.isfinite().all() for x in results[0])


@native
@pytest.mark.gpu
@every_mix
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("dim", [16, 32, 64, 128])
@pytest.mark.parametrize("padded", [False, True])
def test_every_dtype_and_head_dim(mix, dtype, dim, padded):
    """Output and gradients beside the PyTorch path in float64, whose own error in the same dtype is the measure."""
    tensors, do = inputs(length=1000, dim=dim, dtype=dtype)
    mask = mask_of(2, 1000, full_row=True) if padded else None
    exact = gradients(attention(mix, mask, dim, "torch"), [x.double() for x in tensors], do.double())
    found = errors(gradients(attention(mix, mask, dim), tensors, do), exact)
    if dtype == torch.float32:
        assert found[0] <= helpers.FLOAT32_FORWARD
        assert max(found[1:]) <= helpers.FLOAT32_GRADIENT
        return
    plain = errors(gradients(attention(mix, mask, dim, "torch"), tensors, do), exact)
    assert found[0] <= helpers.HALF_FORWARD_FACTOR * plain[0] + 1e-3
    assert all(x <= helpers.HALF_GRADIENT_FACTOR * y + 5e-3 for x, y in zip(found[1:], plain[1:], strict=True))


@native
@pytest.mark.gpu
@every_mix
def test_a_million_tokens_forward_and_backward(mix):
    """The last block's output and the first token's gradient, beside float32 PyTorch on one head."""
    tensors, do = inputs(batch=1, heads=2, length=2**20, dim=64, dtype=torch.float16)
    found = gradients(attention(mix), tensors, do)
    one = [x[:, 1:].float() for x in tensors]
    expected = gradients(attention(mix, backend="torch"), one, do[:, 1:].float())
    found = [x[:, 1:] for x in found]
    assert max(errors(found[:4], expected[:4])) < 1e-2


@native
@pytest.mark.gpu
@pytest.mark.parametrize("mix", MIXES[1:])
def test_dropout_keeps_the_mean(mix):
    """Over many seeds the mean of the outputs is the output without dropout, within its standard error."""
    tensors, _ = inputs(batch=1, heads=2, length=256, dim=64, dtype=torch.float16)
    torch.manual_seed(0)
    outs = torch.stack([attention(mix, dropout_p=0.2)(*tensors).float() for _ in range(400)])
    expected = attention(mix)(*tensors).float()
    standard_error = outs.std(dim=0) / 20
    assert ((outs.mean(dim=0) - expected).abs() <= 6 * standard_error + 2e-3).all()
