"""Global tokens in the joint mixes, for every backend that supports them, and what the public function accepts."""

import pytest
import torch

from lln_fairseq.ops import reference
from lln_fairseq.ops.backends import choose_backend, load_backend
from lln_fairseq.ops.lln import lln_diag_attention
from lln_fairseq.ops.moment_matching import match_moments
from tests.helpers import (
    FLOAT32_FORWARD,
    FLOAT32_GRADIENT,
    HALF_FLOOR,
    HALF_FORWARD_FACTOR,
    HALF_GRADIENT_FACTOR,
    poison_empty,
    random_padding,
    random_qkv,
    relative_rms,
)
from tests.ops.mixes import BLOCK, NAMES, attend, errors, holes, inputs, oracle, output_and_gradients

MIX = "joint_offset"
PER_SEQUENCE = torch.tensor([7, 0, 21])
NUMBERS = {"1": 1, "5": 5, "a block": BLOCK, "37": 37, "more than N": 1000, "per sequence": PER_SEQUENCE}
every_number = pytest.mark.parametrize("number", NUMBERS.values(), ids=list(NUMBERS))

# Tokens, head dimension and block size; the last two have one block.
SHAPES = [(63, 32, 32), (97, 64, 16), (130, 32, 48), (40, 16, 64), (1, 32, 16)]


@pytest.fixture(params=["torch", "cpu"])
def backend(request):
    if reason := load_backend(request.param).is_supported(torch.empty(1, 1, 1, 32), BLOCK, 5):
        pytest.skip(reason)
    return request.param


def left_padding(batch, length):
    """Return a mask, bool (B, N), with 0, 9, 18, ... padded tokens on the left."""
    return torch.arange(length)[None] < 9 * torch.arange(batch)[:, None]


MASKS = {"no padding": lambda batch, length: None, "holes": holes, "left": left_padding}


def without_padding(function, mask):
    """Return the function with 0 in the output's padded rows."""
    if mask is None:
        return function
    return lambda *tensors: function(*tensors).masked_fill(mask[:, None, :, None], 0.0)


def clear_rounding(expected):
    """Set the offset's gradient to 0 if only rounding is left of it: then no query sees a key by LLN."""
    if (expected[-1].abs() < 1e-12).all():
        expected[-1].zero_()


@every_number
@pytest.mark.parametrize("mask_of", MASKS.values(), ids=list(MASKS))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_oracle_whatever_padding_contains(shape, mask_of, number, backend, monkeypatch):
    length, dim, block = shape
    mask = mask_of(3, length)
    tensors = inputs(MIX, 3, 2, length, dim)
    definition = without_padding(oracle(MIX, mask, block, number), mask)
    expected = output_and_gradients(definition, tensors, torch.float64)
    clear_rounding(expected)
    poison_empty(monkeypatch)
    if mask is not None:
        padded = mask[:, None, :, None].expand_as(tensors[0])
        tensors[:3] = [x.masked_fill(padded, torch.nan) for x in tensors[:3]]

    function = without_padding(attend(MIX, backend, mask, block, global_tokens=number), mask)
    actual = output_and_gradients(function, tensors)

    error = errors(actual, expected)
    assert error.pop("out") <= FLOAT32_FORWARD
    assert max(error.values()) <= FLOAT32_GRADIENT, error
    if mask is not None:
        assert all((grad[padded] == 0).all() for grad in actual[1:4])


@pytest.mark.parametrize("zero", [0, torch.zeros(3, dtype=torch.int32)], ids=["number", "tensor"])
def test_no_global_tokens_change_no_bit(zero, backend):
    tensors = inputs(MIX, 3)
    mask = holes(3, 40)
    expected = output_and_gradients(attend(MIX, backend, mask), tensors)
    actual = output_and_gradients(attend(MIX, backend, mask, global_tokens=zero), tensors)
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("number", [3, 40])
def test_rows_sum_to_1(number, backend):
    q, k, v, *parameters = inputs(MIX, 3)
    mask = holes(3, 40)
    out = attend(MIX, backend, mask, global_tokens=number)(q, k, torch.ones_like(v), *parameters)
    expected = torch.ones_like(v)
    expected[2] = 0  # the last sequence is all padding
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)


def test_all_tokens_global_is_softmax_attention(backend):
    q, k, v, *parameters = inputs(MIX)
    out = attend(MIX, backend, global_tokens=40)(q, k, v, *parameters)
    expected = reference.softmax_matrix(q.double(), k.double()) @ v.double()
    assert relative_rms(out, expected) < 1e-6


