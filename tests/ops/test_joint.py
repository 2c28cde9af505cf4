"""The joint form of LLN+Diag on every backend that has them, against softmax and the float64 oracle."""

import pytest
import torch

from lln_fairseq.ops import reference
from lln_fairseq.ops.backends import load_backend
from lln_fairseq.ops.lln import lln_diag_attention
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

BLOCK = 16
NAMES = ("out", "q", "k", "v", "alpha", "beta", "parameter")
OFFSETS = torch.tensor([0.8, -1.5, 0.0])
JOINT_MIXES = {"joint": None, "joint_offset": OFFSETS}


@pytest.fixture(params=["torch", "cpu", "triton"])
def backend(request):
    return or_skip(request.param)


def or_skip(name, dtype=torch.float32):
    if reason := load_backend(name).is_supported(torch.empty(1, 1, 1, 32, dtype=dtype), BLOCK):
        pytest.skip(reason)
    return name


def attend(backend="auto", mask=None, block=BLOCK, **options):
    def function(q, k, v, alpha, beta, parameter):
        return lln_diag_attention(q, k, v, alpha, beta, mask, block, backend, mix="joint_offset",
                                  mix_parameter=parameter, **options)  # fmt: skip

    return function


def oracle(mask=None, block=BLOCK):
    def function(q, k, v, alpha, beta, parameter):
        return reference.joint_matrix(q, k, alpha, beta, block, parameter, mask) @ v

    return function


def inputs(length=40, dim=32, dtype=torch.float32, factor=None):
    """q, k, v, α, β and the offset of each head."""
    factors = 1 + torch.rand(2, 2, 3, generator=torch.Generator().manual_seed(1))
    if factor:
        factors = torch.full((2, 2, 3), factor)
    return [x.to(dtype) for x in (*random_qkv(length=length, dim=dim), *factors, OFFSETS)]


def output_and_gradients(function, tensors, dtype=None):
    tensors = [x.detach().to(dtype or x.dtype).requires_grad_() for x in tensors]
    out = function(*tensors)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, tensors, grad)]


def assert_float32(found, expected):
    for i, (x, y) in enumerate(zip(found, expected, strict=True)):
        assert relative_rms(x, y) <= (FLOAT32_GRADIENT if i else FLOAT32_FORWARD), NAMES[i]


