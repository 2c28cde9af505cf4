"""Attention of random shapes, types, layouts, masks and factors equals its quadratic formula in float64."""

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from lln_fairseq.ops import reference
from lln_fairseq.ops.backends import load_backend
from lln_fairseq.ops.block_diag import block_diag_attention
from lln_fairseq.ops.formula import LLN, Spec
from lln_fairseq.ops.lln import lln_attention, lln_diag_attention
from tests.helpers import (
    FLOAT32_FORWARD,
    FLOAT32_GRADIENT,
    HALF_FLOOR,
    HALF_FORWARD_FACTOR,
    HALF_GRADIENT_FACTOR,
    relative_rms,
)

RESULT_NAMES = ("out", "dq", "dk", "dv", "dalpha", "dbeta")
LAYOUTS = {  # functions that return the same values in another memory layout
    "contiguous": lambda x: x,
    "sequence first": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "heads after tokens": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "window": lambda x: torch.cat((x, x), dim=-1)[..., : x.shape[-1]],
    "transposed": lambda x: x.mT.contiguous().mT,
    "negated view": lambda x: torch._neg_view(-x),
}


CASES = st.fixed_dictionaries(
    {
        "function": st.sampled_from(["lln", "lln_diag", "joint", "block_diag", "window"]),
        "dtype": st.sampled_from([torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16]),
        "backend": st.sampled_from(["cpu", "torch"]),  # "cpu" only if its kernels accept the tensors
        "batch": st.integers(1, 3),
        "heads": st.integers(1, 3),
        "length": st.integers(1, 70),
        "dim": st.sampled_from([1, 3, 8, 16, 32, 40, 64]),
        "block_size": st.sampled_from([1, 5, 16, 50, 64]),
        "offset": st.floats(-3, 3),
        "global_tokens": st.sampled_from([0, 0, 1, 17, 100]),  # only in the joint form and the window
        "scale": st.sampled_from([0.05, 1.0, 3.0]),
        "padding": st.none() | st.floats(0, 1),  # the share of padded tokens; None for no mask
        "garbage": st.sampled_from([None, torch.nan, torch.inf, -torch.inf, 1e4]),  # in padded tokens
        "per_head": st.booleans(),  # α and β differ between heads
        "layout": st.sampled_from(list(LAYOUTS)),
        "seed": st.integers(0, 2**32),
    }
)


def run(case, q, k, v, alpha, beta, mask):
    """Run the function under test: q, k, v (B, H, N, D) -> (B, H, N, D)."""
    backend = case.backend
    if load_backend(backend).reason_against(Spec(LLN), q):  # the reason why the backend cannot take q
        backend = "torch"
    if case.function == "block_diag":
        return block_diag_attention(q, k, v, mask, case.block_size)
    if case.function == "window":
        tokens = min(case.global_tokens, q.shape[2])
        return block_diag_attention(q, k, v, mask, case.block_size, 0.0, tokens, neighbors=2)
    if case.function == "lln":
        return lln_attention(q, k, v, alpha, beta, mask, backend)
    mix = {}
    if case.function == "joint":
        mix = {"mix": "joint_offset", "mix_parameter": case.offset, "global_tokens": case.global_tokens}
    return lln_diag_attention(q, k, v, alpha, beta, mask, case.block_size, backend, **mix)


def oracle(case, q, k, v, alpha, beta, mask):
    """Compute what `run` should return, from the quadratic attention matrix."""
    if case.function == "block_diag":
        return reference.block_diag_matrix(q, k, case.block_size, mask) @ v
    if case.function == "window":
        return reference.block_diag_matrix(q, k, case.block_size, mask, case.global_tokens, neighbors=2) @ v
    if case.function == "lln":
        return reference.lln_matrix(q, k, alpha, beta, mask) @ v
    if case.function == "lln_diag":
        return reference.lln_diag_matrix(q, k, alpha, beta, case.block_size, mask) @ v
    matrix = reference.joint_matrix(q, k, alpha, beta, case.block_size, case.offset, mask, case.global_tokens)
    return matrix @ v


