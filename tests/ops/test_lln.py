"""LLN and LLN+Diag, forward and backward, against the float64 quadratic oracles."""

import pytest
import torch

from lln_fairseq.ops import reference
from lln_fairseq.ops.backends import choose_backend
from lln_fairseq.ops.lln import lln_attention, lln_diag_attention
from lln_fairseq.ops.moment_matching import match_moments
from tests.helpers import (
    FLOAT32_FORWARD,
    FLOAT32_GRADIENT,
    HALF_FLOOR,
    HALF_FORWARD_FACTOR,
    HALF_GRADIENT_FACTOR,
    ODD_LENGTHS,
    poison_empty,
    random_padding,
    random_qkv,
    relative_rms,
)

BLOCK = 64


def lln_oracle(q, k, v, alpha, beta, mask):
    return reference.lln_matrix(q, k, alpha, beta, mask) @ v


def lln_diag_oracle(q, k, v, alpha, beta, mask):
    return reference.lln_diag_matrix(q, k, alpha, beta, BLOCK, mask) @ v


def lln_diag_64(q, k, v, alpha, beta, mask=None):
    return lln_diag_attention(q, k, v, alpha, beta, mask, BLOCK)


PAIRS = pytest.mark.parametrize(
    ("function", "oracle"), [(lln_attention, lln_oracle), (lln_diag_64, lln_diag_oracle)], ids=["lln", "lln_diag"]
)


@PAIRS
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("length", ODD_LENGTHS)
@pytest.mark.parametrize("alpha", [0.5, 2.1, 8.0, 30.0])
def test_forward_equals_the_oracle(function, oracle, alpha, length, padded, monkeypatch):
    q, k, v = random_qkv(heads=1, length=length, dim=64)
    mask = random_padding(2, length, full_row=True) if padded else None
    expected = oracle(q.double(), k.double(), v.double(), alpha, alpha, mask)
    poison_empty(monkeypatch)
    assert relative_rms(function(q, k, v, alpha, alpha, mask), expected) <= FLOAT32_FORWARD
    for dtype in (torch.float16, torch.bfloat16):
        assert function(*(x.to(dtype) for x in (q, k, v)), alpha, alpha, mask).isfinite().all()


def gradients(function, tensors, weight):
    tensors = [x.clone().requires_grad_() for x in tensors]
    return torch.autograd.grad((function(*tensors) * weight).sum(), tensors)


@PAIRS
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("length", [1, 63, 97, 130])
def test_gradients_equal_the_oracle(function, oracle, length, dim, monkeypatch):
    q, k, v = random_qkv(length=length, dim=dim)
    alpha, beta = 1 + torch.rand(2, 2, 3, generator=torch.Generator().manual_seed(1))
    mask, weight = random_padding(2, length, full_row=True), torch.randn(q.shape)
    inputs = (q, k, v, alpha, beta)
    expected = gradients(lambda *x: oracle(*x, mask), [x.double() for x in inputs], weight.double())
    poison_empty(monkeypatch)
    actual = gradients(lambda *x: function(*x, mask), inputs, weight)
    for name, a, e in zip(("q", "k", "v", "alpha", "beta"), actual, expected, strict=True):
        assert relative_rms(a, e) <= FLOAT32_GRADIENT, name
    padded = mask[:, None, :, None].expand_as(k)
    assert (actual[1][padded] == 0).all()
    assert (actual[2][padded] == 0).all()


@PAIRS
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("factors", [(1.3, 0.7), (0.0, 0.0), (-1.2, 0.5), (0.5, -2.0)])
def test_gradients_of_inputs_alone_equal_the_oracle(function, oracle, factors, padded):
    q, k, v = random_qkv(length=97)
    mask, weight = random_padding(2, 97) if padded else None, torch.randn(q.shape)
    expected = gradients(lambda *x: oracle(*x, *factors, mask), [x.double() for x in (q, k, v)], weight.double())
    actual = gradients(lambda *x: function(*x, *factors, mask), (q, k, v), weight)
    for name, a, e in zip("qkv", actual, expected, strict=True):
        assert relative_rms(a, e) <= FLOAT32_GRADIENT, name


