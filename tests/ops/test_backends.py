"""What every backend promises: the same for PyTorch, the C kernels and the Triton kernels (interpreted on a CPU)."""

import copy
import inspect
import multiprocessing

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lln_fairseq.attention import build_attention
from lln_fairseq.ops import checks, reference
from lln_fairseq.ops.backends import Backend, Mixture, choose_backend, load_backend
from lln_fairseq.ops.block_diag import block_diag_attention
from lln_fairseq.ops.lln import lln_attention, lln_diag_attention
from lln_fairseq.ops.moment_matching import calibration_table, match_moments
from lln_fairseq.ops.random_features import random_feature_attention
from lln_fairseq.ops.scratch import forget_scratch
from tests.helpers import FLOAT32_FORWARD, FLOAT32_GRADIENT, random_padding, random_qkv, relative_rms

BLOCK = 16


def backend_or_skip(name):
    if name != "torch" and (reason := load_backend(name).is_supported(torch.empty(1, 1, 1, 32))):
        pytest.skip(reason)
    return name


@pytest.fixture(params=["torch", "cpu", "triton"])
def backend(request):
    return backend_or_skip(request.param)


FUNCTIONS = {
    "lln": lambda q, k, v, alpha, beta, mask, backend: lln_attention(q, k, v, alpha, beta, mask, backend),
    "lln_diag": lambda q, k, v, alpha, beta, mask, backend: lln_diag_attention(
        q, k, v, alpha, beta, mask, BLOCK, backend
    ),
}
ORACLES = {
    "lln": lambda q, k, v, alpha, beta, mask: reference.lln_matrix(q, k, alpha, beta, mask) @ v,
    "lln_diag": lambda q, k, v, alpha, beta, mask: reference.lln_diag_matrix(q, k, alpha, beta, BLOCK, mask) @ v,
}
both = pytest.mark.parametrize("function", FUNCTIONS)
NAMES = ("q", "k", "v", "alpha", "beta")


def inputs(length=40, dim=32, dtype=torch.float32):
    """q, k, v, α, β that want gradients."""
    tensors = random_qkv(length=length, dim=dim, dtype=dtype)
    factors = 1 + torch.rand(2, 2, 3, generator=torch.Generator().manual_seed(1))
    return [x.clone().requires_grad_() for x in (*tensors, *factors.to(dtype))]


@pytest.mark.parametrize("function", [name for name in vars(Backend) if not name.startswith("_")])
def test_a_backend_has_the_functions_of_the_contract(function, backend):
    expected = inspect.signature(getattr(Backend, function)).parameters
    found = inspect.signature(getattr(load_backend(backend), function)).parameters
    assert [(x.name, x.default) for x in found.values()] == [(x.name, x.default) for x in expected.values()][1:]


@both
def test_forward_hands_alpha_and_beta_back(function, backend):
    """As they came, so that their gradients find them, or matched."""
    q, k, v, alpha, beta = (x.detach() for x in inputs())
    mix = Mixture(1.0, 0.0) if function == "lln" else Mixture(0.5, 0.5, BLOCK)
    mask = random_padding(2, 40)
    out, *given, _ = load_backend(backend).forward(q, k, v, alpha, beta, mask, mix)
    assert given[0] is alpha
    assert given[1] is beta
    assert relative_rms(out, ORACLES[function](*(x.double() for x in (q, k, v, alpha, beta)), mask)) <= FLOAT32_FORWARD
    _, *matched, _ = load_backend(backend).forward(q, k, v, None, None, mask, mix)
    for x, y in zip(matched, match_moments(q, k, mask, backend=backend), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=0)


# ---- padding ----


@both
@pytest.mark.parametrize("matched", [False, True])
def test_padding_may_hold_anything(function, matched, backend):
    tensors = inputs()
    mask = random_padding(2, 40, full_row=True)
    mask[0, :3] = mask[0, 20] = True
    rows = mask[:, None, :, None].expand_as(tensors[0])
    weight = torch.randn(rows.shape, generator=torch.Generator().manual_seed(2)).masked_fill(rows, 0.0)

    def run(tensors):
        tensors = [x.detach().requires_grad_() for x in tensors]
        factors = (None, None) if matched else tensors[3:]
        out = FUNCTIONS[function](*tensors[:3], *factors, mask, backend)
        return out.detach(), torch.autograd.grad(out, tensors[: 3 if matched else 5], weight)

    expected, expected_grads = run(tensors)
    for garbage in (torch.nan, -torch.inf, 3e38):
        out, grads = run([*(x.detach().masked_fill(rows, garbage) for x in tensors[:3]), *tensors[3:]])
        says = f"where padding is {garbage}: {{}}".format
        torch.testing.assert_close(out[~rows], expected[~rows], rtol=1e-6, atol=1e-6, msg=says)
        for grad, same in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(grad, same, rtol=1e-5, atol=1e-6, msg=says)
        for grad in grads[:3]:
            assert (grad[rows] == 0).all(), garbage