def leaves(tensors, dtype=None):
    """Return copies of the tensors that require gradients, in `dtype` or in their own types."""
    return [x.detach().to(dtype or x.dtype).clone().requires_grad_() for x in tensors]


def output_and_gradients(function, case, layout, tensors, mask, grad_out):
    """Return the output and the gradients of q, k, v, α and β; a gradient that does not exist is zero."""
    q, k, v, alpha, beta = tensors
    change_layout = LAYOUTS[layout]
    out = function(case, change_layout(q), change_layout(k), change_layout(v), alpha, beta, mask)
    results = [out]
    for x, grad in zip(tensors, torch.autograd.grad(out, tensors, grad_out, allow_unused=True), strict=True):
        results.append(torch.zeros_like(x) if grad is None else grad)
    return results


def rms(x):
    return max(x.detach().double().square().mean().sqrt().item(), 1e-30)


def error_scales(expected, inputs):
    """Return the size to which the error of each result is relative.

    Where large terms cancel, as in the gradients of α and β, this is the size of the terms and not of their sum.
    """
    out, dq, dk, dv, dalpha, dbeta = expected
    q, k, _, alpha, beta = inputs
    largest = max(rms(dq), rms(dk), rms(dv))
    scale_alpha = max(rms(dalpha), (q.abs().sum() * largest / alpha.abs().min()).item())
    scale_beta = max(rms(dbeta), (k.abs().sum() * largest / beta.abs().min()).item())
    return [rms(out), largest, largest, largest, scale_alpha, scale_beta]


def error_limits(case, exact, expected, mask, grad_out):
    """Return the largest relative error of each result; in half precision a multiple of the oracle's own error."""
    if case.dtype in (torch.float32, torch.float64):
        return [FLOAT32_FORWARD, *5 * [FLOAT32_GRADIENT]]
    rounded = output_and_gradients(oracle, case, "contiguous", leaves(exact, case.dtype), mask, grad_out)
    limits = []
    for name, x, y in zip(RESULT_NAMES, rounded, expected, strict=True):
        factor = HALF_FORWARD_FACTOR if name == "out" else HALF_GRADIENT_FACTOR
        limits.append(factor * max(relative_rms(x, y), torch.finfo(case.dtype).eps) + HALF_FLOOR)
    return limits


@given(case=CASES.map(lambda values: SimpleNamespace(**values)))
def test_attention_equals_its_oracle_whatever_padding_contains(case):
    torch.manual_seed(case.seed)
    shape = (case.batch, case.heads, case.length, case.dim)
    qkv = [(case.scale * torch.randn(shape)).to(case.dtype) for _ in range(3)]
    grad_out = torch.randn(shape).to(case.dtype)
    factor_shape = (case.batch, case.heads) if case.per_head else ()
    factors = [0.3 + 1.7 * torch.rand(factor_shape).double() for _ in range(2)]
    mask = None
    padded = torch.zeros(shape, dtype=torch.bool)
    if case.padding is not None:
        mask = torch.rand(case.batch, case.length) < case.padding
        padded = mask[:, None, :, None].expand(shape)
    filled_qkv = qkv
    if case.garbage is not None:
        filled_qkv = [x.masked_fill(padded, case.garbage) for x in qkv]
        grad_out = grad_out.masked_fill(padded, 0.0)

    exact = leaves([*qkv, *factors], torch.float64)
    expected = output_and_gradients(oracle, case, "contiguous", exact, mask, grad_out.double())
    inputs = leaves([*filled_qkv, *factors])
    results = output_and_gradients(run, case, case.layout, inputs, mask, LAYOUTS[case.layout](grad_out))

    if case.garbage is not None:
        assert not any(grad[padded].any() for grad in results[1:4]), "a gradient flows to padding"
        results[0] = results[0].masked_fill(padded, 0.0)
        expected[0] = expected[0].masked_fill(padded, 0.0)
    scales = error_scales(expected, exact)
    limits = error_limits(case, exact, expected, mask, grad_out)
    for name, x, y, scale, limit in zip(RESULT_NAMES, results, expected, scales, limits, strict=True):
        assert x.isfinite().all(), f"{name} is not finite"
        assert rms(x.double() - y) <= limit * scale + 1e-30, f"{name} is wrong"
