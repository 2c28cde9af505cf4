"""Tests of the features of the Triton backend: splits, layouts, its dropout, moment matching, CUDA graphs, races.

test_backends.py compares all backends with the oracles. The tests run in the interpreter on a CPU, and natively where
there is a GPU.
"""

import ast
import inspect
import itertools
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import pytest
import torch

from lln_fairseq.ops import dispatch, reference
from lln_fairseq.ops.backends import triton
from lln_fairseq.ops.backends.triton import global_rows, launch, plan
from lln_fairseq.ops.backends.triton.launch import Settings
from lln_fairseq.ops.formula import DIAG, JOINT, LLN, Inputs, Spec
from lln_fairseq.ops.lln import lln_diag_attention
from tests import helpers
from tests.ops.mixes import (
    GLOBAL,
    TESTED_MIXES,
    assert_float32_accuracy,
    attend,
    errors,
    holes,
    inputs,
    oracle,
    output_and_gradients,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
native = pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
# The interpreter computes bfloat16 wrongly.
HALF = [torch.float16, pytest.param(torch.bfloat16, marks=[pytest.mark.gpu, native])]

REASON = triton.reason_against(Spec(LLN), torch.empty(1, 1, 1, 64, device=DEVICE))
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
every_mix = pytest.mark.parametrize("mix", TESTED_MIXES)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fill new memory with NaN, which shows if a kernel does not write all of it."""
    helpers.poison_empty(monkeypatch)


def test_kernels_read_only_fields_of_their_settings():
    """Triton 3.8 compiles kernels with a tuple of the fields, which has no properties. The interpreter has both."""
    names = set()
    for path in Path(triton.__file__).parent.glob("*.py"):
        names.update(re.findall(r"\bMETA\.(\w+)", path.read_text()))
    assert {"dim", "scale", "chunk_rows"} <= names <= set(Settings._fields)
    settings = Settings(64, 32, None, False, chunk=40)
    assert (settings.scale, settings.chunk_rows) == (0.125, 64)


@pytest.fixture
def many_splits(monkeypatch):
    """Make splits of 32 tokens, so that short sequences use the kernels that combine splits."""
    monkeypatch.setattr(plan, "split_tokens", lambda length, dim: ((length + 31) // 32, 32))
    forget_plans()
    yield
    forget_plans()


def forget_plans():
    for function in (plan.plan_moments, plan.plan_forward, plan.plan_backward):
        function.cache_clear()


def padding_mask(batch, length, full_row=False):
    return helpers.random_padding(batch, length, seed=length, full_row=full_row, device=DEVICE)


@pytest.mark.parametrize("mix", [*TESTED_MIXES, GLOBAL])
def test_several_splits(many_splits, mix):
    tensors = inputs(mix, length=130, device=DEVICE)
    mask = torch.zeros(2, 130, dtype=torch.bool, device=DEVICE)
    mask[0, 20:100] = True  # splits and blocks without a real key
    mask[1, 3:] = True

    results = output_and_gradients(attend(mix, "triton", mask), tensors)

    assert_float32_accuracy(results, output_and_gradients(oracle(mix, mask), tensors, torch.float64))


@pytest.mark.exhaustive
@every_mix
def test_long_sequence_is_split(mix):
    tensors = inputs(mix, batch=1, heads=1, length=2100, dim=16, device=DEVICE)
    mask = torch.arange(2100, device=DEVICE)[None, :] >= 2077

    results = output_and_gradients(attend(mix, "triton", mask, 64), tensors)

    splits, _ = launch.split_tokens(2100, 16)
    assert splits == 2
    assert_float32_accuracy(results, output_and_gradients(oracle(mix, mask, 64), tensors, torch.float64))


def test_layouts_are_not_copied():
    heads_last = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs("lln", device=DEVICE)[:3]]
    packed = torch.cat(heads_last, dim=-1).chunk(3, -1)

    for tensors in (heads_last, packed):
        assert plan.have_common_strides(tensors[0].shape, [x.stride() for x in tensors])


def block_diag(backend, mask=None, block=48, counts=None, dropout=0.0):
    """Return block-diagonal attention with global tokens as a function of q, k and v."""
    spec = Spec(DIAG, block, dropout, max_global=0 if counts is None else int(counts.max()))
    seed = torch.tensor([7], device=DEVICE) if dropout else None

    def function(q, k, v):
        return dispatch.attend(spec, Inputs(q, k, v, padding=mask, global_counts=counts, seed=seed), backend)

    return function


@pytest.mark.parametrize("block", [16, 48, 80])  # a tile has several blocks, one block, and a part of a block
def test_splits_with_as_many_global_tokens_as_possible(many_splits, block):
    tensors = inputs(GLOBAL, length=100, device=DEVICE)
    mask = holes(2, 100, DEVICE)
    spec = Spec(JOINT, block, max_global=100)
    counts = torch.tensor([100, 70], device=DEVICE)

    def attention(backend):
        return lambda *x: dispatch.attend(spec, Inputs(*x[:5], x[5].expand(2, 1), mask, counts), backend)

    expected = output_and_gradients(attention("torch"), tensors, torch.float64)
    assert_float32_accuracy(output_and_gradients(attention("triton"), tensors), expected)

    expected = output_and_gradients(block_diag("torch", mask, block, counts), tensors[:3], torch.float64)
    assert_float32_accuracy(output_and_gradients(block_diag("triton", mask, block, counts), tensors[:3]), expected)


def test_block_diag_multiplies_in_half_precision(monkeypatch):
    settings = []

    def record(kernel, *tensors):
        settings.append(kernel.constants["META"])
        launch.launch_kernel(kernel, *tensors)

    monkeypatch.setattr(triton, "launch_kernel", record)
    tensors = inputs("lln", length=100, dtype=torch.float16, device=DEVICE)[:3]

    results = output_and_gradients(block_diag("triton"), tensors)

    assert [str(x.dot) for x in settings] == ["fp16", "fp16"]
    exact = output_and_gradients(lambda q, k, v: reference.block_diag_matrix(q, k, 48) @ v, tensors, torch.float64)
    assert max(errors(results, exact).values()) < 2e-3


@pytest.mark.parametrize("mix", [*TESTED_MIXES, GLOBAL])
def test_a_planned_kernel_always_gets_the_same_kind_of_arguments(mix, monkeypatch):
    """Triton compiles another kernel for None, another dtype or another alignment, and a plan keeps only one.

    A compiled kernel that is called directly gets the arguments that Triton would bind. No kernel runs.
    """
    kinds = {}

    def record(kernel, *tensors):
        kind = tuple(None if x is None else (x.dtype, x.data_ptr() % 16 == 0) for x in tensors)
        assert kinds.setdefault(kernel, kind) == kind
        constants = {name: value for name, value in kernel.constants.items() if name in kernel.function.arg_names}
        bound = inspect.signature(kernel.function.fn).bind(*tensors, *kernel.numbers, **constants)
        bound.apply_defaults()
        assert [id(x) for x in bound.arguments.values()] == [id(x) for x in (*tensors, *kernel.arguments)]

    monkeypatch.setattr(triton, "launch_kernel", record)
    padding = padding_mask(2, 100)
    for needed in itertools.product([False, True], repeat=3):
        for mask, start in ((None, 0), (padding, 3)):
            tensors = inputs(mix, length=100 + start, device=DEVICE)
            qkv = [x.detach()[:, :, start:].requires_grad_() for x in tensors[:3]]
            scalars = [x.detach().requires_grad_(need) for x, need in zip(tensors[3:], needed, strict=False)]
            attend(mix, "triton", mask)(*qkv, *scalars).sum().backward()
    assert len(kinds) > 8


def shifted(x):
    """Return a copy of x whose address is not a multiple of 16, with the same strides."""
    memory = x.new_empty(x.numel() + 1)
    copy = memory[1:].view(x.shape)
    copy.copy_(x)
    return copy


@pytest.mark.parametrize("mix", [*TESTED_MIXES, GLOBAL])
def test_unaligned_tensors_have_plans_of_their_own(mix):
    tensors = inputs(mix, device=DEVICE)
    forget_plans()
    expected = output_and_gradients(attend(mix, "triton"), tensors)
    plans = plan.plan_forward.cache_info().currsize

    actual = output_and_gradients(attend(mix, "triton"), [shifted(x) for x in tensors])
    output_and_gradients(attend(mix, "triton"), tensors)

    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)  # torch computes the rows of global tokens
    assert (plans, plan.plan_forward.cache_info().currsize) == (1, 2)


def test_threads_share_plans(monkeypatch):
    lock = Lock()

    def launch_alone(kernel, *tensors):
        with lock:  # the interpreter of Triton runs in one thread at a time
            launch.launch_kernel(kernel, *tensors)

    monkeypatch.setattr(triton, "launch_kernel", launch_alone)
    tensors = inputs("average", device=DEVICE)
    expected = attend("average", "triton")(*tensors)
    forget_plans()

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: attend("average", "triton")(*tensors), range(8)))

    assert all(torch.equal(x, expected) for x in results)


def fused_attention(q, k, v, mask, compute_log_sumexp, dropout_p):
    """Compute torch's fused attention for GPUs, which has no kernel for a CPU, in its layouts, without dropout."""
    assert compute_log_sumexp
    assert not dropout_p
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if mask is not None:
        assert mask.shape == scores.shape
        assert mask.stride()[1:] == (0, 0, 1)
        assert mask.stride(0) % 16 == 0
        scores = scores + mask
    lse = scores.logsumexp(-1)
    out = ((scores - lse[..., None]).exp() @ v).transpose(1, 2).contiguous().transpose(1, 2)
    seed = torch.zeros((), dtype=torch.int64)
    return out, torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf), seed, seed


