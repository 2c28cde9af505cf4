"""Attention on random shapes, dtypes, layouts, masks, factors and backends against the quadratic oracles in float64.

What padding holds is often NaN or inf; every fifth call is wrong in some way and must be refused in one line.
"""

import functools
import random
from pathlib import Path

import pytest
import torch

from lln_fairseq.ops import reference
from lln_fairseq.ops.backends import load_backend
from lln_fairseq.ops.block_diag import block_diag_attention
from lln_fairseq.ops.lln import lln_attention, lln_diag_attention
from lln_fairseq.ops.moment_matching import match_moments
from tests.helpers import (
    FLOAT32_FORWARD,
    FLOAT32_GRADIENT,
    HALF_FLOOR,
    HALF_FORWARD_FACTOR,
    HALF_GRADIENT_FACTOR,
    relative_rms,
)

FUNCTIONS = ("lln", "lln_diag", "block_diag")
DTYPES = (torch.float32, torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16)
DIMS = (1, 3, 8, 16, 16, 32, 32, 40, 64)
GARBAGE = (torch.nan, torch.inf, -torch.inf, 3e38, 1e4)
NAMES = ("dq", "dk", "dv", "dα", "dβ")
HEAD_DIMS = {"cpu": (16, 32, 64), "triton": (16, 32, 64)}
TRITON_SHARE = 0.01  # the interpreter takes a second for what the others do in a millisecond


def attack(rng: random.Random, folder: Path) -> str:
    torch.manual_seed(rng.getrandbits(63))
    call = Call(rng)
    attempt = rng.choices((refused, right, derived_twice, dropped), weights=(20, 70, 5, 5))[0]
    return attempt(rng, call)


class Call:
    """A random call: tensors, mask, factors, block size and backend."""

    def __init__(self, rng):
        self.function, self.dtype = rng.choice(FUNCTIONS), rng.choice(DTYPES)
        self.dim, self.backend = rng.choice(DIMS), "torch"
        if self.dtype == torch.float32 and self.dim in HEAD_DIMS["cpu"] and rng.random() < 0.7:
            self.backend = available("cpu")
        self.block_size = rng.choice((None, 1, 5, 16, 50, 64))
        if self.function != "block_diag" and rng.random() < TRITON_SHARE:
            self.dim, self.block_size = rng.choice(HEAD_DIMS["triton"]), rng.choice((None, 16, 50))
            self.backend, self.dtype = available("triton"), torch.float32
        self.batch, self.heads, self.length = rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, 70)
        if rng.random() < 0.05:
            setattr(self, rng.choice(("batch", "heads", "length")), 0)
        joint = self.function == "lln_diag" and rng.random() < 0.6
        self.offset = rng.uniform(-3, 3) if joint else None
        shape = (self.batch, self.heads, self.length, self.dim)
        scale = rng.choice((0.05, 1.0, 3.0))
        self.qkv = [(scale * torch.randn(shape)).to(self.dtype) for _ in range(3)]
        self.weight = torch.randn(shape).to(self.dtype)
        self.mask = random_mask(rng, self.batch, self.length)
        self.factors = [random_factor(rng, self.batch, self.heads) for _ in range(2)]
        self.layout = rng.choice(LAYOUTS)

    @property
    def blocks(self):
        return self.dim if self.block_size is None else self.block_size

    def run(self, q, k, v, *factors, **options):
        if self.function == "block_diag":
            return block_diag_attention(q, k, v, self.mask, self.block_size, **options)
        if self.function == "lln":
            return lln_attention(q, k, v, *factors, self.mask, self.backend)
        if self.offset is not None:
            options = {"mix": "joint_offset", "mix_parameter": self.offset} | options
        return lln_diag_attention(q, k, v, *factors, self.mask, self.block_size, self.backend, **options)

    def oracle(self, q, k, v, *factors):
        parts = {
            "lln": lambda: reference.lln_matrix(q, k, *factors, self.mask),
            "lln_diag": lambda: reference.lln_diag_matrix(q, k, *factors, self.blocks, self.mask),
            "joint": lambda: reference.joint_matrix(q, k, *factors, self.blocks, self.offset, self.mask),
            "block_diag": lambda: reference.block_diag_matrix(q, k, self.blocks, self.mask),
        }
        return parts[self.function if self.offset is None else "joint"]() @ v


@functools.cache
def available(backend):
    """The backend, or PyTorch where it cannot run."""
    return "torch" if load_backend(backend).is_supported(torch.empty(1, 1, 1, 16)) else backend


