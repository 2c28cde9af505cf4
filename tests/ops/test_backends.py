"""What every backend promises: the same for PyTorch, the C kernels and the Triton kernels.

Triton runs natively where there is a GPU, else interpreted on the CPU.
"""

import copy
import multiprocessing

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lln_fairseq.attention import build_attention
from lln_fairseq.ops.backends import HybridSpec, choose_backend, load_backend
from lln_fairseq.ops.block_diag import block_diag_attention
from lln_fairseq.ops.lln import lln_attention, lln_diag_attention
from lln_fairseq.ops.moment_matching import calibration_table, match_moments
from lln_fairseq.ops.random_features import random_feature_attention
from lln_fairseq.ops.scratch import forget_scratch
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
from tests.ops.mixes import BLOCK, MIXES, NAMES, attend, errors, holes, inputs, oracle, output_and_gradients, plain

every_mix = pytest.mark.parametrize("mix", MIXES)
both = pytest.mark.parametrize("mix", MIXES[:2])


def backend_or_skip(name, dtype=torch.float32):
    device = device_of(name)
    if reason := load_backend(name).is_supported(torch.empty(1, 1, 1, 32, dtype=dtype, device=device)):
        pytest.skip(reason)
    if (name, dtype, device) == ("triton", torch.bfloat16, "cpu"):
        pytest.skip("the interpreter of Triton gets bfloat16 wrong")
    return name


def device_of(backend):
    return "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"


@pytest.fixture(params=["torch", "cpu", "triton"])
def backend(request):
    return backend_or_skip(request.param)


def assert_float32(found, expected):
    found = errors(found, expected)
    assert found.pop("out") <= FLOAT32_FORWARD
    assert max(found.values()) <= FLOAT32_GRADIENT, found


@both
def test_forward_hands_alpha_and_beta_back(mix, backend):
    """As they came, so that their gradients find them, or matched."""
    q, k, v, alpha, beta = inputs(mix, device=device_of(backend))
    weights = HybridSpec(1.0, 0.0) if mix == "lln" else HybridSpec(0.5, 0.5, BLOCK)
    _, *given, _ = load_backend(backend).forward(q, k, v, alpha, beta, None, weights)
    assert given[0] is alpha
    assert given[1] is beta
    _, *matched, _ = load_backend(backend).forward(q, k, v, None, None, None, weights)
    torch.testing.assert_close(tuple(matched), match_moments(q, k, backend=backend), rtol=1e-5, atol=0)


@every_mix
def test_factors_that_are_not_given_are_matched(mix, backend):
    device = device_of(backend)
    q, k, v = (x.requires_grad_() for x in random_qkv(heads=2, length=70, dim=64, device=device))
    mask = random_padding(2, 70, device=device)
    matched = match_moments(q, k, mask, backend=backend)
    outputs = [attend(mix, backend, mask)(q, k, v, *factors) for factors in (matched, (None, None))]
    assert torch.equal(*outputs)
    grads = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in outputs]
    assert all(map(torch.equal, *grads))


# ---- numbers ----

# Tokens, dimension of a head and size of a block; all but the short ones take the interpreter of Triton long.
SHAPES = [(1, 32, 16), (63, 128, 32), (97, 64, 64), (130, 32, 48), (130, 128, 128), (300, 16, 256)]
SHORT = [SHAPES[0], SHAPES[1], SHAPES[3]]
HALF_SHAPES = [(97, 32, 48), (70, 128, 64), (130, 64, 16)]


@every_mix
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("shape", with_representatives(SHAPES, *SHORT), ids=str)
def test_equals_the_oracle(shape, padded, mix, backend, monkeypatch):
    length, dim, block = shape
    device = device_of(backend)
    mask = holes(3, length, device) if padded else None
    tensors = inputs(mix, 3, 2, length, dim, device=device)
    expected = output_and_gradients(oracle(mix, mask, block), tensors, torch.float64)
    poison_empty(monkeypatch)
    found = output_and_gradients(attend(mix, backend, mask, block), tensors)
    if (expected[-1].abs() < 1e-12).all():  # no query sees a key outside its block
        expected[-1].zero_()
    assert_float32(found, expected)
    if padded:
        rows = mask[:, None, :, None].expand_as(found[0])
        assert (found[2][rows] == 0).all()
        assert (found[3][rows] == 0).all()


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