def fused_attention_backward(grad, q, k, v, mask, out, lse, seed, offset, dropout_p, needed):
    scale = q.shape[-1] ** -0.5
    scores = scale * (q @ k.mT)
    if mask is not None:
        scores = scores + mask
    p = (scores - lse[:, :, : q.shape[2], None]).exp()
    dscores = scale * p * (grad @ v.mT - (grad * out).sum(-1, keepdim=True))
    return dscores @ k, dscores.mT @ q, p.mT @ grad, None


@pytest.mark.skipif(DEVICE == "cuda", reason="the tests of the backends use torch's fused attention on a GPU")
@pytest.mark.parametrize("padded", [False, True])
def test_rows_of_global_tokens_by_fused_attention(padded, monkeypatch):
    """The formulas of the fused attention stand in for it. The third sequence is all padding."""
    monkeypatch.setattr(global_rows, "is_fused", lambda x: True)
    monkeypatch.setattr(global_rows, "FUSED", fused_attention)
    monkeypatch.setattr(global_rows, "FUSED_BACKWARD", fused_attention_backward)
    mask = holes(3, 70) if padded else None
    hidden = torch.zeros(3, 1, 70, 1, dtype=torch.bool)
    if padded:
        hidden = mask[:, None, :, None]
    counts = torch.tensor([7, 0, 21])
    tensors = inputs("joint_offset", 3, 2, 70, 32)

    def without_padding(function):
        return lambda *tensors: function(*tensors).masked_fill(hidden, 0.0)

    definition = without_padding(oracle("joint_offset", mask, 16, counts))
    expected = output_and_gradients(definition, tensors, torch.float64)
    tensors[:3] = [x.masked_fill(hidden, torch.nan) for x in tensors[:3]]
    attention = without_padding(attend("joint_offset", "triton", mask, 16, global_tokens=counts))

    assert_float32_accuracy(output_and_gradients(attention, tensors), expected)