def test_missing_alpha_and_beta_are_matched(backend):
    q, k, v = random_qkv(length=70)
    alpha, beta = match_moments(q, k)
    expected = attend(MIX, backend, global_tokens=5)(q, k, v, alpha, beta)
    actual = attend(MIX, backend, global_tokens=5)(q, k, v, None, None)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


# ---- derivatives and types ----


@pytest.mark.parametrize("number", [1, 4, torch.tensor([3, 0])], ids=str)
def test_derivatives_equal_finite_differences(number):
    tensors = [x.double().requires_grad_() for x in inputs(MIX, heads=1, length=5, dim=2)]
    mask = torch.tensor([[False] * 5, [True] * 1 + [False] * 3 + [True]])
    function = attend(MIX, "torch", mask, block=2, global_tokens=number)
    assert torch.autograd.gradcheck(function, tensors)
    assert torch.autograd.gradgradcheck(function, tensors)


def test_gradient_penalty_equals_the_oracle(backend):
    mask = holes(2, 40)
    tensors = [x.requires_grad_() for x in inputs(MIX)]
    exact = [x.detach().double().requires_grad_() for x in tensors]

    def penalty_gradients(function, tensors):
        first = torch.autograd.grad(function(*tensors).sum(), tensors[:3], create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), tensors)

    actual = penalty_gradients(attend(MIX, backend, mask, global_tokens=5), tensors)
    expected = penalty_gradients(oracle(MIX, mask, global_tokens=5), exact)

    for name, x, y in zip(NAMES[1:], actual, expected, strict=True):
        assert relative_rms(x, y) <= FLOAT32_GRADIENT, name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_no_worse_than_the_definition(dtype):
    """The definition computes everything in half precision here."""
    mask = random_padding(2, 97)
    tensors = inputs(MIX, heads=6, length=97)
    tensors[:3] = [x.to(dtype) for x in tensors[:3]]
    definition = oracle(MIX, mask, global_tokens=20)
    expected = output_and_gradients(definition, tensors, torch.float64)

    rounded = [*tensors[:3], *(x.to(dtype) for x in tensors[3:])]
    limits = errors(output_and_gradients(definition, rounded), expected)
    results = output_and_gradients(attend(MIX, "auto", mask, global_tokens=20), tensors)

    assert [x.dtype for x in results[:4]] == 4 * [dtype]
    for name, error in errors(results, expected).items():
        factor = HALF_FORWARD_FACTOR if name == "out" else HALF_GRADIENT_FACTOR
        assert error <= factor * limits[name] + HALF_FLOOR, name


def test_autocast_does_not_change_results(backend):
    tensors = inputs(MIX)
    function = attend(MIX, backend, global_tokens=20)
    expected = output_and_gradients(function, tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = output_and_gradients(function, tensors)
    assert all(map(torch.equal, actual, expected))


def test_layout_does_not_change_results(backend):
    tensors = inputs(MIX)
    changed = [x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) if x.dim() == 4 else x for x in tensors]
    function = attend(MIX, backend, holes(2, 40), global_tokens=20)
    out = function(*changed)
    assert out.stride() == changed[0].stride()
    torch.testing.assert_close(out, function(*tensors), rtol=1e-5, atol=1e-5)
    actual = output_and_gradients(function, changed)
    torch.testing.assert_close(actual, output_and_gradients(function, tensors), rtol=1e-5, atol=1e-5)


# ---- dropout ----


def test_dropout_concerns_the_block_and_the_global_tokens(backend):
    q, k, _ = random_qkv(batch=8, heads=8, length=32)
    v = torch.eye(32).expand_as(q)  # so that the output is the matrix
    function = attend("joint", backend, block=8, global_tokens=4)
    plain = function(q, k, v, 1.0, 1.0)
    torch.manual_seed(1)
    dropped = attend("joint", backend, block=8, global_tokens=4, dropout_p=0.25)(q, k, v, 1.0, 1.0)

    token = torch.arange(32)
    inside = token[:, None] // 8 == token // 8
    inside = (inside | (token < 4) | (token < 4)[:, None]).expand_as(plain)
    torch.testing.assert_close(dropped[~inside], plain[~inside])
    kept = dropped[inside].abs() > 1e-6
    # The fraction of 28,672 weights has a standard deviation of 0.0026.
    assert abs(kept.float().mean().item() - 0.75) < 0.015
    torch.testing.assert_close(dropped[inside][kept], plain[inside][kept] / 0.75, rtol=1e-4, atol=1e-6)
    # Also among the global keys of the other blocks alone: 24 rows of 4 weights in 64 heads.
    assert abs((dropped[:, :, 8:, :4].abs() > 1e-6).float().mean().item() - 0.75) < 0.03