@both
@pytest.mark.parametrize("factors", [(0.0, 0.0), (-1.2, 0.5), (0.5, -2.0)])
def test_factors_may_be_numbers_of_any_sign(factors, mix, backend):
    q, k, v, *_ = inputs(mix, device=device_of(backend))
    expected = output_and_gradients(lambda *x: oracle(mix)(*x, *factors), (q, k, v), torch.float64)
    assert_float32(output_and_gradients(lambda *x: attend(mix, backend)(*x, *factors), (q, k, v)), expected)


@every_mix
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", with_representatives(HALF_SHAPES, HALF_SHAPES[0]), ids=str)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_half_precision_is_no_worse_than_plain_pytorch(backend, shape, dtype, mix):
    length, dim, block = shape
    device = device_of(backend_or_skip(backend, dtype))
    mask = random_padding(2, length, seed=length, device=device)
    tensors = inputs(mix, heads=6, length=length, dim=dim, device=device)  # 12 values of dα and dβ
    tensors[:3] = [x.to(dtype) for x in tensors[:3]]
    expected = output_and_gradients(oracle(mix, mask, block), tensors, torch.float64)
    if (expected[-1].abs() < 1e-12).all():
        expected[-1].zero_()
    limits = errors(output_and_gradients(plain(mix, mask, block), tensors), expected)
    found = errors(output_and_gradients(attend(mix, backend, mask, block), tensors), expected)
    assert found["out"] <= HALF_FORWARD_FACTOR * limits["out"] + HALF_FLOOR
    for name in found:
        assert found[name] <= HALF_GRADIENT_FACTOR * limits[name] + HALF_FLOOR, name


@every_mix
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", ["torch", "cpu", "triton"])
def test_extreme_inputs_stay_finite(backend, dtype, mix):
    device = device_of(backend_or_skip(backend, dtype))
    tensors = inputs(mix, length=97, scale=50.0, device=device)
    tensors[:3] = [x.to(dtype) for x in tensors[:3]]
    tensors[3:5] = torch.full((2, 2, 3), 30.0, device=device)
    function = attend(mix, backend, random_padding(2, 97, full_row=True, device=device))
    # The true gradients are some 1e5 times the incoming one, beyond float16: scale it as a mean over tokens would.
    found = output_and_gradients(lambda *tensors: function(*tensors) / 97, tensors)
    assert all(x.isfinite().all() for x in found)


@every_mix
@pytest.mark.parametrize("scale", [1e5, 1e15])
def test_matched_factors_keep_huge_inputs_finite(mix, scale, backend):
    q, k, v = (x.requires_grad_() for x in random_qkv(length=40, scale=scale, device=device_of(backend)))
    out = attend(mix, backend)(q, k, v, None, None)
    assert out.isfinite().all()
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.mean() / scale, (q, k, v)))


# ---- layouts, batches and padding ----

LAYOUTS = {
    "tokens first": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "features apart": lambda x: x.mT.contiguous().mT,
    "part of a wider tensor": lambda x: torch.cat((x, x), dim=-1)[..., : x.shape[-1]],
}


@every_mix
def test_layouts_and_batch_mates_change_nothing(mix, backend):
    device = device_of(backend)
    tensors, mask = inputs(mix, heads=2, length=50, device=device), holes(2, 50, device)
    rounding = 1e-5 if backend == "torch" else 0  # torch's matrix products depend on the layout, our kernels do not
    whole = output_and_gradients(attend(mix, backend, mask), tensors)
    for layout in LAYOUTS.values():
        changed = [layout(x) if x.dim() == 4 else x for x in tensors]
        found = output_and_gradients(attend(mix, backend, mask), changed)
        torch.testing.assert_close(found, whole, rtol=rounding, atol=rounding)
    alone = [x[1:2] if x.dim() > 1 else x for x in tensors]
    found = attend(mix, backend, mask[1:2])(*alone)
    torch.testing.assert_close(found, whole[0][1:2], rtol=rounding, atol=rounding)