def holes(length):
    """Padding at the end of one sequence, and blocks without a real key in the other."""
    mask = torch.zeros(2, length, dtype=torch.bool)
    mask[0, length // 2 + 3 :] = True
    mask[1, 3 : 2 * length // 3] = True
    return mask


MASKS = {
    "none": lambda length: None,
    "padded": lambda length: random_padding(2, length, full_row=True),
    "holes": holes,
}
every_mask = pytest.mark.parametrize("padding", MASKS)


@every_mask
@pytest.mark.parametrize(("length", "dim", "block"), [(97, 64, 64), (70, 32, 16), (130, 32, 48), (70, 16, 256)])
def test_equals_the_oracle(length, dim, block, padding, backend, monkeypatch):
    tensors, mask = inputs(length, dim), MASKS[padding](length)
    expected = output_and_gradients(oracle(mask, block), tensors, torch.float64)
    poison_empty(monkeypatch)
    found = output_and_gradients(attend(backend, mask, block), tensors)
    if (expected[-1].abs() < 1e-12).all():  # no query sees a key outside its block
        expected[-1].zero_()
    assert_float32(found, expected)
    if mask is not None:
        padded = mask[:, None, :, None].expand_as(found[0])
        assert (found[2][padded] == 0).all()
        assert (found[3][padded] == 0).all()


@pytest.mark.parametrize("length", [1, 63, 1025])
@pytest.mark.parametrize("factor", [0.5, 2.1, 8.0])
def test_forward_at_any_concentration(factor, length):
    tensors = [x[:1] if x.dim() > 1 else x for x in inputs(length, 64, factor=factor)]
    expected = oracle(block=64)(*(x.double() for x in tensors))
    assert relative_rms(attend(block=64)(*tensors), expected) <= FLOAT32_FORWARD


@pytest.mark.parametrize("mix", JOINT_MIXES)
@pytest.mark.parametrize(("length", "real"), [(16, 16), (11, 11), (40, 13)])
@pytest.mark.parametrize("factor", [0.5, 8.0])
def test_one_block_of_tokens_is_softmax_attention(factor, length, real, mix, backend):
    q, k, v = (x.requires_grad_() for x in random_qkv(batch=1, length=length))
    mask = (torch.arange(length) >= real)[None] if real < length else None
    rows = slice(0, real)
    offset = JOINT_MIXES[mix]
    out = lln_diag_attention(q, k, v, factor, factor, mask, BLOCK, backend, mix=mix, mix_parameter=offset)
    expected = reference.softmax_matrix(q.double(), k.double(), mask) @ v.double()
    assert relative_rms(out[:, :, rows], expected[:, :, rows]) < 1e-6
    grads = [torch.autograd.grad(x[:, :, rows].square().sum(), (q, k, v)) for x in (out, expected)]
    for x, y in zip(*grads, strict=True):
        assert relative_rms(x, y) < 1e-5


@every_mask
def test_rows_sum_to_1(padding, backend):
    """Those of queries too whose block has no real key; a sequence without one gives 0."""
    mask = MASKS[padding](40)
    q, k, v, *others = inputs()
    out = attend(backend, mask)(q, k, torch.ones_like(v), *others)
    expected = torch.ones_like(out)
    if mask is not None:
        expected[mask.all(dim=1)] = 0
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("offset", [3.0, 20.0, 80.0])
def test_a_large_offset_does_not_multiply_rounding(offset, backend):
    """Concentrated attention leaves most rows nothing outside their block but the rounding of a difference."""
    q, k, *others, _ = inputs(factor=3.0)
    tensors = [3 * q, 3 * k, *others, torch.full((3,), offset)]
    expected = output_and_gradients(oracle(), tensors, torch.float64)
    found = output_and_gradients(attend(backend), tensors)
    torch.testing.assert_close(found.pop(), expected.pop().float(), rtol=1e-4, atol=1e-5)
    assert_float32(found, expected)
    q, k, v, *others = tensors
    rows = attend(backend)(q, k, torch.ones_like(v), *others)
    torch.testing.assert_close(rows, torch.ones_like(v), rtol=0, atol=1e-5)


def test_the_outside_grows_out_of_softmax_without_a_jump():
    """A first token beyond the block, nearly without weight, changes next to nothing, with either mix."""
    q, k, v = random_qkv(length=17)
    k[:, :, 16] = -8.0
    for mix in JOINT_MIXES:
        out = lln_diag_attention(q, k, v, 1.0, 1.0, None, BLOCK, mix=mix)[:, :, :16]
        expected = lln_diag_attention(q[:, :, :16], k[:, :, :16], v[:, :, :16], 1.0, 1.0, None, BLOCK, mix=mix)
        assert relative_rms(out, expected) < 0.01


def test_names_and_defaults(backend):
    q, k, v = random_qkv(length=40)
    joint = lln_diag_attention(q, k, v, 1.0, 1.0, None, BLOCK, backend, mix="joint")
    for parameter in (None, 0.0, torch.zeros(3), torch.zeros(2, 1)):
        offset = attend(backend)(q, k, v, 1.0, 1.0, parameter)
        assert torch.equal(offset, joint)
    average = lln_diag_attention(q, k, v, 1.0, 1.0, None, BLOCK, backend)
    assert torch.equal(average, lln_diag_attention(q, k, v, 1.0, 1.0, None, BLOCK, backend, mix="average"))
    assert relative_rms(average, joint) > 0.01


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(mix="mean"), "unknown mix 'mean', choose from average, joint, joint_offset"),
        (dict(mix="joint_share"), "unknown mix 'joint_share', choose from average, joint, joint_offset"),
        (dict(mix="joint", mix_parameter=1.0), "mix 'joint' takes no mix_parameter"),
        (dict(mix_parameter=1.0), "mix 'average' takes no mix_parameter"),
        (dict(mix="joint_offset", mix_parameter="half"), "mix_parameter must be a number or a tensor, got str"),
        (dict(mix="joint_offset", mix_parameter=torch.zeros(5)), "does not broadcast"),
        (dict(mix="joint_offset", mix_parameter=float("nan")), r"mix_parameter must be in \[-80, 80\], got nan"),
    ],
)
def test_bad_input_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        lln_diag_attention(*random_qkv(length=3), **options)