@pytest.mark.parametrize("padded", [False, True])
def test_fused_attention_has_the_announced_arguments_and_results(padded, monkeypatch):
    """On the meta device, where torch checks the arguments and computes the shapes of the results."""
    monkeypatch.undo()
    monkeypatch.setattr(global_rows, "is_fused", lambda x: True)
    q, k, v, out = torch.empty(4, 2, 3, 70, 32, dtype=torch.float16, device="meta")
    padding = torch.zeros(2, 70, dtype=torch.bool, device="meta") if padded else None
    tensors = Inputs(q, k, v, padding=padding, global_counts=torch.zeros(2, dtype=torch.int64, device="meta"))
    for dropout in (0.0, 0.1):
        spec = Spec(DIAG, 16, dropout, max_global=37)
        saved = global_rows.attend_from_global_tokens(spec, tensors, out)
        for x, y in zip(saved, global_rows.empty_rows(spec, q), strict=not dropout):
            assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
        assert len(saved) == (4 if dropout else 2)
        global_rows.global_rows_backward(spec, tensors, saved, out, (q, k, v))


TABLE = (torch.tensor([-3.0, -1.0, 0.5, 2.0, 2.7]), torch.tensor([0.1, 0.9, 1.4, 2.6, 2.9]))


def expected_alpha_beta(q, k, mask):
    """Return α and β, (2, B, H) float64: the formula of moment matching for one (batch, head) at a time."""
    result = torch.zeros(2, *q.shape[:2], dtype=torch.float64)
    xs, ys = (column.double() for column in TABLE)
    for b in range(q.shape[0]):
        real = slice(None) if mask is None else ~mask[b].cpu()
        for h in range(q.shape[1]):
            sigmas = [x[b, h].cpu().double()[real].std(correction=0).clamp_min(1e-6) for x in (q, k)]
            log_s = 2 * (sigmas[0].log() + sigmas[1].log())
            i = int(((xs <= log_s).sum() - 1).clamp(0, len(xs) - 2))
            log_sigma2 = ys[i] + (ys[i + 1] - ys[i]) / (xs[i + 1] - xs[i]) * (log_s - xs[i])
            for j, sigma in enumerate(sigmas):
                result[j, b, h] = (log_sigma2 / 2).exp() / 2**0.5 / sigma
    return result