def random_mask(rng, batch, length):
    kind = rng.choice(("none", "right", "any", "spread"))
    if kind == "none":
        return None
    if kind == "right":
        return torch.arange(length) >= torch.randint(0, length + 1, (batch, 1))
    mask = (torch.rand(length, batch) < rng.random()).T  # not contiguous
    return mask if kind == "any" else mask[:1].expand(batch, length)


def random_factor(rng, batch, heads):
    """A number, or a tensor that broadcasts to (B, H)."""
    shape = rng.choice((None, (), (heads,), (batch, 1), (batch, heads)))
    return rng.uniform(0.3, 2.0) if shape is None else 0.3 + torch.rand(shape, dtype=torch.float64)


LAYOUTS = (
    lambda x: x,
    lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),  # sequence first
    lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    lambda x: torch.cat((x, x), dim=-1)[..., : x.shape[-1]],
    lambda x: x.mT.contiguous().mT,  # features apart
    lambda x: torch._neg_view(-x),
)


def leaves(tensors, dtype=None):
    """Copies that want gradients; numbers become tensors."""
    return [torch.as_tensor(x).detach().clone().to(dtype or torch.as_tensor(x).dtype).requires_grad_() for x in tensors]


def gradients(out, tensors, weight):
    found = torch.autograd.grad(out, tensors, weight, allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for grad, x in zip(found, tensors, strict=True)]


def right(rng, call):
    """The output and all gradients are those of the oracle; what padding holds changes nothing."""
    tensors = leaves([*call.qkv, *call.factors])
    weight, garbage = call.weight, None
    if call.mask is not None and rng.random() < 0.5:
        garbage = rng.choice(GARBAGE if call.dtype != torch.float16 else GARBAGE[:3])
        padded = call.mask[:, None, :, None].expand_as(weight)
        weight = weight.masked_fill(padded, 0.0)
        tensors[:3] = leaves(x.detach().masked_fill(padded, garbage) for x in tensors[:3])
    out = call.run(*map(call.layout, tensors[:3]), *tensors[3:])
    assert (out.shape, out.dtype) == (weight.shape, call.dtype)
    grads = gradients(out, tensors, call.layout(weight))
    if not out.numel():
        assert not any(x.any() for x in grads)
        return "empty"
    exact = leaves([*call.qkv, *call.factors], torch.float64)
    expected = call.oracle(*exact)
    expected_grads = gradients(expected, exact, weight.double())
    if garbage is not None:
        real = ~call.mask[:, None, :, None]
        assert all((x.masked_fill(real, 0.0) == 0).all() for x in grads[:3]), "a gradient flows to padding"
        out, expected = out.masked_fill(~real, 0.0), expected.masked_fill(~real, 0.0)
    limits = limits_of(call, weight, expected, expected_grads)
    compare(call, [out, *grads], [expected, *expected_grads], exact, limits)
    if call.function != "block_diag":
        matched(call, tensors[:3])
    return call.backend


def limits_of(call, weight, expected, expected_grads):
    """The largest relative error of the output and of each gradient."""
    if call.dtype in (torch.float32, torch.float64):
        return [FLOAT32_FORWARD, *5 * [FLOAT32_GRADIENT]]
    plain = leaves(call.qkv)
    factors = leaves(call.factors, call.dtype)
    out = call.oracle(*plain, *factors)
    theirs = [relative_rms(out, expected)]
    theirs += map(relative_rms, gradients(out, plain + factors, weight), expected_grads)
    rounding = torch.finfo(call.dtype).eps
    factors = [HALF_FORWARD_FACTOR, *5 * [HALF_GRADIENT_FACTOR]]
    return [factor * max(their, rounding) + HALF_FLOOR for factor, their in zip(factors, theirs, strict=True)]


def compare(call, found, expected, inputs, limits):
    for name, x, y, scale, limit in zip(
        ("out", *NAMES), found, expected, scales(expected, inputs), limits, strict=True
    ):
        assert x.isfinite().all(), f"{name} is not finite: {describe(call)}"
        error = rms(x.detach().double() - y)
        assert error <= limit * scale + 1e-30, f"{name} is wrong by {error / scale:.1e}: {describe(call)}"


def scales(expected, inputs):
    """What an error is relative to: where terms cancel, to their size and not to what is left."""
    out, *grads, dalpha, dbeta = expected
    largest = max(map(rms, grads))
    yield rms(out)
    yield from 3 * [largest]
    for x, factor, total in zip(inputs[:2], inputs[3:], (dalpha, dbeta), strict=True):
        yield max(rms(total), (x.abs().sum() * largest / factor.abs().min()).item())


