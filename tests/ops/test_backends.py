"""The contract of the backends: the same tests for PyTorch, the C kernels and the Triton kernels.

Triton runs natively if there is a GPU, otherwise in its interpreter on the CPU.
"""

import copy
import functools
import itertools
import multiprocessing

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lln_fairseq.attention import build_attention
from lln_fairseq.ops.backends import cpu, load_backend
from lln_fairseq.ops.block_diag import block_diag_attention
from lln_fairseq.ops.dispatch import FORMULA, choose_backend
from lln_fairseq.ops.formula import AVERAGE, LLN, Inputs, Spec
from lln_fairseq.ops.lln import lln_attention, lln_diag_attention
from lln_fairseq.ops.moment_matching import calibration_table, match_moments
from lln_fairseq.ops.random_features import random_feature_attention
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
    with_representatives,
)
from tests.ops.mixes import (
    BLOCK,
    GLOBAL,
    GLOBAL_TOKENS,
    NAMES,
    TESTED_MIXES,
    assert_float32_accuracy,
    attend,
    backend_or_skip,
    clear_rounding,
    device_of,
    errors,
    holes,
    inputs,
    oracle,
    output_and_gradients,
    plain,
)

OPERATOR = "lln_fairseq.hybrid_attention"
every_mix = pytest.mark.parametrize("mix", [*TESTED_MIXES, GLOBAL])
lln_and_average = pytest.mark.parametrize("mix", TESTED_MIXES[:2])


@lln_and_average
def test_forward_returns_alpha_and_beta(mix, backend):
    q, k, v, alpha, beta = inputs(mix, device=device_of(backend))
    spec = Spec(LLN) if mix == "lln" else Spec(AVERAGE, BLOCK)

    _, same_alpha, same_beta, _ = load_backend(backend).forward(spec, Inputs(q, k, v, alpha, beta))
    _, *matched, _ = load_backend(backend).forward(spec, Inputs(q, k, v))

    assert same_alpha is alpha
    assert same_beta is beta
    torch.testing.assert_close(tuple(matched), match_moments(q, k, backend=backend), rtol=1e-5, atol=0)


@every_mix
def test_missing_alpha_and_beta_are_matched(mix, backend):
    device = device_of(backend)
    q, k, v = (x.requires_grad_() for x in random_qkv(heads=1, length=50, device=device))
    mask = random_padding(2, 50, device=device)
    alpha, beta = match_moments(q, k, mask, backend=backend)

    expected = attend(mix, backend, mask)(q, k, v, alpha, beta)
    actual = attend(mix, backend, mask)(q, k, v, None, None)

    assert torch.equal(actual, expected)
    expected_grads = torch.autograd.grad(expected.square().sum(), (q, k, v))
    actual_grads = torch.autograd.grad(actual.square().sum(), (q, k, v))
    assert all(map(torch.equal, actual_grads, expected_grads))


# ---- numbers ----

# Tokens, head dimension and block size. All but the short ones take long in the interpreter of Triton.
SHAPES = [(1, 32, 16), (63, 128, 32), (97, 64, 64), (130, 32, 48), (130, 128, 128), (300, 16, 256)]
CASES = list(itertools.product(SHAPES, [False, True]))
REPRESENTATIVES = [((1, 32, 16), True), ((63, 128, 32), False), ((130, 32, 48), True)]
HALF_SHAPES = [(97, 32, 48), (70, 128, 64), (130, 64, 16), (40, 16, 32)]


@every_mix
@pytest.mark.parametrize("case", with_representatives(CASES, *REPRESENTATIVES), ids=str)
def test_equals_the_oracle(case, mix, backend, monkeypatch):
    (length, dim, block), padded = case
    device = device_of(backend)
    mask = holes(3, length, device) if padded else None
    tensors = inputs(mix, 3, 2, length, dim, device=device)
    expected = output_and_gradients(oracle(mix, mask, block), tensors, torch.float64)
    clear_rounding(expected)
    poison_empty(monkeypatch)

    actual = output_and_gradients(attend(mix, backend, mask, block), tensors)

    assert_float32_accuracy(actual, expected)
    if padded:
        _, _, grad_k, grad_v, *_ = actual
        padded_tokens = mask[:, None, :, None].expand_as(grad_k)
        assert (grad_k[padded_tokens] == 0).all()
        assert (grad_v[padded_tokens] == 0).all()