def test_padding_may_hold_anything(backend):
    mask = holes(40)
    rows = mask[:, None, :, None].expand(2, 3, 40, 32)
    q, k, v, *others = inputs()

    def run(*tensors):
        tensors = [x.detach().requires_grad_() for x in (*tensors, *others)]
        out = attend(backend, mask)(*tensors).masked_fill(rows, 0.0)
        return out.detach(), *torch.autograd.grad(out.square().sum(), tensors)

    expected = run(q, k, v)
    for garbage in (torch.nan, -torch.inf, 3e38):
        found = run(*(x.masked_fill(rows, garbage) for x in (q, k, v)))
        for name, x, y in zip(NAMES, found, expected, strict=True):
            says = f"{name} where padding is {garbage}: {{}}".format
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5, msg=says)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_extreme_inputs_stay_finite(dtype):
    tensors = [50 * x.to(dtype) for x in random_qkv(length=97)]
    mask = random_padding(2, 97, full_row=True)
    tensors += [torch.full((3,), 30.0), torch.full((3,), 30.0), OFFSETS]
    for x in output_and_gradients(lambda *inputs: attend(mask=mask)(*inputs) / 97, tensors):
        assert x.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_no_worse_than_the_plain_formula(dtype):
    q, k, v, *others = inputs(length=130, dim=64)
    tensors = [*(x.to(dtype) for x in (q, k, v)), *others]
    expected = output_and_gradients(oracle(), tensors, torch.float64)
    plain = output_and_gradients(oracle(), tensors, dtype)
    for i, (x, p, e) in enumerate(zip(output_and_gradients(attend(), tensors), plain, expected, strict=True)):
        factor = HALF_GRADIENT_FACTOR if i else HALF_FORWARD_FACTOR
        assert relative_rms(x, e) <= factor * relative_rms(p, e) + HALF_FLOOR, NAMES[i]


def test_gradients_with_dropout_are_those_of_the_same_draw(backend):
    """The output is linear in v, so <grad, out> = <v, dv>; along the others it is compared with a difference."""
    tensors = inputs(length=24)
    function = attend(backend, dropout_p=0.3)

    def seeded(*tensors):
        torch.manual_seed(5)
        return function(*tensors)

    grad = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(2)).double()
    out, *grads = output_and_gradients(seeded, tensors)
    assert not torch.equal(out, function(*tensors))  # another draw
    assert torch.equal(out, seeded(*tensors))
    value = (out.double() * grad).sum().item()
    assert (tensors[2].double() * grads[2]).sum().item() == pytest.approx(value, rel=1e-4)
    generator = torch.Generator().manual_seed(3)
    for i in (0, 1, 3, 4, 5):
        step = 3e-3 * torch.randn(tensors[i].shape, generator=generator)
        ends = []
        for sign in (1, -1):
            moved = [x + sign * step if i == j else x for j, x in enumerate(tensors)]
            ends.append((seeded(*moved).double() * grad).sum().item())
        change = (step.double() * grads[i]).sum().item()
        assert change == pytest.approx((ends[0] - ends[1]) / 2, rel=5e-3, abs=2e-4), NAMES[i + 1]


def test_dropout_keeps_the_mean_of_the_block_and_all_of_the_outside():
    q, k, _ = random_qkv(batch=8, heads=8, length=32)
    v = torch.eye(32).expand_as(q)  # the output is then the matrix
    plain = lln_diag_attention(q, k, v, 1.0, 1.0, None, BLOCK, mix="joint")
    torch.manual_seed(1)
    dropped = lln_diag_attention(q, k, v, 1.0, 1.0, None, BLOCK, mix="joint", dropout_p=0.25)
    block = torch.arange(32) // BLOCK
    same = (block[:, None] == block[None, :]).expand_as(plain)
    torch.testing.assert_close(dropped[~same], plain[~same])
    kept = dropped[same].abs() > 1e-6
    assert abs(kept.float().mean().item() - 0.75) < 0.015  # 32,768 weights: standard deviation 0.0024
    torch.testing.assert_close(dropped[same][kept], plain[same][kept] / 0.75, rtol=1e-4, atol=1e-6)


def test_second_derivatives_by_differences():
    tensors = [x.requires_grad_() for x in inputs(length=5, dim=2, dtype=torch.float64)]
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])  # blocks whole, with padding, and of nothing else
    function = attend("torch", mask, block=2)
    assert torch.autograd.gradcheck(function, tensors)
    assert torch.autograd.gradgradcheck(function, tensors)


def test_a_gradient_penalty_is_differentiated_right(backend):
    def penalty(function, tensors):
        tensors = [x.detach().requires_grad_() for x in tensors]
        first = torch.autograd.grad(function(*tensors).sum(), tensors[:3], create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), tensors)

    tensors, mask = inputs(), holes(40)
    found = penalty(attend(backend, mask), tensors)
    expected = penalty(oracle(mask), [x.double() for x in tensors])
    for name, x, y in zip(NAMES[1:], found, expected, strict=True):
        assert relative_rms(x, y) <= FLOAT32_GRADIENT, name


def test_what_records_operations_gets_the_formula():
    tensors = inputs()
    function = attend()
    expected = function(*tensors)
    traced = torch.jit.trace(function, tuple(tensors), check_trace=False)
    assert relative_rms(traced(*tensors), expected) <= FLOAT32_FORWARD
    assert function(*(x.to("meta") for x in tensors)).shape == expected.shape
    empty = [x[:, :, :0].requires_grad_() for x in tensors[:3]]
    out = function(*empty, *tensors[3:])
    assert [x.shape for x in torch.autograd.grad(out.sum(), empty)] == 3 * [out.shape]
