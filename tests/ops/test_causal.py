"""Causal LLN attention against a float64 oracle with a triangular mask, and its independence of later tokens."""

import pytest
import torch

from lln_fairseq.ops import causal
from lln_fairseq.ops.causal import PIECE, causal_attention, continue_causal, empty_state
from lln_fairseq.ops.lln import lln_attention
from lln_fairseq.ops.moment_matching import match_moments, running_moments
from tests.helpers import (
    FLOAT32_FORWARD,
    FLOAT32_GRADIENT,
    HALF_FLOOR,
    HALF_FORWARD_FACTOR,
    poison_empty,
    random_padding,
    random_qkv,
    relative_rms,
)

PADDING = ("none", "right", "left")


def make_mask(padding, length):
    """Return a mask with padding of random length on one side, and a whole row of padding; None without padding."""
    if padding == "none":
        return None
    mask = random_padding(2, length, full_row=True)
    return mask if padding == "right" else mask.flip(1)


def oracle(x, y, v, mask=None):
    """Compute causal LLN attention by its definition, from x = α q and y = β k."""
    banned = torch.ones(x.shape[2], x.shape[2], dtype=torch.bool).triu(1)
    if mask is not None:
        banned = banned | mask[:, None, None, :]
    scores = (x.unsqueeze(-2) + y.unsqueeze(-3)).logsumexp(dim=-1)
    scores = scores.masked_fill(banned, torch.finfo(x.dtype).min)
    return scores.softmax(dim=-1).masked_fill(banned, 0.0) @ v


def lln_oracle(q, k, v, alpha, beta, mask=None):
    alpha, beta = (torch.as_tensor(a, dtype=q.dtype)[..., None, None] for a in (alpha, beta))
    return oracle(alpha * q, beta * k, v, mask)


def gradients(function, tensors, weight):
    """Return the gradients of (function(*tensors) * weight).sum() with respect to the tensors."""
    tensors = [x.clone().requires_grad_() for x in tensors]
    return torch.autograd.grad((function(*tensors) * weight).sum(), tensors)


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("length", [1, 63, 130])
@pytest.mark.parametrize("alpha", [0.5, 30.0])
def test_output_equals_oracle(alpha, length, padding, monkeypatch):
    q, k, v = random_qkv(heads=1, length=length)
    mask = make_mask(padding, length)
    expected = lln_oracle(q.double(), k.double(), v.double(), alpha, alpha, mask)
    poison_empty(monkeypatch)
    assert relative_rms(lln_attention(q, k, v, alpha, alpha, mask, causal=True), expected) <= FLOAT32_FORWARD


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("length", [1, 130])
def test_gradients_equal_oracle(length, padding, monkeypatch):
    q, k, v = random_qkv(length=length)
    alpha, beta = 1 + torch.rand(2, 2, 3, generator=torch.Generator().manual_seed(1))
    mask = make_mask(padding, length)
    weight = torch.randn(q.shape)
    inputs = (q, k, v, alpha, beta)
    expected = gradients(lambda *x: lln_oracle(*x, mask), [x.double() for x in inputs], weight.double())
    poison_empty(monkeypatch)
    actual = gradients(lambda *x: lln_attention(*x, mask, causal=True), inputs, weight)

    for name, a, e in zip(("q", "k", "v", "alpha", "beta"), actual, expected, strict=True):
        assert relative_rms(a, e) <= FLOAT32_GRADIENT, name
    if mask is not None:
        assert all((x[mask[:, None, :, None].expand_as(x)] == 0).all() for x in actual[1:3])


def test_second_derivatives():
    q, k, v = (x.requires_grad_() for x in random_qkv(batch=1, heads=2, length=5, dim=3, dtype=torch.float64))
    alpha = torch.tensor([1.3, 0.7], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[False] * 4 + [True]])

    def function(*x):
        return lln_attention(*x, 0.9, mask, causal=True)

    assert torch.autograd.gradgradcheck(function, (q, k, v, alpha))