@every_mix
@pytest.mark.parametrize("length", with_representatives([63, 1025], 63))
@pytest.mark.parametrize("factor", [0.5, 8.0, 30.0])
@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_equals_the_oracle_at_any_concentration(backend, factor, length, mix):
    backend_or_skip(backend)
    tensors = inputs(mix, batch=1, heads=2, length=length, dim=64)
    tensors[3:5] = torch.full((2, 1, 2), factor)
    expected = oracle(mix)(*(x.double() for x in tensors))
    assert relative_rms(attend(mix, backend)(*tensors), expected) <= FLOAT32_FORWARD


@lln_and_average
@pytest.mark.parametrize("factors", [(0.0, 0.0), (-1.2, 0.5), (0.5, -2.0)])
def test_alpha_and_beta_can_be_numbers_of_any_sign(factors, mix, backend):
    q, k, v, *_ = inputs(mix, device=device_of(backend))
    expected = output_and_gradients(lambda *x: oracle(mix)(*x, *factors), (q, k, v), torch.float64)
    actual = output_and_gradients(lambda *x: attend(mix, backend)(*x, *factors), (q, k, v))
    assert_float32_accuracy(actual, expected)


@every_mix
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", with_representatives(HALF_SHAPES, HALF_SHAPES[3]), ids=str)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_half_precision_is_no_worse_than_plain_pytorch(backend, shape, dtype, mix):
    length, dim, block = shape
    device = device_of(backend_or_skip(backend, dtype))
    mask = random_padding(2, length, seed=length, device=device)
    tensors = inputs(mix, heads=6, length=length, dim=dim, device=device)  # 12 values of dα and dβ
    tensors[:3] = [x.to(dtype) for x in tensors[:3]]
    expected = output_and_gradients(oracle(mix, mask, block), tensors, torch.float64)
    clear_rounding(expected)

    plain_errors = errors(output_and_gradients(plain(mix, mask, block), tensors), expected)
    actual_errors = errors(output_and_gradients(attend(mix, backend, mask, block), tensors), expected)

    assert actual_errors["out"] <= HALF_FORWARD_FACTOR * plain_errors["out"] + HALF_FLOOR
    for name, error in actual_errors.items():
        assert error <= HALF_GRADIENT_FACTOR * plain_errors[name] + HALF_FLOOR, name


@every_mix
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", ["torch", "cpu", "triton"])
def test_extreme_inputs_stay_finite(backend, dtype, mix):
    device = device_of(backend_or_skip(backend, dtype))
    tensors = inputs(mix, length=97, scale=50.0, device=device)
    tensors[:3] = [x.to(dtype) for x in tensors[:3]]
    tensors[3:5] = torch.full((2, 2, 1), 30.0, device=device)
    function = attend(mix, backend, random_padding(2, 97, full_row=True, device=device))

    # The true gradients are about 1e5 times the gradient of the output, too large for float16: scale that down, as a
    # mean over tokens would.
    results = output_and_gradients(lambda *tensors: function(*tensors) / 97, tensors)

    assert all(x.isfinite().all() for x in results)


@pytest.mark.parametrize("mix", TESTED_MIXES)  # global tokens use torch's fused softmax, which is not finite here
@pytest.mark.parametrize("scale", [1e5, 1e15])
def test_matched_factors_keep_huge_inputs_finite(mix, scale, backend):
    q, k, v = (x.requires_grad_() for x in random_qkv(1, 2, 20, scale=scale, device=device_of(backend)))
    out = attend(mix, backend)(q, k, v, None, None)
    assert out.isfinite().all()
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.mean() / scale, (q, k, v)))
    factors = match_moments(q, k, backend=backend)
    torch.testing.assert_close(factors, match_moments(q.double(), k.double(), backend="torch"), check_dtype=False)


# ---- layouts, batches and padding ----


def tokens_first(x):
    return x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)


def features_apart(x):
    return x.mT.contiguous().mT


def part_of_wider_tensor(x):
    return tokens_first(torch.cat((x, x), dim=-1))[..., : x.shape[-1]]


# Of q, k and v. The kernels read tensors as they are if the strides are the same and features are dense.
LAYOUTS = [3 * [features_apart], [tokens_first, torch.clone, part_of_wider_tensor], 3 * [part_of_wider_tensor]]