def test_the_moments_ignore_what_padding_holds(backend):
    q, k, _ = random_qkv(length=40)
    mask = random_padding(2, 40)
    expected = match_moments(q, k, mask, backend=backend)
    q, k = (x.masked_fill(mask[:, None, :, None], torch.nan) for x in (q, k))
    assert all(map(torch.equal, match_moments(q, k, mask, backend=backend), expected))


@both
@pytest.mark.parametrize("scale", [1e5, 1e15])
def test_matched_factors_keep_huge_inputs_finite(function, scale, backend):
    q, k, v = (x.requires_grad_() for x in random_qkv(length=40, scale=scale))
    out = FUNCTIONS[function](q, k, v, None, None, None, backend)
    assert out.isfinite().all()
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.mean() / scale, (q, k, v)))


# ---- second derivatives ----


def second_derivatives(out, tensors):
    """Of the gradient penalty |d out.sum() / d(q, v)|², as in a critic's training."""
    first = torch.autograd.grad(out.sum(), tensors[:3], create_graph=True)
    return torch.autograd.grad(sum(x.square().sum() for x in first), tensors, allow_unused=True)


@both
@pytest.mark.parametrize("padded", [False, True])
def test_a_gradient_penalty_is_differentiated_right(function, padded, backend):
    tensors = inputs()
    mask = random_padding(2, 40, full_row=True) if padded else None
    found = second_derivatives(FUNCTIONS[function](*tensors, mask, backend), tensors)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    expected = second_derivatives(ORACLES[function](*exact, mask), exact)
    for name, x, y in zip(NAMES, found, expected, strict=True):
        assert relative_rms(x, y) <= FLOAT32_GRADIENT, name


@both
def test_second_derivatives_by_differences(function):
    tensors = inputs(length=5, dim=2, dtype=torch.float64)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    assert torch.autograd.gradgradcheck(lambda *x: FUNCTIONS[function](*x, mask, "torch"), tensors)


def test_inputs_made_of_each_other_share_no_second_derivative(backend):
    """The gradient of q alone, where k and v are functions of q."""
    q = inputs()[0]
    found = second_derivatives(lln_attention(q, 2 * q, q, 1.0, 1.0, backend=backend), [q, q, q])
    exact = q.detach().double().requires_grad_()
    expected = second_derivatives(ORACLES["lln"](exact, 2 * exact, exact, 1.0, 1.0, None), [exact, exact, exact])
    assert relative_rms(found[0], expected[0]) <= FLOAT32_GRADIENT


def test_random_features_have_second_derivatives():
    q, k, v, *_ = inputs(length=5, dim=2, dtype=torch.float64)
    omega, mask = torch.randn(2, 6, dtype=torch.float64), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    assert torch.autograd.gradgradcheck(lambda *x: random_feature_attention(*x, omega, mask), (q, k, v))