@every_mix
def test_expanded_gradient(mix, backend):
    tensors = [x.requires_grad_() for x in inputs(mix, device=device_of(backend))]
    expanded = torch.autograd.grad(attend(mix, backend)(*tensors).sum(), tensors)
    dense = torch.autograd.grad((attend(mix, backend)(*tensors) * torch.ones_like(tensors[0])).sum(), tensors)
    torch.testing.assert_close(expanded, dense)


@every_mix
@pytest.mark.parametrize("matched", [False, True])
def test_padding_may_hold_anything(mix, matched, backend):
    device = device_of(backend)
    tensors, mask = inputs(mix, device=device), holes(2, 40, device)
    rows = mask[:, None, :, None].expand_as(tensors[0])

    def run(q, k, v):
        leaves = [x.detach().requires_grad_() for x in (q, k, v, *tensors[3:])]
        arguments = [*leaves[:3], None, None, *leaves[5:]] if matched else leaves
        out = attend(mix, backend, mask)(*arguments).masked_fill(rows, 0.0)
        return out.detach(), *torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)

    expected = run(*tensors[:3])
    for garbage in (torch.nan, 3e38):
        found = run(*(x.masked_fill(rows, garbage) for x in tensors[:3]))
        for name, x, y in zip(NAMES, found, expected, strict=False):
            says = f"{name} where padding is {garbage}: {{}}".format
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5, msg=says)
        for x in found[1:4]:
            assert (x[rows] == 0).all(), garbage


def test_the_moments_ignore_what_padding_holds(backend):
    q, k, _ = random_qkv(length=40, device=device_of(backend))
    mask = random_padding(2, 40, device=device_of(backend))
    expected = match_moments(q, k, mask, backend=backend)
    q, k = (x.masked_fill(mask[:, None, :, None], torch.nan) for x in (q, k))
    assert all(map(torch.equal, match_moments(q, k, mask, backend=backend), expected))


# ---- derivatives ----


def second_derivatives(out, tensors):
    """Of the gradient penalty |d out.sum() / d(q, v)|², as in a critic's training."""
    first = torch.autograd.grad(out.sum(), tensors[:3], create_graph=True)
    return torch.autograd.grad(sum(x.square().sum() for x in first), tensors, allow_unused=True)


@every_mix
@pytest.mark.parametrize("padded", [False, True])
def test_a_gradient_penalty_is_differentiated_right(mix, padded, backend):
    device = device_of(backend)
    tensors = [x.requires_grad_() for x in inputs(mix, device=device)]
    mask = holes(2, 40, device) if padded else None
    found = second_derivatives(attend(mix, backend, mask)(*tensors), tensors)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    expected = second_derivatives(oracle(mix, mask)(*exact), exact)
    for name, x, y in zip(NAMES[1:], found, expected, strict=False):
        assert relative_rms(x, y) <= FLOAT32_GRADIENT, name


@every_mix
def test_derivatives_by_differences(mix):
    tensors = [x.double().requires_grad_() for x in inputs(mix, heads=1, length=5, dim=2)]
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])  # blocks whole, with padding, and of nothing else
    function = attend(mix, "torch", mask, block=2)
    assert torch.autograd.gradcheck(function, tensors)
    assert torch.autograd.gradgradcheck(function, tensors)


def test_inputs_made_of_each_other_share_no_second_derivative(backend):
    """The gradient of q alone, where k and v are functions of q."""
    q = inputs("lln", device=device_of(backend))[0].requires_grad_()
    found = second_derivatives(lln_attention(q, 2 * q, q, 1.0, 1.0, backend=backend), [q, q, q])
    exact = q.detach().double().requires_grad_()
    expected = second_derivatives(oracle("lln")(exact, 2 * exact, exact, 1.0, 1.0), [exact, exact, exact])
    assert relative_rms(found[0], expected[0]) <= FLOAT32_GRADIENT


def test_random_features_have_second_derivatives():
    q, k, v, *_ = (x.double().requires_grad_() for x in inputs("lln", length=5, dim=2))
    omega, mask = torch.randn(2, 6, dtype=torch.float64), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    assert torch.autograd.gradgradcheck(lambda *x: random_feature_attention(*x, omega, mask), (q, k, v))