@every_mix
def test_layout_and_rest_of_batch_do_not_change_results(mix, backend):
    device = device_of(backend)
    tensors = inputs(mix, heads=2, length=20, device=device)
    mask = holes(2, 20, device)
    # torch's matrix products, which also compute the rows of global tokens, depend on the layout; our kernels do not.
    tolerance = 1e-5 if backend == "torch" or mix == GLOBAL else 0
    expected = output_and_gradients(attend(mix, backend, mask), tensors)

    for layouts in LAYOUTS:
        changed = [layout(x) for layout, x in zip(layouts, tensors[:3], strict=True)]
        actual = output_and_gradients(attend(mix, backend, mask), [*changed, *tensors[3:]])
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    assert actual[0].stride() == tokens_first(tensors[0]).stride()

    second_sample = [x[1:2] if x.dim() > 1 else x for x in tensors]
    out = attend(mix, backend, mask[1:2])(*second_sample)
    torch.testing.assert_close(out, expected[0][1:2], rtol=tolerance, atol=tolerance)


@every_mix
def test_expanded_gradient_equals_dense_gradient(mix, backend):
    tensors = [x.requires_grad_() for x in inputs(mix, device=device_of(backend))]
    ones = torch.ones_like(tensors[0])
    expanded = torch.autograd.grad(attend(mix, backend)(*tensors).sum(), tensors)
    dense = torch.autograd.grad((attend(mix, backend)(*tensors) * ones).sum(), tensors)
    torch.testing.assert_close(expanded, dense)


@every_mix
@pytest.mark.parametrize(("matched", "garbage"), [(False, torch.nan), (True, 3e38)], ids=["given", "matched"])
def test_padding_may_hold_anything(matched, garbage, mix, backend):
    """Also NaN if α and β are matched: see the next test."""
    device = device_of(backend)
    tensors = inputs(mix, device=device)
    mask = holes(2, 40, device)
    padded_tokens = mask[:, None, :, None].expand_as(tensors[0])

    def run(q, k, v):
        leaves = [x.detach().requires_grad_() for x in (q, k, v, *tensors[3:])]
        arguments = [*leaves[:3], None, None, *leaves[5:]] if matched else leaves
        out = attend(mix, backend, mask)(*arguments).masked_fill(padded_tokens, 0.0)
        return out.detach(), *torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)

    expected = run(*tensors[:3])
    actual = run(*(x.masked_fill(padded_tokens, garbage) for x in tensors[:3]))
    for name, x, y in zip(NAMES, actual, expected, strict=False):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5, msg=f"{name}: {{}}".format)
    assert all((grad[padded_tokens] == 0).all() for grad in actual[1:4])


def test_moments_ignore_padding(backend):
    device = device_of(backend)
    q, k, _ = random_qkv(length=40, device=device)
    mask = random_padding(2, 40, device=device)
    expected = match_moments(q, k, mask, backend=backend)
    q, k = (x.masked_fill(mask[:, None, :, None], torch.nan) for x in (q, k))
    assert all(map(torch.equal, match_moments(q, k, mask, backend=backend), expected))


# ---- derivatives ----


def penalty_gradients(out, tensors):
    """Return the gradients of the penalty |d out.sum() / d(q, k, v)|², as it is used to train critics."""
    first = torch.autograd.grad(out.sum(), tensors[:3], create_graph=True)
    penalty = sum(x.square().sum() for x in first)
    return torch.autograd.grad(penalty, tensors, allow_unused=True)


@every_mix
@pytest.mark.parametrize("padded", [False, True])
def test_gradient_penalty_equals_the_oracle(mix, padded, backend):
    device = device_of(backend)
    tensors = [x.requires_grad_() for x in inputs(mix, device=device)]
    mask = holes(2, 40, device) if padded else None
    exact = [x.detach().double().requires_grad_() for x in tensors]

    actual = penalty_gradients(attend(mix, backend, mask)(*tensors), tensors)

    expected = penalty_gradients(oracle(mix, mask)(*exact), exact)
    for name, x, y in zip(NAMES[1:], actual, expected, strict=False):
        assert relative_rms(x, y) <= FLOAT32_GRADIENT, name


@every_mix
def test_derivatives_equal_finite_differences(mix):
    tensors = [x.double().requires_grad_() for x in inputs(mix, heads=1, length=5, dim=2)]
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])  # blocks without, with and of only padding
    function = attend(mix, "torch", mask, block=2)
    assert torch.autograd.gradcheck(function, tensors)
    assert torch.autograd.gradgradcheck(function, tensors, fast_mode=True)