def rms(x):
    return max(x.square().mean().sqrt().item(), 1e-30)


def matched(call, qkv):
    """α and β that are not given are those of match_moments, and these are those of float64."""
    q, k, v = (x.detach() for x in qkv)
    alpha, beta = match_moments(q, k, call.mask, backend=call.backend)
    padded = torch.zeros(q.shape[0], q.shape[2], dtype=torch.bool) if call.mask is None else call.mask
    enough = (~padded).sum(dim=1) * call.dim >= 64  # a few numbers may lie close together and far from 0
    for x, y in zip((alpha, beta), match_moments(q.double(), k.double(), call.mask, backend="torch"), strict=True):
        torch.testing.assert_close(
            x[enough].double(), y[enough], rtol=1e-3 if call.backend == "torch" else 1e-4, atol=0
        )
    given, left = (
        call.run(q, k, v, *x).masked_fill(padded[:, None, :, None], 0.0) for x in ((alpha, beta), (None, None))
    )
    limit = FLOAT32_FORWARD if call.dtype.itemsize > 2 else HALF_FORWARD_FACTOR * torch.finfo(call.dtype).eps
    assert relative_rms(left, given) <= limit, describe(call)


def derived_twice(rng, call):
    """The gradient of a gradient penalty is that of the oracle."""

    def penalty(out, tensors):
        if not out.requires_grad:
            return tensors
        first = torch.autograd.grad(out.double().sum(), tensors[:3], create_graph=True, allow_unused=True)
        total = sum(x.double().square().sum() for x in first if x is not None)
        return gradients(total, tensors, None) if total.requires_grad else [torch.zeros_like(x) for x in tensors]

    if not call.weight.numel():
        return "empty"
    # Every backend derives by one formula; in float32 it could not be told from its rounding where terms cancel.
    call.dtype, call.backend = torch.float64, "torch"
    tensors, exact = (leaves([*call.qkv, *call.factors], torch.float64) for _ in range(2))
    found = penalty(call.run(*tensors), tensors)
    for name, x, y in zip(NAMES, found, penalty(call.oracle(*exact), exact), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
    return "twice"


def dropped(rng, call):
    """With dropout the output is linear in v: <v, dv> = <out, weight>."""
    if call.function == "lln" or call.dtype.itemsize == 2:
        return "same"
    tensors = leaves([*call.qkv, *call.factors])
    out = call.run(*tensors, dropout_p=rng.uniform(0.0, 0.9))
    grads = gradients(out, tensors, call.weight)
    left, right = ((x.double() * y.double()).sum().item() for x, y in ((tensors[2], grads[2]), (out, call.weight)))
    size = (out.double() * call.weight).abs().sum().item()
    assert abs(left - right) <= 1e-3 * size + 1e-12, f"{left} != {right} with dropout: {describe(call)}"
    return "dropout"


CHANGES = {
    "q": lambda x: x.qkv[0].flatten(0, 1),
    "k": lambda x: torch.nn.functional.pad(x.qkv[1], (0, 0, 0, 1)),
    "v": lambda x: x.qkv[2].to(torch.float8_e5m2),
    "key_padding_mask": lambda x: torch.zeros(x.batch, x.length),
    "block_size": lambda x: 2.5,
    "dropout_p": lambda x: 1.0,
    "alpha": lambda x: torch.ones(x.heads + 2),
    "beta": lambda x: None,
    "backend": lambda x: "cuda",
}  # fmt: skip
SENSELESS = ("8", [1, 2], object())


def refused(rng, call):
    """One argument is wrong: ValueError, in one line."""
    name = rng.choice(list(CHANGES))
    arguments = dict(zip("qkv", call.qkv, strict=True), alpha=1.0, beta=1.0, key_padding_mask=call.mask)
    arguments |= dict(backend=call.backend, block_size=call.block_size)
    wrong = CHANGES[name](call)
    if name not in ("alpha", "beta") and rng.random() < 0.5:
        wrong = rng.choice(SENSELESS)
    with pytest.raises(ValueError, match=r"\A.+\Z"):
        lln_diag_attention(**arguments | {name: wrong})
    return "refused"


def describe(call):
    shape = (call.batch, call.heads, call.length, call.dim)
    mask = None if call.mask is None else f"{int(call.mask.sum())} padded"
    layout = LAYOUTS.index(call.layout)
    form = "" if call.offset is None else f" joint_offset {call.offset:.3f}"
    return (
        f"{call.function}{form} {shape} {call.dtype} {mask}, blocks {call.block_size}, layout {layout}, {call.backend}"
    )
