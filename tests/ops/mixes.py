"""LLN and the mixes of LLN+Diag as functions of their tensors, with float64 oracles and half-precision references."""

import pytest
import torch

from lln_fairseq.ops import reference
from lln_fairseq.ops.backends import load_backend
from lln_fairseq.ops.formula import JOINT, BlockKinds, Spec, outside_mass, outside_weight
from lln_fairseq.ops.lln import lln_attention, lln_diag_attention
from tests.helpers import FLOAT32_FORWARD, FLOAT32_GRADIENT, random_padding, random_qkv, relative_rms

TESTED_MIXES = ("lln", "average", "joint_offset")
GLOBAL = "global"  # joint_offset with GLOBAL_TOKENS global tokens
GLOBAL_TOKENS = 3
NAMES = ("out", "q", "k", "v", "alpha", "beta", "offset")
OFFSETS = torch.tensor([0.8, -1.5, 0.0, 0.3, -0.7, 1.0])
BLOCK = 16


def device_of(backend):
    return "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"


def backend_or_skip(name, dtype=torch.float32):
    """Return the name of a backend, or skip the test if the backend cannot run here."""
    device = device_of(name)
    q = torch.empty(1, 1, 1, 32, dtype=dtype, device=device)
    if reason := load_backend(name).reason_against(Spec(JOINT, BLOCK, max_global=GLOBAL_TOKENS), q):
        pytest.skip(reason)
    if (name, dtype, device) == ("triton", torch.bfloat16, "cpu"):
        pytest.skip("the interpreter of Triton computes bfloat16 incorrectly")
    return name


def inputs(mix, batch=2, heads=1, length=40, dim=32, dtype=torch.float32, scale=1.0, device="cpu"):
    """Return q, k, v (B, H, N, D), α, β (B, H) and, for joint_offset and GLOBAL, the offset of each head (H,)."""
    tensors = list(random_qkv(batch, heads, length, dim, dtype, scale, device=device))
    generator = torch.Generator().manual_seed(1)
    tensors.extend((0.6 + torch.rand(2, batch, heads, generator=generator)).to(device))
    if mix in ("joint_offset", GLOBAL):
        tensors.append(OFFSETS[:heads].to(device))
    return tensors


def holes(batch, length, device="cpu"):
    """Return a mask with padding at the end, blocks without a real key and, if batch > 2, a row that is all padding."""
    mask = random_padding(batch, length, seed=length, full_row=batch > 2)
    mask[0] = torch.arange(length) >= length // 2 + 3
    mask[1, 3 : 2 * length // 3] = True
    return mask.to(device)


def attend(mix, backend="auto", mask=None, block=BLOCK, **options):
    """Return the attention as a function of the tensors that `inputs` returns."""
    if mix == GLOBAL:
        mix = "joint_offset"
        options["global_tokens"] = GLOBAL_TOKENS

    def function(q, k, v, alpha, beta, offset=None):
        if mix == "lln":
            return lln_attention(q, k, v, alpha, beta, mask, backend)
        options_of_mix = dict(options, mix=mix, mix_parameter=offset)
        return lln_diag_attention(q, k, v, alpha, beta, mask, block, backend, **options_of_mix)

    return function


def oracle(mix, mask=None, block=BLOCK, global_tokens=None):
    """Return the definition, with explicit attention matrices, as a function of the same tensors."""
    if mix == GLOBAL:
        global_tokens = GLOBAL_TOKENS

    def function(q, k, v, alpha, beta, offset=None):
        if mix == "lln":
            return reference.lln_matrix(q, k, alpha, beta, mask) @ v
        if mix == "average":
            return reference.lln_diag_matrix(q, k, alpha, beta, block, mask) @ v
        return reference.joint_matrix(q, k, alpha, beta, block, offset, mask, global_tokens) @ v

    return function


def plain(mix, mask, block=BLOCK):
    """Return the formula in plain PyTorch: matrices in the dtype of q, exponentials and weights in float32.

    For GLOBAL it is the definition, entirely in the dtype of q.
    """

    def function(q, k, v, alpha, beta, offset=None):
        dtype = q.dtype
        if mix == GLOBAL:
            return oracle(mix, mask, block)(q, k, v, alpha.to(dtype), beta.to(dtype), offset.to(dtype))
        y = (beta[..., None, None] * k.float()).masked_fill(mask[:, None, :, None], float("-inf"))
        a = (alpha[..., None, None] * q.float() + y.logsumexp(-2, keepdim=True)).softmax(-1).to(dtype)
        w = y.softmax(-2).to(dtype)
        lln = a @ (w.mT @ v)
        if mix == "lln":
            return lln
        block_number = torch.arange(q.shape[-2], device=q.device) // block
        same_block = block_number[:, None] == block_number[None, :]
        same_block = same_block & ~mask[:, None, None, :]  # (B, 1, N, N), without padded keys
        scores = (q @ k.mT / q.shape[-1] ** 0.5).float().masked_fill(~same_block, torch.finfo(torch.float32).min)
        p = scores.softmax(-1).masked_fill(~same_block, 0.0)
        if mix == "average":
            return (lln + p.to(dtype) @ v) / 2
        inside = (a @ w.mT).masked_fill(~same_block, 0.0).float()
        mass = outside_mass(inside)
        keys_in_block = same_block.sum(-1, keepdim=True)
        real_keys = (~mask).sum(-1)[:, None, None, None]
        blocks = BlockKinds((keys_in_block == real_keys) & (keys_in_block > 0), keys_in_block == 0)
        weight = outside_weight(mass, offset[:, None, None], blocks)
        corrected = ((1 - weight * mass) * p - weight * inside).to(dtype)
        return (weight * lln + corrected @ v).to(dtype)

    return function


def output_and_gradients(function, tensors, dtype=None, grad=None):
    """Return function(*tensors) and its gradients with respect to every tensor.

    The gradient of the output is `grad`, by default a fixed random one. If `dtype` is given, the tensors are converted.
    """
    tensors = [x.detach().to(dtype or x.dtype).requires_grad_() for x in tensors]
    out = function(*tensors)
    if grad is None:
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    return [out.detach(), *torch.autograd.grad(out, tensors, grad.to(out))]


def errors(actual, expected):
    """Return the relative errors of the output and the gradients, by their names in NAMES."""
    return {name: relative_rms(x, y) for name, x, y in zip(NAMES, actual, expected, strict=False)}


def assert_float32_accuracy(actual, expected):
    """Check the output and the gradients of `output_and_gradients` against the limits for float32."""
    error = errors(actual, expected)
    assert error.pop("out") <= FLOAT32_FORWARD
    assert max(error.values()) <= FLOAT32_GRADIENT, error


def clear_rounding(expected):
    """Set the last gradient to 0 if only rounding is left of it: then no query sees a key by LLN."""
    if (expected[-1].abs() < 1e-12).all():
        expected[-1].zero_()