def table_on_device():
    return [x.to(DEVICE) for x in TABLE]


@pytest.mark.parametrize("scale", [0.05, 1.0, 30.0])  # below, inside and above the table
@pytest.mark.parametrize("splits", [False, True])
def test_moment_matching(request, scale, splits):
    if splits:
        request.getfixturevalue("many_splits")
    q, k, _ = helpers.random_qkv(3, 2, 130, 32, scale=scale, device=DEVICE)
    q = q + 100.0
    mask = padding_mask(3, 130)
    mask[0, :40] = True  # a split without a real token
    padded = mask[:, None, :, None]

    with_padding = triton.match_moments(q.masked_fill(padded, 1e4), k.masked_fill(padded, 1e4), mask, table_on_device())
    without_padding = triton.match_moments(q, k, None, table_on_device())

    for actual, expected in zip(with_padding, expected_alpha_beta(q, k, mask), strict=True):
        torch.testing.assert_close(actual.cpu().double(), expected, rtol=2e-5, atol=0)
    for actual, expected in zip(without_padding, expected_alpha_beta(q, k, None), strict=True):
        torch.testing.assert_close(actual.cpu().double(), expected, rtol=2e-5, atol=0)


def may_be_none(node):
    """Return True if an expression, or one of the entries of a tuple or namedtuple, can be the constant None."""
    if isinstance(node, ast.IfExp):
        return may_be_none(node.body) or may_be_none(node.orelse)
    if isinstance(node, ast.Tuple):
        return any(may_be_none(x) for x in node.elts)
    if isinstance(node, ast.Call):
        return any(may_be_none(x) for x in [*node.args, *(keyword.value for keyword in node.keywords)])
    return isinstance(node, ast.Constant) and node.value is None


