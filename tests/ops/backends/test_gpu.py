"""Properties of the Triton kernels that only a GPU shows: races, reads beyond a tensor, all dtypes, a million tokens.

On a CPU the interpreter has neither races nor real memory. There, small sizes only show that the tests themselves run.
"""

import pytest
import torch

from lln_fairseq.ops.backends import triton
from tests import helpers
from tests.ops.backends.test_triton import DEVICE, HALF, every_mix, native, padding_mask
from tests.ops.mixes import TESTED_MIXES, attend, errors, inputs, output_and_gradients

REASON = triton.is_supported(torch.empty(1, 1, 1, 64, device=DEVICE))
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
ON_GPU = DEVICE == "cuda"
REPEATS = 250 if ON_GPU else 2
LENGTH = 3001 if ON_GPU else 70
DIM = 64 if ON_GPU else 16
DTYPES = [torch.float32, *HALF] if ON_GPU else [torch.float32]
MARGIN = 64  # tokens of memory on either side of a sequence


def qkv_alpha_beta(mix, **options):
    """Return q, k, v, α, β. The offset of joint_offset is left out, so that it is 0."""
    return inputs(mix, device=DEVICE, **options)[:5]


def window_of_larger_tensor(x, margin_value):
    """Return a view that equals x (B, H, N, D), in a tensor that holds margin_value before and after its tokens."""
    batch, heads, length, dim = x.shape
    larger = torch.full((batch, heads, length + 2 * MARGIN, dim), margin_value, device=DEVICE, dtype=x.dtype)
    larger[:, :, MARGIN:-MARGIN] = x
    return larger[:, :, MARGIN:-MARGIN]


@every_mix
@pytest.mark.parametrize("dtype", DTYPES)
def test_repeats_are_equal_to_the_bit(mix, dtype):
    tensors = qkv_alpha_beta(mix, length=LENGTH, dim=DIM, dtype=dtype)
    attention = attend(mix, "triton", padding_mask(2, LENGTH), 64)

    first = output_and_gradients(attention, tensors)

    for _ in range(REPEATS - 1):
        assert all(map(torch.equal, first, output_and_gradients(attention, tensors)))


@every_mix
@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_beyond_the_tokens_is_not_read(mix, dtype):
    """The results are the same if q, k, v and the gradient are surrounded by NaN and if they are surrounded by 0."""
    tensors = qkv_alpha_beta(mix, length=LENGTH, dim=DIM, dtype=dtype)
    attention = attend(mix, "triton", padding_mask(2, LENGTH), 64)
    results = []
    for margin_value in (0.0, float("nan")):
        windows = [window_of_larger_tensor(x, margin_value) for x in tensors[:3]]
        grad = window_of_larger_tensor(torch.ones_like(tensors[0]), margin_value)
        leaves = [x.detach().requires_grad_() for x in (*windows, *tensors[3:])]
        out = attention(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, grad)])

    assert all(map(torch.equal, *results))
    assert all(x.isfinite().all() for x in results[0])


@native
@pytest.mark.gpu
@every_mix
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("dim", [16, 32, 64, 128])
@pytest.mark.parametrize("padded", [False, True])
def test_every_dtype_and_head_dim(mix, dtype, dim, padded):
    """The error relative to PyTorch in float64 is bounded, for half precision by PyTorch's error in the same dtype."""
    tensors = qkv_alpha_beta(mix, length=1000, dim=dim, dtype=dtype)
    mask = padding_mask(2, 1000, full_row=True) if padded else None
    pytorch = attend(mix, "torch", mask, dim)
    exact = output_and_gradients(pytorch, tensors, torch.float64)

    triton_errors = errors(output_and_gradients(attend(mix, "triton", mask, dim), tensors), exact)

    if dtype == torch.float32:
        assert triton_errors.pop("out") <= helpers.FLOAT32_FORWARD
        assert max(triton_errors.values()) <= helpers.FLOAT32_GRADIENT
        return
    pytorch_errors = errors(output_and_gradients(pytorch, tensors), exact)
    assert triton_errors["out"] <= helpers.HALF_FORWARD_FACTOR * pytorch_errors["out"] + 1e-3
    for name, error in triton_errors.items():
        assert error <= helpers.HALF_GRADIENT_FACTOR * pytorch_errors[name] + 5e-3


@native
@pytest.mark.gpu
@every_mix
def test_a_million_tokens_forward_and_backward(mix):
    """The second of two heads agrees with float32 PyTorch, output and gradients."""
    tensors = qkv_alpha_beta(mix, batch=1, heads=2, length=2**20, dim=64, dtype=torch.float16)
    grad = torch.randn_like(tensors[0])

    results = output_and_gradients(attend(mix, "triton", None, 64), tensors, grad=grad)

    second_head = [x[:, 1:].float() for x in tensors]
    expected = output_and_gradients(attend(mix, "torch", None, 64), second_head, grad=grad[:, 1:])
    assert max(errors([x[:, 1:] for x in results[:4]], expected).values()) < 1e-2


@native
@pytest.mark.gpu
@pytest.mark.parametrize("mix", TESTED_MIXES[1:])
def test_dropout_keeps_the_mean(mix):
    """The mean output over many seeds is the output without dropout, within six standard errors."""
    tensors = qkv_alpha_beta(mix, batch=1, heads=2, length=256, dim=64, dtype=torch.float16)
    torch.manual_seed(0)
    with_dropout = attend(mix, "triton", None, 64, dropout_p=0.2)

    outputs = torch.stack([with_dropout(*tensors).float() for _ in range(400)])

    expected = attend(mix, "triton", None, 64)(*tensors).float()
    standard_error = outputs.std(dim=0) / 20
    assert ((outputs.mean(dim=0) - expected).abs() <= 6 * standard_error + 2e-3).all()