def make_huge_keys(length=200):
    """Return x, y, v whose keys y rise by 500 and 5000 within a piece, in all features and in one feature.

    Some other keys are far below the rest.
    """
    x, y, v = random_qkv(heads=2, length=length, dim=16)
    y[:, :, 130] += 500
    y[0, 1, 140:, 3] += 5000
    y[1, :, :70, 2] -= 1e4
    y[1, 0, 150:] *= 100
    return x, y, v


def test_huge_keys_cost_no_digits():
    inputs = make_huge_keys()
    exact = [x.double() for x in inputs]
    weight = torch.randn(inputs[0].shape)

    out = causal_attention(*inputs)
    expected = oracle(*exact)
    for rows in (slice(0, 130), slice(130, 140), slice(140, None)):
        assert relative_rms(out[:, :, rows], expected[:, :, rows]) <= FLOAT32_FORWARD

    actual_gradients = gradients(causal_attention, inputs, weight)
    expected_gradients = gradients(oracle, exact, weight.double())
    for name, a, e in zip("xyv", actual_gradients, expected_gradients, strict=True):
        assert relative_rms(a, e) <= FLOAT32_GRADIENT, name


@pytest.mark.parametrize("change", [torch.randn_like, lambda x: x + 1e3, lambda x: x * 1e4])
@pytest.mark.parametrize("first", [1, 64, 100])
def test_later_tokens_change_nothing(first, change):
    q, k, v = random_qkv(length=150)
    changed_inputs = [torch.cat([x[:, :, :first], change(x[:, :, first:])], dim=2) for x in (q, k, v)]

    out = lln_attention(q, k, v, 2.0, 2.0, causal=True)
    changed = lln_attention(*changed_inputs, 2.0, 2.0, causal=True)

    assert relative_rms(changed[:, :, :first], out[:, :, :first]) <= FLOAT32_FORWARD
    assert relative_rms(changed[:, :, first:], out[:, :, first:]) > 0.1


@pytest.mark.parametrize("inputs", [random_qkv(length=150, scale=3.0), make_huge_keys()])
@pytest.mark.parametrize("sizes", [(1,), (64,), (7, 90, 3)])
def test_parts_continued_from_a_state_equal_the_whole(inputs, sizes):
    expected = oracle(*(x.double() for x in inputs))

    start = 0
    outputs = []
    state = empty_state(inputs[0])
    while start < inputs[0].shape[2]:
        size = sizes[len(outputs) % len(sizes)]
        out, state = continue_causal(*(x[:, :, start : start + size] for x in inputs), state)
        outputs.append(out)
        start += size

    assert relative_rms(torch.cat(outputs, dim=2), expected) <= FLOAT32_FORWARD


@pytest.mark.parametrize("size", [1, 7, 256])  # 256 on a GPU
def test_size_of_pieces_changes_nothing(size, monkeypatch):
    inputs = random_qkv(length=150)
    weight = torch.randn(2, 3, 150, 32)
    expected = [causal_attention(*inputs), *gradients(causal_attention, inputs, weight)]
    monkeypatch.setattr(causal, "PIECE", size)
    actual = [causal_attention(*inputs), *gradients(causal_attention, inputs, weight)]
    for a, e in zip(actual, expected, strict=True):
        assert relative_rms(a, e) <= FLOAT32_FORWARD


def test_memory_saved_for_backward_is_linear_in_the_tokens():
    def count_saved_elements(length):
        sizes = []
        x, y, v = (t.requires_grad_() for t in random_qkv(batch=1, heads=1, length=length))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()), lambda t: t):
            causal_attention(x, y, v)
        return sum(sizes)

    elements = count_saved_elements(8 * PIECE)
    assert count_saved_elements(16 * PIECE) == 2 * elements
    assert elements < 8 * PIECE * 32 * 5  # five tensors like q: there is a state for each piece, not for each token


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_error_is_near_that_of_the_plain_formula(dtype):
    inputs = [x.to(dtype) for x in random_qkv(length=130)]
    expected = lln_oracle(*(x.double() for x in inputs), 1.5, 1.5)
    out = lln_attention(*inputs, 1.5, 1.5, causal=True)
    assert out.dtype == dtype
    plain_error = relative_rms(lln_oracle(*inputs, 1.5, 1.5), expected)
    assert relative_rms(out, expected) <= HALF_FORWARD_FACTOR * plain_error + HALF_FLOOR