def test_gradients_with_dropout_use_the_same_draw(backend):
    """The output is linear in v, so that <grad, out> = <v, dv>. Other gradients are compared with differences."""
    tensors = inputs(MIX, batch=1, heads=2, length=24)
    function = attend(MIX, backend, block=8, dropout_p=0.3, global_tokens=5)

    def seeded(*tensors):
        torch.manual_seed(5)
        return function(*tensors)

    grad = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(2)).double()
    out, *grads = output_and_gradients(seeded, tensors)
    assert not torch.equal(out, function(*tensors))  # another draw
    assert torch.equal(out, seeded(*tensors))
    value = (out.double() * grad).sum().item()
    assert (tensors[2].double() * grads[2]).sum().item() == pytest.approx(value, rel=1e-4)
    for i in (0, 1, 3, 4, 5):
        step = 3e-3 * torch.randn(tensors[i].shape, generator=torch.Generator().manual_seed(i))
        ends = []
        for sign in (1, -1):
            moved = [*tensors[:i], tensors[i] + sign * step, *tensors[i + 1 :]]
            ends.append((seeded(*moved).double() * grad).sum().item())
        change = (step.double() * grads[i]).sum().item()
        assert change == pytest.approx((ends[0] - ends[1]) / 2, rel=5e-3, abs=2e-4), NAMES[i + 1]


# ---- tracing, transforms, empty and bad inputs ----


@pytest.mark.parametrize("number", [20, torch.tensor([20, 3])], ids=str)
def test_transformed_and_traced_calls_use_the_formula(number):
    tensors = inputs(MIX)
    function = attend(MIX, global_tokens=number)
    expected = function(*tensors)
    traced = torch.jit.trace(function, tensors, check_trace=False)
    assert relative_rms(traced(*tensors), expected) <= FLOAT32_FORWARD
    gradient = torch.func.grad(lambda *x: function(*x).square().sum())(*tensors)
    _, grad_q, *_ = output_and_gradients(function, tensors, grad=2 * expected)
    assert relative_rms(gradient, grad_q) <= FLOAT32_GRADIENT


@pytest.mark.parametrize("number", [20, torch.tensor([20, 3])], ids=str)
def test_compiled_calls_use_the_formula(number):
    tensors = inputs(MIX)
    function = attend(MIX, global_tokens=number)
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    assert relative_rms(compiled(*tensors), function(*tensors)) <= FLOAT32_FORWARD


def test_meta_tensors_get_shapes():
    q, k, v = (torch.empty(2, 3, 40, 32, device="meta", requires_grad=True) for _ in range(3))
    for number in (5, torch.zeros(2, dtype=torch.int64, device="meta")):
        out = attend("joint", global_tokens=number)(q, k, v, 1.0, 1.0)
        assert out.shape == q.shape
        out.sum().backward()
        assert k.grad.shape == k.shape


@pytest.mark.parametrize("shape", [(0, 3, 7, 32), (2, 0, 7, 32), (2, 3, 0, 32)])
def test_empty_inputs_give_empty_results(shape, backend):
    tensors = [x.requires_grad_() for x in inputs("joint", *shape)]
    mask = torch.zeros(shape[0], shape[2], dtype=torch.bool)
    for number in (3, torch.full((shape[0],), 3)):
        out = attend("joint", backend, mask, global_tokens=number)(*tensors)
        assert out.shape == shape
        assert [x.shape for x in torch.autograd.grad(out.sum(), tensors)] == [x.shape for x in tensors]


def test_triton_does_not_support_global_tokens():
    q = torch.zeros(1, 2, 4, 32)
    with pytest.raises(ValueError, match="backend 'triton' cannot run here: ") as error:
        choose_backend("triton", q, BLOCK, max_global_tokens=5)
    assert "\n" not in str(error.value)
    assert load_backend("torch").is_supported(q, BLOCK, 5) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(mix="average"), "mix 'average' has no global tokens, choose joint or joint_offset"),
        (dict(global_tokens=-1), "global_tokens must be at least 0, got -1"),
        (dict(global_tokens=torch.tensor([3, -2])), "global_tokens must be at least 0, got -2"),
        (dict(global_tokens=torch.tensor([3.0, 2.0])), "an integer tensor of shape .B,. = .2,., got torch.float32"),
        (dict(global_tokens=torch.tensor([3])), "got torch.int64 of .1,."),
        (dict(global_tokens=torch.tensor(3)), "an integer tensor of shape"),
    ],
)
def test_bad_argument_is_rejected_in_one_line(change, message):
    q, k, v = torch.zeros(3, 2, 2, 4, 8)
    arguments = dict(mix="joint", global_tokens=3) | change
    with pytest.raises(ValueError, match=message) as error:
        lln_diag_attention(q, k, v, 1.0, 1.0, **arguments)
    assert "\n" not in str(error.value)