def test_no_device_function_returns_none():
    """Triton 3.6 cannot compile a device function that returns None inside a tuple. The interpreter can."""
    functions = 0
    for path in Path(triton.__file__).parent.glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and any("jit" in ast.unparse(x) for x in function.decorator_list):
                functions += 1
                returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
                assert not any(may_be_none(x) for x in returned), function.name
    assert functions > 40


@native
@pytest.mark.gpu
@pytest.mark.parametrize("mix", [*TESTED_MIXES, GLOBAL])
def test_host_never_waits_for_the_device(mix):
    tensors = inputs(mix, length=4096, dim=64, dtype=torch.float16, device=DEVICE)
    grad = torch.randn_like(tensors[0])
    mask = padding_mask(2, 4096)
    table = table_on_device()
    options = {} if mix == "lln" else {"dropout_p": 0.1}

    def run():
        leaves = [x.detach().requires_grad_() for x in tensors]
        torch.autograd.grad(attend(mix, "triton", mask, 64, **options)(*leaves), leaves, grad)

    run()  # compiles the kernels
    triton.match_moments(*tensors[:2], mask, table)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        triton.match_moments(*tensors[:2], mask, table)
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def capture_cuda_graph(step):
    """Run a step twice outside a graph, then capture it.

    Returns the first results, the graph, and the tensors that every replay overwrites with its results.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        eager = step()
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    return eager, graph, captured


@native
@pytest.mark.gpu
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_cuda_graph_draws_new_dropout_at_each_replay(dropout_p):
    tensors = inputs("average", length=4096, dim=64, dtype=torch.float16, device=DEVICE)
    grad = torch.randn_like(tensors[0])
    leaves = [x.detach().clone().requires_grad_() for x in tensors]

    def step():
        out = attend("average", "triton", None, 64, dropout_p=dropout_p)(*leaves)
        return [out, *torch.autograd.grad(out, leaves, grad)]

    eager, graph, captured = capture_cuda_graph(step)
    graph.replay()
    first = [x.clone() for x in captured]
    graph.replay()

    if dropout_p == 0:
        assert all(map(torch.equal, first, captured))
        assert all(map(torch.equal, first, eager))
    else:
        assert not any(map(torch.equal, first[:4], captured[:4]))


@native
@pytest.mark.gpu
def test_tensors_of_more_than_2_to_the_31_elements(monkeypatch):
    """The last block of the last head agrees with the formula in float64."""
    monkeypatch.undo()  # filling new memory with NaN would take long
    length = 2**20
    heads = 36
    dim = 64
    block_size = 64
    shape = (1, length, heads, dim)
    q, k, v = (torch.randn(shape, device=DEVICE, dtype=torch.float16).transpose(1, 2) for _ in range(3))

    out = lln_diag_attention(q, k, v, 1.4, 1.4, None, block_size, backend="triton")

    y = 1.4 * k[0, -1].float()
    features = (1.4 * q[0, -1, -block_size:].float() + y.logsumexp(0)).softmax(-1)
    lln = features.double() @ (y.double().softmax(0).T @ v[0, -1].double())
    last_q, last_k, last_v = (x[0, -1, -block_size:].double() for x in (q, k, v))
    diag = (last_q @ last_k.T / dim**0.5).softmax(-1) @ last_v
    assert helpers.relative_rms(out[0, -1, -block_size:], (lln + diag) / 2) < 2e-3


# ---- races and reads beyond a tensor ----

# The interpreter has neither races nor real memory. On a CPU, small sizes only show that the tests themselves run.
HEADS = 3 if DEVICE == "cuda" else 1
LENGTH = 3001 if DEVICE == "cuda" else 70
DIM = 64 if DEVICE == "cuda" else 16
DTYPES = [torch.float32, *HALF] if DEVICE == "cuda" else [torch.float32]
MARGIN = 64  # tokens of memory on either side of a sequence


def qkv_alpha_beta(mix, **options):
    """Return q, k, v, α, β. The offset of joint_offset is left out, so that it is 0."""
    return inputs(mix, device=DEVICE, **options)[:5]


def window_of_larger_tensor(x, margin_value):
    """Return a view that equals x (B, H, N, D), in a tensor that holds margin_value before and after its tokens."""
    batch, heads, length, dim = x.shape
    larger = torch.full((batch, heads, length + 2 * MARGIN, dim), margin_value, device=DEVICE, dtype=x.dtype)
    larger[:, :, MARGIN:-MARGIN] = x
    return larger[:, :, MARGIN:-MARGIN]


@native
@pytest.mark.gpu
@every_mix
@pytest.mark.parametrize("dtype", DTYPES)
def test_repeats_are_equal_to_the_bit(mix, dtype):
    tensors = qkv_alpha_beta(mix, heads=HEADS, length=LENGTH, dim=DIM, dtype=dtype)
    attention = attend(mix, "triton", padding_mask(2, LENGTH), 64)

    first = output_and_gradients(attention, tensors)

    for _ in range(250):
        assert all(map(torch.equal, first, output_and_gradients(attention, tensors)))


@every_mix
@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_beyond_the_tokens_is_not_read(mix, dtype):
    """The results are the same if q, k, v and the gradient are surrounded by NaN and if they are surrounded by 0."""
    tensors = qkv_alpha_beta(mix, heads=HEADS, length=LENGTH, dim=DIM, dtype=dtype)
    attention = attend(mix, "triton", padding_mask(2, LENGTH), 64)
    results = []
    for margin_value in (0.0, float("nan")):
        windows = [window_of_larger_tensor(x, margin_value) for x in tensors[:3]]
        grad = window_of_larger_tensor(torch.ones_like(tensors[0]), margin_value)
        leaves = [x.detach().requires_grad_() for x in (*windows, *tensors[3:])]
        out = attention(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, grad)])

    assert all(map(torch.equal, *results))
    assert all(x.isfinite().all() for x in results[0])


@native
@pytest.mark.gpu
@every_mix
def test_a_million_tokens_forward_and_backward(mix, monkeypatch):
    """The second of two heads agrees with float32 PyTorch, output and gradients."""
    monkeypatch.undo()  # filling new memory with NaN would take long
    tensors = qkv_alpha_beta(mix, batch=1, heads=2, length=2**20, dim=64, dtype=torch.float16)
    grad = torch.randn_like(tensors[0])

    results = output_and_gradients(attend(mix, "triton", None, 64), tensors, grad=grad)

    second_head = [x[:, 1:].float() for x in tensors]
    expected = output_and_gradients(attend(mix, "torch", None, 64), second_head, grad=grad[:, 1:])
    assert max(errors([x[:, 1:] for x in results[:4]], expected).values()) < 1e-2


@native
@pytest.mark.gpu
@pytest.mark.parametrize("mix", TESTED_MIXES[1:])
def test_dropout_keeps_the_mean(mix):
    """The mean output over many seeds is the output without dropout, within six standard errors."""
    tensors = qkv_alpha_beta(mix, batch=1, heads=2, length=256, dim=64, dtype=torch.float16)
    torch.manual_seed(0)
    with_dropout = attend(mix, "triton", None, 64, dropout_p=0.2)

    outputs = torch.stack([with_dropout(*tensors).float() for _ in range(400)])

    expected = attend(mix, "triton", None, 64)(*tensors).float()
    standard_error = outputs.std(dim=0) / 20
    assert ((outputs.mean(dim=0) - expected).abs() <= 6 * standard_error + 2e-3).all()