def test_second_derivatives_of_dependent_inputs_are_separate(backend):
    """k and v are functions of q here: the gradient of q must not contain theirs."""
    q = inputs("lln", device=device_of(backend))[0].requires_grad_()
    actual = penalty_gradients(lln_attention(q, 2 * q, q, 1.0, 1.0, backend=backend), [q, q, q])
    exact = q.detach().double().requires_grad_()
    expected = penalty_gradients(oracle("lln")(exact, 2 * exact, exact, 1.0, 1.0), [exact, exact, exact])
    assert relative_rms(actual[0], expected[0]) <= FLOAT32_GRADIENT


def test_random_features_have_second_derivatives():
    q, k, v, *_ = (x.double().requires_grad_() for x in inputs("lln", length=5, dim=2))
    omega = torch.randn(2, 6, dtype=torch.float64)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    assert torch.autograd.gradgradcheck(lambda *x: random_feature_attention(*x, omega, mask), (q, k, v))


def test_second_derivative_with_dropout_is_rejected(backend):
    q, k, v, *_ = (x.requires_grad_() for x in inputs("lln", device=device_of(backend)))
    out = lln_diag_attention(q, k, v, 1.0, 1.0, None, BLOCK, backend, dropout_p=0.1)
    with pytest.raises(RuntimeError, match="with dropout has no second derivative: set dropout to 0"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


@pytest.mark.parametrize("mix", [*TESTED_MIXES[1:], GLOBAL])
def test_gradients_with_dropout_use_the_same_draw(mix, backend):
    """The output is linear in v, so that <grad, out> = <v, dv>. Other gradients are compared with differences."""
    tensors = inputs(mix, batch=1, heads=2, length=24, device=device_of(backend))
    function = attend(mix, backend, dropout_p=0.3)

    def seeded(*tensors):
        torch.manual_seed(5)
        return function(*tensors)

    grad = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(2)).to(tensors[0]).double()
    out, *grads = output_and_gradients(seeded, tensors)
    assert not torch.equal(out, function(*tensors))  # another draw
    assert torch.equal(out, seeded(*tensors))
    value = (out.double() * grad).sum().item()
    assert (tensors[2].double() * grads[2]).sum().item() == pytest.approx(value, rel=1e-4)
    for i in range(len(tensors)):
        if i == 2:
            continue
        step = 3e-3 * torch.randn(tensors[i].shape, generator=torch.Generator().manual_seed(i)).to(tensors[i])
        ends = []
        for sign in (1, -1):
            moved = [*tensors[:i], tensors[i] + sign * step, *tensors[i + 1 :]]
            ends.append((seeded(*moved).double() * grad).sum().item())
        change = (step.double() * grads[i]).sum().item()
        assert change == pytest.approx((ends[0] - ends[1]) / 2, rel=5e-3, abs=2e-4), NAMES[i + 1]


# ---- tensors without plain memory, tracing and transforms ----


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("which", range(6))
def test_kernels_are_not_used_for_tensor_subclasses(which):
    """None of q, k, v, α, β and the mask may be one: reading its memory could crash the process."""
    tensors = [*inputs("lln"), random_padding(2, 40)]
    tensors[which] = tensors[which].as_subclass(Subclass)
    q, k, v, alpha, beta, mask = tensors
    assert choose_backend("auto", Spec(LLN), Inputs(q, k, v, alpha, beta, padding=mask)) == FORMULA
    expected = lln_attention(*(x.as_subclass(torch.Tensor) for x in tensors))
    assert relative_rms(lln_attention(*tensors), expected) < 1e-5
    with pytest.raises(ValueError, match="cannot run here: Its kernels are not operations of torch"):
        lln_attention(*tensors, backend="triton")


@every_mix
def test_fake_and_meta_tensors_get_shapes(mix):
    calibration_table.cache_clear()
    for mode in (FakeTensorMode(), torch.device("meta")):
        with mode:
            q, k, v, *_ = (torch.empty(2, 3, 40, 32, requires_grad=True) for _ in range(3))
            out = attend(mix)(q, k, v, None, None)
            assert out.shape == (2, 3, 40, 32)
            assert [x.shape for x in torch.autograd.grad(out.sum(), (q, k, v))] == 3 * [out.shape]
    # None of these tensors stays in a cache.
    assert attend(mix, "torch")(*random_qkv(length=40), None, None).isfinite().all()


