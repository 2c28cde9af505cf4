"""Attention of random shapes, dtypes, layouts, masks and factors equals its quadratic oracle in float64."""

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from lln_fairseq.ops import reference
from lln_fairseq.ops.backends import load_backend
from lln_fairseq.ops.block_diag import block_diag_attention
from lln_fairseq.ops.lln import lln_attention, lln_diag_attention
from tests.helpers import (
    FLOAT32_FORWARD,
    FLOAT32_GRADIENT,
    HALF_FLOOR,
    HALF_FORWARD_FACTOR,
    HALF_GRADIENT_FACTOR,
    relative_rms,
)

NAMES = ("out", "dq", "dk", "dv", "dalpha", "dbeta")
LAYOUTS = {
    "contiguous": lambda x: x,
    "sequence first": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "heads after tokens": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "window": lambda x: torch.cat((x, x), dim=-1)[..., : x.shape[-1]],
    "transposed": lambda x: x.mT.contiguous().mT,
    "negated view": lambda x: torch._neg_view(-x),
}


CASES = st.fixed_dictionaries({
    "function": st.sampled_from(["lln", "lln_diag", "joint", "block_diag"]),
    "dtype": st.sampled_from([torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    "backend": st.sampled_from(["cpu", "torch"]),  # "cpu" where its kernels take the tensors
    "batch": st.integers(1, 3),
    "heads": st.integers(1, 3),
    "length": st.integers(1, 70),
    "dim": st.sampled_from([1, 3, 8, 16, 32, 40, 64]),
    "block_size": st.sampled_from([1, 5, 16, 50, 64]),
    "offset": st.floats(-3, 3),
    "scale": st.sampled_from([0.05, 1.0, 3.0]),
    "padding": st.none() | st.floats(0, 1),
    "garbage": st.sampled_from([None, torch.nan, torch.inf, -torch.inf, 1e4]),
    "per_head": st.booleans(),
    "layout": st.sampled_from(list(LAYOUTS)),
    "seed": st.integers(0, 2**32),
})  # fmt: skip


def run(case, q, k, v, alpha, beta, mask):
    backend = "torch" if load_backend(case.backend).is_supported(q) else case.backend
    if case.function == "block_diag":
        return block_diag_attention(q, k, v, mask, case.block_size)
    if case.function == "lln":
        return lln_attention(q, k, v, alpha, beta, mask, backend)
    mix = {"mix": "joint_offset", "mix_parameter": case.offset} if case.function == "joint" else {}
    return lln_diag_attention(q, k, v, alpha, beta, mask, case.block_size, backend, **mix)


def oracle(case, q, k, v, alpha, beta, mask):
    if case.function == "block_diag":
        return reference.block_diag_matrix(q, k, case.block_size, mask) @ v
    if case.function == "lln":
        return reference.lln_matrix(q, k, alpha, beta, mask) @ v
    if case.function == "lln_diag":
        return reference.lln_diag_matrix(q, k, alpha, beta, case.block_size, mask) @ v
    return reference.joint_matrix(q, k, alpha, beta, case.block_size, case.offset, mask) @ v


def leaves(tensors, dtype=None):
    return [x.detach().to(dtype or x.dtype).clone().requires_grad_() for x in tensors]


def results(function, case, layout, tensors, mask, grad):
    """The output and the gradients of q, k, v, α, β."""
    out = function(case, *map(LAYOUTS[layout], tensors[:3]), *tensors[3:], mask)
    grads = torch.autograd.grad(out, tensors, grad, allow_unused=True)
    return [out, *(torch.zeros_like(x) if grad is None else grad for x, grad in zip(tensors, grads, strict=True))]


def rms(x):
    return max(x.detach().double().square().mean().sqrt().item(), 1e-30)


def scales(expected, inputs):
    """What errors are relative to: where terms cancel, to the size of the terms and not to what is left of them."""
    out, *grads, dalpha, dbeta = expected
    largest = max(map(rms, grads))
    found = [rms(out), largest, largest, largest]
    for x, factor, total in ((inputs[0], inputs[3], dalpha), (inputs[1], inputs[4], dbeta)):
        found.append(max(rms(total), (x.abs().sum() * largest / factor.abs().min()).item()))
    return found


def limits(case, exact, expected, mask, grad):
    """The largest relative error of the output and of each gradient; in half precision relative to the oracle's."""
    if case.dtype in (torch.float32, torch.float64):
        return [FLOAT32_FORWARD, *5 * [FLOAT32_GRADIENT]]
    theirs = results(oracle, case, "contiguous", leaves(exact, case.dtype), mask, grad)
    rounding = torch.finfo(case.dtype).eps
    found = []
    for name, x, y in zip(NAMES, theirs, expected, strict=True):
        factor = HALF_FORWARD_FACTOR if name == "out" else HALF_GRADIENT_FACTOR
        found.append(factor * max(relative_rms(x, y), rounding) + HALF_FLOOR)
    return found


@given(case=CASES.map(lambda values: SimpleNamespace(**values)))
def test_attention_equals_its_oracle_whatever_padding_holds(case):
    torch.manual_seed(case.seed)
    shape = (case.batch, case.heads, case.length, case.dim)
    qkv = [(case.scale * torch.randn(shape)).to(case.dtype) for _ in range(3)]
    grad = torch.randn(shape).to(case.dtype)
    factors = [0.3 + 1.7 * torch.rand((case.batch, case.heads) if case.per_head else ()).double() for _ in range(2)]
    mask = None if case.padding is None else torch.rand(case.batch, case.length) < case.padding
    padded = torch.zeros(shape, dtype=torch.bool) if mask is None else mask[:, None, :, None].expand(shape)
    filled = qkv
    if case.garbage is not None:
        filled = [x.masked_fill(padded, case.garbage) for x in qkv]
        grad = grad.masked_fill(padded, 0.0)

    exact = leaves([*qkv, *factors], torch.float64)
    expected = results(oracle, case, "contiguous", exact, mask, grad.double())
    found = results(run, case, case.layout, leaves([*filled, *factors]), mask, LAYOUTS[case.layout](grad))
    if case.garbage is not None:
        assert not any(x[padded].any() for x in found[1:4]), "a gradient flows to padding"
        found[0] = found[0].masked_fill(padded, 0.0)
        expected[0] = expected[0].masked_fill(padded, 0.0)
    bounds = limits(case, exact, expected, mask, grad)
    for name, x, y, scale, limit in zip(NAMES, found, expected, scales(expected, exact), bounds, strict=True):
        assert x.isfinite().all(), f"{name} is not finite"
        assert rms(x.double() - y) <= limit * scale + 1e-30, f"{name} is wrong"