def test_a_second_derivative_with_dropout_is_refused_at_once(backend):
    q, k, v, *_ = (x.requires_grad_() for x in inputs("lln", device=device_of(backend)))
    out = lln_diag_attention(q, k, v, 1.0, 1.0, None, BLOCK, backend, dropout_p=0.1)
    with pytest.raises(RuntimeError, match="with dropout has no second derivative: set dropout to 0"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


@pytest.mark.parametrize("mix", MIXES[1:])
def test_gradients_with_dropout_are_those_of_the_same_draw(mix, backend):
    """The output is linear in v, so <grad, out> = <v, dv>; along the others it is compared with a difference."""
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
    for i in [i for i in range(len(tensors)) if i != 2]:
        step = 3e-3 * torch.randn(tensors[i].shape, generator=torch.Generator().manual_seed(i)).to(tensors[i])
        ends = []
        for sign in (1, -1):
            moved = [*tensors[:i], tensors[i] + sign * step, *tensors[i + 1 :]]
            ends.append((seeded(*moved).double() * grad).sum().item())
        change = (step.double() * grads[i]).sum().item()
        assert change == pytest.approx((ends[0] - ends[1]) / 2, rel=5e-3, abs=2e-4), NAMES[i + 1]


# ---- tensors that are not what they seem ----


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("which", range(6))
def test_kernels_take_no_tensor_without_data(which):
    """Not one of q, k, v, α, β and the mask: reading its memory would end the process."""
    tensors = [*inputs("lln"), random_padding(2, 40)]
    tensors[which] = tensors[which].as_subclass(Subclass)
    q, *others = tensors
    assert choose_backend("auto", q, None, *others) == "torch"
    assert relative_rms(lln_attention(*tensors), lln_attention(*(x.as_subclass(torch.Tensor) for x in tensors))) < 1e-5
    with pytest.raises(ValueError, match="cannot run here: Its kernels are not operations of torch"):
        lln_attention(*tensors, backend="triton")


@every_mix
def test_shapes_can_be_asked_for_without_data(mix):
    calibration_table.cache_clear()
    forget_scratch()
    for mode in (FakeTensorMode(), torch.device("meta")):
        with mode:
            q, k, v, *_ = (torch.empty(2, 3, 40, 32, requires_grad=True) for _ in range(3))
            out = attend(mix)(q, k, v, None, None)
            assert out.shape == (2, 3, 40, 32)
            assert [x.shape for x in torch.autograd.grad(out.sum(), (q, k, v))] == 3 * [out.shape]
    # ... and nothing of it is met afterwards.
    assert attend(mix, "torch")(*random_qkv(length=40), None, None).isfinite().all()


class Model(torch.nn.Module):
    def __init__(self, name, **options):
        super().__init__()
        self.project = torch.nn.Linear(32, 96)
        self.attention = build_attention(name, num_heads=1, head_dim=32, max_positions=64, **options)

    def forward(self, x):
        return self.attention(*(y[:, None] for y in self.project(x).chunk(3, dim=-1)))


@pytest.mark.parametrize(
    ("name", "options"),
    [("lln_diag", {}), ("lln_diag", {"mix": "joint_offset"}), ("block_diag", {}), ("performer", {})],
)
def test_a_model_that_trains_can_be_traced_and_exported(name, options):
    torch.manual_seed(0)
    model, x = Model(name, **options), torch.randn(2, 40, 32)
    expected = model.eval()(x)
    traced = torch.jit.trace(model, x, check_trace=False)
    exported = torch.export.export(copy.deepcopy(model), (x,)).module()
    for other in (traced, exported):
        assert relative_rms(other(x), expected) <= FLOAT32_FORWARD
    traced(x).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@every_mix
def test_transforms_of_functions(mix):
    tensors = inputs(mix)
    found = torch.func.grad(lambda *x: attend(mix)(*x).square().sum())(*tensors)
    (expected,) = torch.autograd.grad(attend(mix)(tensors[0].requires_grad_(), *tensors[1:]).square().sum(), tensors[0])
    assert relative_rms(found, expected) <= FLOAT32_GRADIENT


# ---- what is set around a call ----


@both
def test_defaults_of_torch_change_nothing(mix, backend):
    q, k, v, *_ = inputs(mix, device=device_of(backend))
    expected = attend(mix, backend)(q, k, v, None, None)
    calibration_table.cache_clear()
    forget_scratch()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            found = attend(mix, backend)(q, k, v, None, None)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)