class Model(torch.nn.Module):
    """A projection to q, k and v, followed by an attention."""

    def __init__(self, name, **options):
        super().__init__()
        self.project = torch.nn.Linear(32, 96)
        self.attention = build_attention(name, num_heads=1, head_dim=32, max_positions=64, **options)

    def forward(self, x):
        return self.attention(*(y[:, None] for y in self.project(x).chunk(3, dim=-1)))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lln_diag", {}),
        ("lln_diag", {"mix": "joint_offset"}),
        ("lln_diag", {"mix": "joint_offset", "global_tokens": GLOBAL_TOKENS}),
        ("block_diag", {}),
        ("window", {"block_size": 16}),
        ("performer", {}),
    ],
)
def test_model_can_be_traced_and_exported(name, options):
    torch.manual_seed(0)
    model = Model(name, **options)
    x = torch.randn(2, 40, 32)
    expected = model.eval()(x)
    calibration_table.cache_clear()
    traced = torch.jit.trace(model, x)  # makes two traces and compares them
    exported = torch.export.export(copy.deepcopy(model), (x,))
    assert OPERATOR not in str(exported.graph)  # whoever loads the program may not have this package
    for converted in (traced, exported.module()):
        assert relative_rms(converted(x), expected) <= FLOAT32_FORWARD
    traced(x).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@torch.no_grad()
def test_trace_of_a_short_sequence_computes_long_ones():
    attention = functools.partial(lln_diag_attention, mix="joint_offset", block_size=32)
    traced = torch.jit.trace(lambda q, k, v: attention(q, k, v), random_qkv(length=20))
    long = random_qkv(length=97)
    assert relative_rms(traced(*long), attention(*long)) <= FLOAT32_FORWARD


@every_mix
def test_functorch_gradient_equals_autograd(mix):
    tensors = inputs(mix)
    actual = torch.func.grad(lambda *x: attend(mix)(*x).square().sum())(*tensors)
    out = attend(mix)(tensors[0].requires_grad_(), *tensors[1:])
    (expected,) = torch.autograd.grad(out.square().sum(), tensors[0])
    assert relative_rms(actual, expected) <= FLOAT32_GRADIENT


# ---- the state of the process around a call ----


@lln_and_average
def test_default_dtype_and_device_do_not_change_results(mix, backend):
    q, k, v, *_ = inputs(mix, device=device_of(backend))
    expected = attend(mix, backend)(q, k, v, None, None)
    calibration_table.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            actual = attend(mix, backend)(q, k, v, None, None)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(actual, expected)


def test_scratch_of_inference_mode_can_be_used_outside_it():
    q, k, v = random_qkv(length=40)
    vars(cpu.THREAD).clear()
    with torch.inference_mode():
        expected = lln_diag_attention(q, k, v, 1.0, 1.0)
    assert torch.equal(lln_diag_attention(q.requires_grad_(), k, v, 1.0, 1.0), expected)


ATTENTIONS = {
    "block_diag": lambda q, k, v: block_diag_attention(q, k, v, None, BLOCK),
    "window": lambda q, k, v: block_diag_attention(q, k, v, None, BLOCK, neighbors=1),
    "lln": lln_attention,
    "lln_diag": lln_diag_attention,
    "global": lambda q, k, v: lln_diag_attention(q, k, v, mix="joint_offset", global_tokens=GLOBAL_TOKENS),
}


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_does_not_change_results(name, dtype):
    """These attentions compute in float32 whatever the dtype of their inputs, forward and backward."""
    q, k, v = (x.to(dtype).requires_grad_() for x in random_qkv(length=40))

    def run():
        out = ATTENTIONS[name](q, k, v)
        return out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))

    expected = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = run()
    assert [x.dtype for x in actual] == 4 * [dtype]
    assert all(map(torch.equal, actual, expected))


def attend_in_child(q, sender):
    first = lln_attention(q, q, q, backend="cpu")
    second = lln_attention(q, q, q, backend="cpu")
    sender.send(torch.equal(first.isfinite(), second.isfinite()))


def test_forked_child_does_not_wait_for_lost_threads():
    backend_or_skip("cpu")
    q = random_qkv(batch=4, heads=8, length=64)[0]
    threads = torch.get_num_threads()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    try:
        torch.set_num_threads(2)
        lln_attention(q, q, q, backend="cpu")
        child = context.Process(target=attend_in_child, args=(q, sender), daemon=True)
        child.start()
        child.join(20)
        exitcode = child.exitcode
        child.kill()
    finally:
        torch.set_num_threads(threads)
    assert exitcode == 0, "the child hangs"
    assert receiver.recv()