@PAIRS
def test_gradcheck(function, oracle):
    q, k, v = random_qkv(batch=1, heads=2, length=7, dim=4, dtype=torch.float64)
    alpha, beta = torch.tensor([1.3, 0.7], dtype=torch.float64), torch.tensor(0.9, dtype=torch.float64)
    mask = torch.tensor([[False] * 6 + [True]])
    inputs = [x.requires_grad_() for x in (q, k, v, alpha, beta)]
    assert torch.autograd.gradcheck(lambda *x: function(*x, mask), inputs)


@PAIRS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_no_worse_than_the_plain_formula(function, oracle, dtype):
    inputs = [x.to(dtype) for x in random_qkv(length=130, dim=64)]
    weight = torch.randn(inputs[0].shape).to(dtype)
    exact = [x.double() for x in inputs]
    temperature = (1.5, 1.5, None)

    expected = oracle(*exact, *temperature)
    limit = HALF_FORWARD_FACTOR * relative_rms(oracle(*inputs, *temperature), expected) + HALF_FLOOR
    assert relative_rms(function(*inputs, *temperature), expected) <= limit
    expected = gradients(lambda *x: oracle(*x, *temperature), exact, weight.double())
    plain = gradients(lambda *x: oracle(*x, *temperature), inputs, weight)
    actual = gradients(lambda *x: function(*x, *temperature), inputs, weight)
    for a, p, e in zip(actual, plain, expected, strict=True):
        assert relative_rms(a, e) <= HALF_GRADIENT_FACTOR * relative_rms(p, e) + HALF_FLOOR


@PAIRS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_extreme_inputs_stay_finite(function, oracle, dtype):
    inputs = [x.requires_grad_() for x in random_qkv(length=97, scale=50.0, dtype=dtype)]
    alpha = torch.full((3,), 30.0, requires_grad=True)
    mask = random_padding(2, 97, full_row=True)
    out = function(*inputs, alpha, 30.0, mask)
    out.float().square().mean().backward()
    assert out.isfinite().all()
    assert all(x.grad.isfinite().all() for x in (*inputs, alpha))


@PAIRS
def test_padding_is_ignored_and_an_empty_sequence_gives_zero(function, oracle):
    q, k, v = random_qkv(length=97)
    mask = random_padding(2, 97, full_row=True)
    expected = function(q, k, v, 2.0, 2.0, mask)
    for x in (k, v):
        x[mask[:, None, :].expand(x.shape[:3])] = 1e4
    assert torch.equal(function(q, k, v, 2.0, 2.0, mask), expected)
    assert (expected[-1] == 0).all()


@PAIRS
def test_any_layout_gives_the_same(function, oracle):
    q, k, v = (x.requires_grad_() for x in random_qkv(length=130))
    expected = function(q, k, v, 2.0, 2.0)
    expected_gradients = torch.autograd.grad(expected.square().sum(), (q, k, v))
    q, k, v = q.detach(), k.detach(), v.detach()
    sequence_first = [x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for x in (q, k, v)]
    heads_last = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    wide = [torch.cat((x, x), dim=-1)[..., : x.shape[-1]] for x in (q, k, v)]
    for inputs in (sequence_first, heads_last, wide):
        out = function(*(x.requires_grad_() for x in inputs), 2.0, 2.0)
        torch.testing.assert_close(out, expected)
        actual = torch.autograd.grad(out.square().sum(), inputs)
        for a, e in zip(actual, expected_gradients, strict=True):
            torch.testing.assert_close(a, e)
    assert function(*sequence_first, 2.0, 2.0).stride() == sequence_first[0].stride()


@PAIRS
def test_expanded_gradient(function, oracle):
    q, k, v = (x.requires_grad_() for x in random_qkv(length=70))
    expanded = torch.autograd.grad(function(q, k, v, 2.0, 2.0).sum(), (q, k, v))
    dense = torch.autograd.grad((function(q, k, v, 2.0, 2.0) * torch.ones(q.shape)).sum(), (q, k, v))
    for a, e in zip(expanded, dense, strict=True):
        torch.testing.assert_close(a, e)