@pytest.mark.parametrize("create_graph", [False, True])
def test_autocast_rounds_nothing(create_graph):
    x, y, v = (t.requires_grad_() for t in random_qkv(length=130))
    expected = torch.autograd.grad(causal_attention(x, y, v).square().sum(), (x, y, v), create_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = causal_attention(x, y, v)
        actual = torch.autograd.grad(out.square().sum(), (x, y, v), create_graph=create_graph)
    for a, e in zip(actual, expected, strict=True):
        assert relative_rms(a, e) <= FLOAT32_GRADIENT


def test_alpha_and_beta_are_matched_to_the_whole_sequence():
    q, k, v = random_qkv(length=70)
    mask = random_padding(2, 70)
    expected = lln_attention(q, k, v, *match_moments(q, k, mask), mask, causal=True)
    torch.testing.assert_close(lln_attention(q, k, v, key_padding_mask=mask, causal=True), expected)


@pytest.mark.parametrize("constants", ["calibrated", "paper"])
def test_running_moments_equal_those_of_every_prefix(constants):
    q, k, _ = random_qkv(length=20)
    k[:, :, 5:] *= 3
    mask = torch.zeros(2, 20, dtype=torch.bool)
    mask[1, 12:] = True

    alpha, beta, moments = running_moments(q, k, mask, constants)
    for length in (1, 6, 20):
        expected = match_moments(q[:, :, :length], k[:, :, :length], mask[:, :length], constants=constants)
        torch.testing.assert_close((alpha[:, :, length - 1], beta[:, :, length - 1]), expected)

    _, _, before = running_moments(q[:, :, :13], k[:, :, :13], mask[:, :13], constants)
    continued = running_moments(q[:, :, 13:], k[:, :, 13:], mask[:, 13:], constants, before)
    torch.testing.assert_close(continued, (alpha[:, :, 13:], beta[:, :, 13:], moments))


def test_running_moments_lose_no_digits_to_a_large_mean():
    q, k, _ = random_qkv(length=20)
    mask = torch.zeros(2, 20, dtype=torch.bool)
    mask[1, :5] = True
    q = q + 1000
    k = k - 1000
    q[:, :, 19:] += 1e6  # a later token changes nothing

    actual = running_moments(q, k, mask)
    expected = running_moments(q.double() - 1000, k.double() + 1000, mask)

    for x, y in zip(actual[:2], expected[:2], strict=True):
        torch.testing.assert_close(x.double()[:, :, 6:], y[:, :, 6:], rtol=2e-5, atol=0)


def test_running_moments_of_no_tokens_are_the_earlier_ones():
    q, k, _ = random_qkv(length=5)
    *_, moments = running_moments(q, k)
    alpha, _, after = running_moments(q[:, :, :0], k[:, :, :0], before=moments)
    assert alpha.shape == (2, 3, 0)
    assert after is moments


def test_wrong_calls_are_rejected():
    q, k, v = random_qkv(length=3)
    with pytest.raises(ValueError, match="must be auto or torch"):
        lln_attention(q, k, v, 1.0, 1.0, backend="cpu", causal=True)
    with pytest.raises(ValueError, match="cannot be traced"):
        torch.func.vmap(causal_attention)(*(x[None] for x in (q, k, v)))
    with pytest.raises(ValueError, match="unknown constants"):
        running_moments(q, k, constants="best")


def test_no_tokens_give_no_tokens():
    q, k, v = (x.requires_grad_() for x in random_qkv(length=0))
    lln_attention(q, k, v, 1.0, 1.0, causal=True).sum().backward()
    assert q.grad.shape == q.shape


def test_large_values_stay_finite():
    q, k, v = random_qkv(length=130)
    assert lln_attention(q, 15 * k, 1e25 * v, 2.0, 2.0, causal=True).isfinite().all()