# ---- empty and bad inputs ----


@every_mix
def test_empty_inputs_give_empty_results(mix, backend):
    device = device_of(backend)
    for shape in ((0, 3, 7, 32), (2, 0, 7, 32), (2, 3, 0, 32)):
        tensors = [x.requires_grad_() for x in inputs(mix, *shape, device=device)[:5]]
        mask = torch.zeros(shape[0], shape[2], dtype=torch.bool, device=device)
        for used in (tensors, tensors[:3]):  # without α and β, they are matched
            factors = used[3:] or (None, None)
            out = attend(mix, backend, mask)(*tensors[:3], *factors)
            assert (out.shape, out.dtype) == (shape, torch.float32)
            for x, grad in zip(used, torch.autograd.grad(out.sum(), used), strict=True):
                assert grad.shape == x.shape
                assert (grad == 0).all()
        assert [x.shape for x in match_moments(*tensors[:2], mask, backend=backend)] == 2 * [torch.Size(shape[:2])]


BAD_ARGUMENTS = [
    (dict(q=torch.zeros(1, 2, 4, 0), k=torch.zeros(1, 2, 4, 0), v=torch.zeros(1, 2, 4, 0)), "D > 0"),
    (dict(q=torch.zeros(2, 3, 4)), "one shape"),
    (dict(k=torch.zeros(1, 2, 5, 8)), "one shape"),
    (dict(k=torch.zeros(1, 2, 4, 8, device="meta")), "one device, got cpu, meta, cpu"),
    (dict(v=torch.zeros(1, 2, 4, 8, dtype=torch.float16)), "dtype"),
    ({x: torch.zeros(1, 2, 4, 8, dtype=torch.int64) for x in "qkv"}, "share one floating-point dtype"),
    (dict(key_padding_mask=torch.zeros(1, 4)), "bool"),
    (dict(key_padding_mask=torch.zeros(4, 1, dtype=torch.bool)), "shape"),
    (dict(block_size=0), "block_size"),
    (dict(dropout_p=1.0), "dropout_p"),
    (dict(alpha=torch.zeros(3)), "alpha"),
    (dict(beta=None), "together or not at all"),
    (dict(scope="layer", alpha=None, beta=None), "unknown scope 'layer', choose from head, batch"),
    (dict(constants="mine", alpha=None, beta=None), "unknown constants 'mine', choose from calibrated, paper"),
    (dict(backend="cuda"), "choose from auto, torch, triton, cpu"),
    (dict(backend="triton"), "cannot run here: .*head dims"),
    (dict(mix="mean"), "unknown mix 'mean', choose from average, joint_offset"),
    (dict(mix="average", mix_parameter=1.0), "mix 'average' takes no mix_parameter"),
    (dict(mix="joint_offset", mix_parameter=torch.zeros(5)), "does not broadcast"),
]


@pytest.mark.parametrize(("change", "message"), BAD_ARGUMENTS, ids=[message for _, message in BAD_ARGUMENTS])
def test_bad_argument_is_rejected_in_one_line(change, message):
    arguments = dict(zip("qkv", torch.zeros(3, 1, 2, 4, 8), strict=True), alpha=1.0, beta=1.0)
    with pytest.raises(ValueError, match=message) as error:
        lln_diag_attention(**arguments | change)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "change", [dict(beta=None), dict(scope="x", alpha=None, beta=None), dict(constants="x", alpha=None, beta=None)]
)
def test_bad_argument_is_rejected_where_it_has_no_influence(change):
    arguments = dict(zip("qkv", torch.zeros(3, 1, 2, 4, 8), strict=True), alpha=1.0, beta=1.0, mix="joint_offset")
    with torch.no_grad(), pytest.raises(ValueError, match=r"together or not at all|unknown"):
        lln_diag_attention(**arguments | change)  # one block, which is softmax


def test_match_moments_checks_its_inputs(backend):
    q = torch.zeros(1, 2, 4, 32)
    with pytest.raises(ValueError, match="one shape"):
        match_moments(q, q[:, :, :3], backend=backend)
    with pytest.raises(ValueError, match="key_padding_mask must be bool"):
        match_moments(q, q, torch.zeros(1, 4), backend=backend)