def test_inference_mode_leaves_nothing_behind():
    q, k, v = random_qkv(length=40, dim=40)
    forget_scratch()
    with torch.inference_mode():
        expected = lln_diag_attention(q, k, v, 1.0, 1.0, backend="torch")
    assert torch.equal(lln_diag_attention(q.requires_grad_(), k, v, 1.0, 1.0, backend="torch"), expected)


AUTOCAST = {
    "block_diag": lambda q, k, v: block_diag_attention(q, k, v, None, BLOCK),
    "lln": lln_attention,
    "lln_diag": lln_diag_attention,
}


@pytest.mark.parametrize("name", AUTOCAST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(name, dtype):
    """These operations are float32 inside whatever comes in, forward and backward."""
    q, k, v = (x.to(dtype).requires_grad_() for x in random_qkv(length=40))

    def run():
        out = AUTOCAST[name](q, k, v)
        return out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))

    expected = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run()
    assert [x.dtype for x in found] == 4 * [dtype]
    assert all(map(torch.equal, found, expected))


def attend_in_child(q, sender):
    sender.send(torch.equal(*(lln_attention(q, q, q, backend=name).isfinite() for name in ("cpu", "cpu"))))


def test_a_forked_child_does_not_wait_for_threads_that_it_lost():
    backend_or_skip("cpu")
    q, threads = random_qkv(batch=4, heads=8, length=64)[0], torch.get_num_threads()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    try:
        torch.set_num_threads(2)
        lln_attention(q, q, q, backend="cpu")
        child = context.Process(target=attend_in_child, args=(q, sender), daemon=True)
        child.start()
        child.join(20)
        ended = child.exitcode
        child.kill()
    finally:
        torch.set_num_threads(threads)
    assert ended == 0, "the child hangs"
    assert receiver.recv()


# ---- what is refused, and what is empty ----


@pytest.mark.parametrize("shape", [(0, 3, 7, 32), (2, 0, 7, 32), (2, 3, 0, 32)])
@pytest.mark.parametrize("matched", [False, True])
@every_mix
def test_nothing_in_nothing_out(mix, matched, shape, backend):
    device = device_of(backend)
    tensors = [x.requires_grad_() for x in inputs(mix, *shape, device=device)[:5]]
    mask = torch.zeros(shape[0], shape[2], dtype=torch.bool, device=device)
    factors = (None, None) if matched else tensors[3:]
    out = attend(mix, backend, mask)(*tensors[:3], *factors)
    assert (out.shape, out.dtype) == (shape, torch.float32)
    wanted = tensors[:3] if matched else tensors
    for x, grad in zip(wanted, torch.autograd.grad(out.sum(), wanted), strict=True):
        assert grad.shape == x.shape
        assert (grad == 0).all()
    assert [x.shape for x in match_moments(*tensors[:2], mask, backend=backend)] == 2 * [torch.Size(shape[:2])]


REFUSED = [
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
    (dict(backend="cuda"), "choose from auto, torch, triton, cpu"),
    (dict(backend="triton"), "cannot run here: .*head dims"),
    (dict(mix="mean"), "unknown mix 'mean', choose from average, joint, joint_offset"),
    (dict(mix="joint", mix_parameter=1.0), "mix 'joint' takes no mix_parameter"),
    (dict(mix="joint_offset", mix_parameter=torch.zeros(5)), "does not broadcast"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_bad_input_is_refused_in_one_line(change, message):
    arguments = dict(zip("qkv", torch.zeros(3, 1, 2, 4, 8), strict=True), alpha=1.0, beta=1.0)
    with pytest.raises(ValueError, match=message) as error:
        lln_diag_attention(**arguments | change)
    assert "\n" not in str(error.value)


def test_moments_check_their_inputs(backend):
    q = torch.zeros(1, 2, 4, 32)
    with pytest.raises(ValueError, match="one shape"):
        match_moments(q, q[:, :, :3], backend=backend)
    with pytest.raises(ValueError, match="key_padding_mask must be bool"):
        match_moments(q, q, torch.zeros(1, 4), backend=backend)