def test_checkpointing_repeats_the_dropout():
    q, k, v = (x.requires_grad_() for x in random_qkv(length=70))

    def run(checkpointed):
        torch.manual_seed(3)
        f = lambda q, k, v: lln_diag_attention(q, k, v, 2.0, 2.0, dropout_p=0.3)  # noqa: E731
        out = torch.utils.checkpoint.checkpoint(f, q, k, v, use_reentrant=False) if checkpointed else f(q, k, v)
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

    for plain, again in zip(run(False), run(True), strict=True):
        assert torch.equal(plain, again)


def test_autocast_keeps_the_half_dtype():
    q, k, v = random_qkv(length=70, dtype=torch.bfloat16)
    expected = lln_diag_attention(q, k, v, 2.0, 2.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = lln_diag_attention(q, k, v, 2.0, 2.0)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(q=torch.zeros(2, 3, 4)), "one shape"),
        (dict(k=torch.zeros(1, 2, 5, 8)), "one shape"),
        (dict(v=torch.zeros(1, 2, 4, 8, dtype=torch.float16)), "dtype"),
        (dict(k=torch.zeros(1, 2, 4, 8, device="meta")), "one device, got cpu, meta, cpu"),
        (dict(key_padding_mask=torch.zeros(1, 4)), "bool"),
        (dict(key_padding_mask=torch.zeros(4, 1, dtype=torch.bool)), "shape"),
        (dict(alpha=torch.zeros(3)), "alpha"),
        (dict(backend="cuda"), "choose from auto, torch, triton, cpu"),
        (dict(backend="triton"), "cannot run here: .*head dims"),
        (dict(backend="triton", q=torch.zeros(1, 2, 4, 8).double()), "share one floating-point dtype"),
        (dict(beta=None), "together or not at all"),
        (dict(block_size=0), "block_size"),
        (dict(dropout_p=1.0), "dropout_p"),
    ],
)
def test_bad_input_is_refused(change, message):
    inputs = dict(zip("qkv", torch.zeros(3, 1, 2, 4, 8), strict=True), alpha=1.0, beta=1.0)
    with pytest.raises(ValueError, match=message):
        lln_diag_attention(**inputs | change)


@PAIRS
@pytest.mark.parametrize("backend", ["torch", "cpu", "triton"])
def test_factors_that_are_not_given_are_matched(function, oracle, backend):
    q, k, v = (x.requires_grad_() for x in random_qkv(heads=2, length=70, dim=64))
    if backend == "cpu" and choose_backend("auto", q) != "cpu":
        pytest.skip("no C compiler")
    mask = random_padding(2, 70)
    matched = match_moments(q, k, mask, backend=backend)
    attention = {lln_attention: lln_attention, lln_diag_64: lln_diag_attention}[function]
    outputs = [attention(q, k, v, *factors, mask, backend=backend) for factors in (matched, (None, None))]
    assert torch.equal(*outputs)
    grads = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in outputs]
    assert all(map(torch.equal, *grads))


def test_dispatch(monkeypatch):
    q, k, v = random_qkv(length=20, dim=32)
    expected = lln_diag_attention(q, k, v, 2.0, 2.0, backend="torch")
    assert relative_rms(lln_diag_attention(q, k, v, 2.0, 2.0), expected) <= FLOAT32_FORWARD  # auto on a CPU
    with pytest.raises(ValueError, match="blocks of 16 to 256 tokens, not 7"):
        lln_diag_attention(q, k, v, 2.0, 2.0, block_size=7, backend="triton")
    kernels = lln_diag_attention(q, k, v, 2.0, 2.0, backend="triton")  # interpreted, see conftest.py
    assert relative_rms(kernels, expected) <= FLOAT32_FORWARD
    for matched, fused in zip(match_moments(q, k), match_moments(q, k, backend="triton"), strict=True):
        torch.testing.assert_close(matched, fused)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="Triton is not installed"):
        lln_attention(q, k, v, 2.0, 2.0, backend="triton")