def test_a_second_derivative_with_dropout_is_refused_at_once(backend):
    q, k, v, *_ = inputs()
    out = lln_diag_attention(q, k, v, 1.0, 1.0, None, BLOCK, backend, dropout_p=0.1)
    with pytest.raises(RuntimeError, match="with dropout has no second derivative: set dropout to 0"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


# ---- tensors that are not what they seem ----


def negated(x):
    """-x without having computed it: a view with the negative bit, as of the imaginary part of a conjugate."""
    return torch._neg_view(x)


@both
@pytest.mark.parametrize("which", range(6))
def test_a_pending_sign_is_taken(function, which, backend):
    tensors, grad = [x.detach() for x in inputs()], torch.randn(2, 3, 40, 32)

    def run(*tensors):
        *tensors, grad = tensors
        tensors = [x.requires_grad_() for x in tensors]
        out = FUNCTIONS[function](*tensors, None, backend)
        return out, *torch.autograd.grad(out, tensors, grad)

    lazy = [negated(x) if i == which else x for i, x in enumerate((*tensors, grad))]
    eager = [-x if i == which else x for i, x in enumerate((*tensors, grad))]
    for x, y in zip(run(*lazy), run(*eager), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_the_moments_of_a_pending_sign(backend):
    q, k, _ = random_qkv(length=40)
    q = (q + 3).abs()
    found = match_moments(negated(q), k, backend=backend)
    assert all(map(torch.equal, found, match_moments(-q, k, backend=backend)))


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("which", range(6))
def test_kernels_take_no_tensor_without_data(which):
    """Not one of q, k, v, α, β and the mask: reading its memory would end the process."""
    tensors = [*(x.detach() for x in inputs()), random_padding(2, 40)]
    tensors[which] = tensors[which].as_subclass(Subclass)
    q, *others = tensors
    assert choose_backend("auto", q, None, *others) == "torch"
    assert relative_rms(lln_attention(*tensors), lln_attention(*(x.as_subclass(torch.Tensor) for x in tensors))) < 1e-5
    with pytest.raises(ValueError, match="cannot run here: The kernels are no operations of torch"):
        lln_attention(*tensors, backend="triton")


@both
@pytest.mark.parametrize("matched", [False, True])
def test_shapes_can_be_asked_for_without_data(function, matched):
    calibration_table.cache_clear()
    forget_scratch()
    for mode in (FakeTensorMode(), torch.device("meta")):
        with mode:
            tensors = inputs() if isinstance(mode, FakeTensorMode) else [torch.empty(2, 3, 40, 32) for _ in range(5)]
            factors = (None, None) if matched else [x[..., 0, 0] if x.dim() == 4 else x for x in tensors[3:]]
            q, k, v = (x.requires_grad_() for x in tensors[:3])
            out = FUNCTIONS[function](q, k, v, *factors, None, "auto")
            assert out.shape == (2, 3, 40, 32)
            assert [x.shape for x in torch.autograd.grad(out.sum(), (q, k, v))] == 3 * [out.shape]
    # ... and nothing of it is met afterwards.
    q, k, v = (x.detach() for x in inputs()[:3])
    assert FUNCTIONS[function](q, k, v, None, None, None, "torch").isfinite().all()


class Model(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.project = torch.nn.Linear(32, 96)
        self.attention = build_attention(name, num_heads=1, head_dim=32, max_positions=64)

    def forward(self, x):
        return self.attention(*(y[:, None] for y in self.project(x).chunk(3, dim=-1)))


@pytest.mark.parametrize("name", ["lln", "lln_diag", "block_diag", "performer"])
def test_a_model_that_trains_can_be_traced_and_exported(name):
    torch.manual_seed(0)
    model, x = Model(name), torch.randn(2, 40, 32)
    expected = model.eval()(x)
    traced = torch.jit.trace(model, x, check_trace=False)
    exported = torch.export.export(copy.deepcopy(model), (x,)).module()
    for other in (traced, exported):
        assert relative_rms(other(x), expected) <= FLOAT32_FORWARD
    traced(x).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@both
def test_transforms_of_functions(function):
    q, k, v, alpha, beta = (x.detach() for x in inputs())

    def loss(q, k, v, alpha, beta):
        return FUNCTIONS[function](q, k, v, alpha, beta, None, "auto").square().sum()

    found = torch.func.grad(loss)(q, k, v, alpha, beta)
    (expected,) = torch.autograd.grad(loss(q.requires_grad_(), k, v, alpha, beta), q)
    assert relative_rms(found, expected) <= FLOAT32_GRADIENT


# ---- what is set around a call ----


@both
@pytest.mark.parametrize("matched", [False, True])
def test_defaults_of_torch_change_nothing(function, matched, backend):
    tensors = [x.detach() for x in inputs()]
    factors = (None, None) if matched else tensors[3:]
    expected = FUNCTIONS[function](*tensors[:3], *factors, None, backend)
    calibration_table.cache_clear()
    forget_scratch()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            found = FUNCTIONS[function](*tensors[:3], *factors, None, backend)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)


def test_inference_mode_leaves_nothing_behind():
    q, k, v = random_qkv(length=40, dim=40)
    forget_scratch()
    with torch.inference_mode():
        expected = lln_diag_attention(q, k, v, 1.0, 1.0, backend="torch")
    assert torch.equal(lln_diag_attention(q.requires_grad_(), k, v, 1.0, 1.0, backend="torch"), expected)


@pytest.mark.parametrize("function", [*FUNCTIONS, "block_diag"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(function, dtype, backend):
    """These operations are float32 inside whatever comes in; forward and backward, dimensions without C kernels too."""
    if dtype == torch.bfloat16 and backend == "cpu":
        pytest.skip("the C kernels are float32")
    for dim in (32, 40) if backend == "torch" else (32,):
        q, k, v = (x.to(dtype).requires_grad_() for x in random_qkv(length=40, dim=dim))

        def run(q=q, k=k, v=v):
            if function == "block_diag":
                out = block_diag_attention(q, k, v, None, BLOCK)
            else:
                out = FUNCTIONS[function](q, k, v, None, None, None, backend)
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
@both
def test_nothing_in_nothing_out(function, matched, shape, backend):
    q, k, v = (torch.randn(shape).requires_grad_() for _ in range(3))
    alpha, beta = torch.ones(2, *shape[:2]).requires_grad_()
    mask = torch.zeros(shape[0], shape[2], dtype=torch.bool)
    factors = (None, None) if matched else (alpha, beta)
    out = FUNCTIONS[function](q, k, v, *factors, mask, backend)
    assert (out.shape, out.dtype) == (shape, q.dtype)
    wanted = [q, k, v] if matched else [q, k, v, alpha, beta]
    for x, grad in zip(wanted, torch.autograd.grad(out.sum(), wanted), strict=True):
        assert grad.shape == x.shape
        assert (grad == 0).all()
    assert [x.shape for x in match_moments(q, k, mask, backend=backend)] == 2 * [torch.Size(shape[:2])]


REFUSED = [
    (dict(q=torch.zeros(1, 2, 4, 0), k=torch.zeros(1, 2, 4, 0), v=torch.zeros(1, 2, 4, 0)), "D > 0"),
    (dict(q=[[1.0]]), "q, k, v must be tensors, got list, Tensor, Tensor"),
    (dict(v=None), "q, k, v must be tensors, got Tensor, Tensor, NoneType"),
    (dict(key_padding_mask=[[False] * 4]), "key_padding_mask must be a tensor or None, got list"),
    (dict(block_size=3.5), r"block_size must be a whole number, got 3\.5"),
    (dict(block_size="8"), "block_size must be a whole number, got '8'"),
    (dict(dropout_p="0.1"), r"dropout_p must be a number in \[0, 1\), got '0.1'"),
    (dict(dropout_p=float("nan")), "dropout_p"),
    (dict(alpha="1"), "alpha must be a number or a tensor, got str"),
    (dict(beta=torch.zeros(1, dtype=torch.complex64)), "beta must be real"),
    (dict(backend=["cpu"]), "unknown backend"),
    ({x: torch.zeros(1, 2, 4, 8).to(torch.float8_e4m3fn) for x in "qkv"}, "got torch.float8_e4m3fn"),
    ({x: torch.zeros(1, 2, 4, 8, dtype=torch.int64) for x in "qkv"}, "share one floating-point dtype"),
    (dict(k=torch.zeros(1, 2, 4, 8).to_sparse()), "must be dense tensors"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_bad_input_is_refused_in_one_line(change, message, backend):
    arguments = dict(zip("qkv", torch.zeros(3, 1, 2, 4, 8), strict=True), alpha=1.0, beta=1.0, backend=backend)
    with pytest.raises(ValueError, match=message) as error:
        lln_diag_attention(**arguments | change)
    assert "\n" not in str(error.value)


def test_moments_check_their_inputs(backend):
    q = torch.zeros(1, 2, 4, 32)
    with pytest.raises(ValueError, match="one shape"):
        match_moments(q, q[:, :, :3], backend=backend)
    with pytest.raises(ValueError, match="key_padding_mask must be bool"):
        match_moments(q, q, torch.zeros(1, 4), backend=backend)


def test_whole_numbers_of_other_libraries_are_block_sizes():
    assert checks.check_block_size(torch.tensor(3), 8) == 3
