"""torch.compile: one graph without a break, with the kernels in it, and the results of eager execution."""

import dataclasses
import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lln_fairseq.attention import Context, build_attention
from lln_fairseq.ops.backends import load_backend
from lln_fairseq.ops.dispatch import choose_backend
from lln_fairseq.ops.formula import AVERAGE, DIAG, JOINT, LLN, Inputs, Spec
from lln_fairseq.ops.lln import lln_diag_attention
from tests.helpers import (
    FLOAT32_FORWARD,
    FLOAT32_GRADIENT,
    random_padding,
    random_qkv,
    relative_rms,
    with_representatives,
)

OPERATOR = "lln_fairseq.hybrid_attention"
needs_kernels = pytest.mark.skipif(
    choose_backend("auto", Spec(LLN), Inputs(*torch.zeros(3, 1, 1, 1, 32))) != "cpu",
    reason="no C compiler, or a CPU that the kernels do not support",
)


def output_and_gradients(context, compute):
    """Return compute(q, k, v, context) and its gradients with respect to q, k and v."""
    q, k, v = (x.requires_grad_() for x in random_qkv())
    out = compute(q, k, v, context)
    return out, *torch.autograd.grad(out.square().sum(), (q, k, v))


@pytest.fixture(autouse=True)
def _reset_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class RecordingCompiler:
    """Compiles functions into one graph each, and records the operators of all graphs."""

    def __init__(self):
        self.operators = []

    def compile(self, function, **options):
        return torch.compile(function, fullgraph=True, backend=self._record, **options)

    def _record(self, module, inputs):
        self.operators.extend(str(node.target) for node in module.graph.nodes)
        return module.forward


@pytest.fixture
def compiler():
    return RecordingCompiler()


@pytest.mark.parametrize(
    ("name", "options", "backend", "padded"),
    [
        ("lln", {}, "aot_eager", False),
        ("lln_diag", {}, "inductor", True),
        ("lln_diag", {"mix": "joint_offset", "block_size": 16}, "aot_eager", True),
        ("lln_diag", {"constants": "paper"}, "aot_eager", False),
        ("lln", {"scope": "batch", "gain": "learned"}, "aot_eager", True),
        ("lln_diag", {"mix": "joint_offset", "gain": "learned"}, "aot_eager", True),
        ("block_diag", {}, "aot_eager", False),
        ("window", {"block_size": 16}, "aot_eager", True),
        ("window", {"block_size": 16, "band": 20}, "aot_eager", False),
    ],
)
def test_compiled_mechanism_equals_eager_execution(name, options, backend, padded):
    attention = build_attention(name, num_heads=3, head_dim=32, max_positions=128, **options).eval()
    context = Context(random_padding(2, 97) if padded else None)

    expected = output_and_gradients(context, attention)
    actual = output_and_gradients(context, torch.compile(attention, fullgraph=True, backend=backend))

    assert relative_rms(actual[0], expected[0]) <= FLOAT32_FORWARD
    for x, y in zip(actual[1:], expected[1:], strict=True):
        assert relative_rms(x, y) <= FLOAT32_GRADIENT


@needs_kernels
@pytest.mark.parametrize(
    ("head_dim", "dtype", "backend", "is_in_graph"),
    [
        (32, torch.float32, "auto", True),
        (32, torch.float32, "triton", True),
        (32, torch.float32, "torch", False),
        (20, torch.float32, "auto", False),
        (32, torch.float64, "auto", False),
    ],
)
def test_graph_has_the_operator_where_kernels_run(head_dim, dtype, backend, is_in_graph, compiler):
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    q, k, v = random_qkv(dim=head_dim, dtype=dtype, device=device)
    for mix in ("average", "joint_offset"):
        compute = functools.partial(lln_diag_attention, alpha=1.2, beta=0.9, backend=backend, mix=mix)
        assert relative_rms(compiler.compile(compute)(q, k, v), compute(q, k, v)) <= FLOAT32_FORWARD
    assert compiler.operators.count(OPERATOR) == (2 if is_in_graph else 0)


@pytest.mark.parametrize("backend", with_representatives(["cpu", "triton"], "cpu"))
@pytest.mark.parametrize(
    ("form", "matched", "layout"),
    [(AVERAGE, True, "strided"), (LLN, False, "tokens"), (DIAG, False, "heads"), (JOINT, False, "strided")],
)
def test_operator_passes_torchs_checks(layout, form, matched, backend):
    """Without `matched`, α and β are passed, with gradients."""
    if reason := load_backend(backend).reason_against(Spec(form, 16), torch.empty(1, 1, 1, 32)):
        pytest.skip(reason)
    q, k, v = random_qkv(batch=1, heads=2, length=24)
    if layout == "tokens":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    if layout == "strided":
        q, k, v = (torch.stack((x, x), dim=-1)[..., 0] for x in (q, k, v))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    is_given = form != DIAG and not matched
    alpha, beta = (torch.full((1, 2), 1.1, requires_grad=True) if is_given else None for _ in range(2))
    offset = torch.full((1, 2), 0.4, requires_grad=True) if form == JOINT else None
    seed = torch.tensor([7])
    for mask, dropout in ((None, 0.0), (torch.arange(24)[None] >= 19, 0.1)):
        neighbors = 1 if form == DIAG else 0
        has_global = form in (DIAG, JOINT)
        if backend == "triton" and dropout:
            has_global = False  # see dispatch.py
        counts = torch.tensor([5]) if has_global else None
        spec = Spec(form, 16, 0.0 if form == LLN else dropout, 6 if has_global else 0, neighbors)
        inputs = Inputs(*leaves, alpha, beta, offset, mask, counts, seed if dropout else None)
        arguments = (*inputs, *dataclasses.astuple(spec), backend)
        torch.library.opcheck(torch.ops.lln_fairseq.hybrid_attention.default, arguments)


def test_operator_takes_every_tensor_and_every_field_of_the_spec():
    arguments = [argument.name for argument in torch.ops.lln_fairseq.hybrid_attention.default._schema.arguments]
    assert arguments == [*Inputs._fields, *(field.name for field in dataclasses.fields(Spec)), "backend"]


@needs_kernels
@pytest.mark.parametrize("number", [20, torch.tensor([20, 3])], ids=str)
@pytest.mark.parametrize("bound", [None, 30])
def test_graph_has_the_operator_with_global_tokens(bound, number, compiler):
    """Without padding and with it. The numbers of a tensor are limited by the bound, or by N."""

    def attention(q, k, v, context):
        options = {"global_tokens": number, "max_global_tokens": bound, "mix": "joint_offset", "block_size": 16}
        return lln_diag_attention(q, k, v, 1.2, 0.9, context.padding, **options)

    for padding in (None, random_padding(2, 97)):
        expected = output_and_gradients(Context(padding), attention)
        actual = output_and_gradients(Context(padding), compiler.compile(attention))
        assert all(map(torch.equal, actual, expected))
    assert compiler.operators.count(OPERATOR) == 2


@needs_kernels
def test_dynamic_graph_with_first_segments_serves_every_length(compiler):
    """Also sequences that are shorter than the bound of 128 global tokens."""
    options = {"block_size": 16, "global_tokens": "first_segment"}
    attention = build_attention("block_diag", num_heads=3, head_dim=32, max_positions=256, **options).eval()

    def attend(q, k, v, first_lengths):
        return attention(q, k, v, Context(None, first_lengths, 9))

    compiled = compiler.compile(attend, dynamic=True)
    for length in (33, 97, 150):
        q, k, v = (x.requires_grad_() for x in random_qkv(length=length))
        lengths = torch.tensor([9, 5])
        expected = attend(q, k, v, lengths)
        actual = compiled(q, k, v, lengths)
        assert torch.equal(actual, expected)
        (grad,) = torch.autograd.grad(actual.sum(), k)
        assert torch.equal(grad, torch.autograd.grad(expected.sum(), k)[0])
    assert compiler.operators.count(OPERATOR) == 1


@needs_kernels
def test_dynamic_graph_serves_every_length(compiler):
    compiled = compiler.compile(lambda q, k, v: lln_diag_attention(q, k, v), dynamic=True)
    for length in (5, 33, 80, 97):
        q, k, v = random_qkv(length=length)
        assert relative_rms(compiled(q, k, v), lln_diag_attention(q, k, v)) <= FLOAT32_FORWARD
    assert compiler.operators.count(OPERATOR) == 1


@needs_kernels
def test_compiled_dropout_equals_eager_dropout():
    def attention(q, k, v):
        return lln_diag_attention(q, k, v, dropout_p=0.3)

    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")

    def seeded(function):
        def compute(q, k, v, mask):
            torch.manual_seed(3)
            return function(q, k, v)

        return compute

    actual = output_and_gradients(None, seeded(compiled))
    expected = output_and_gradients(None, seeded(attention))
    for x, y in zip(actual, expected, strict=True):
        assert relative_rms(x, y) <= FLOAT32_GRADIENT


def test_compiled_attention_can_be_recomputed():
    compiled = torch.compile(lln_diag_attention, fullgraph=True, backend="eager")

    def recomputed(q, k, v, mask):
        return checkpoint(compiled, q, k, v, use_reentrant=False)

    actual = output_and_gradients(None, recomputed)
    expected = output_and_gradients(None, lambda q, k, v, mask: lln_diag_attention(q, k, v))
    for x, y in zip(actual, expected, strict=True):
        assert relative_rms(x, y) <= FLOAT32_GRADIENT


def test_compiled_vmap_equals_eager_execution():
    q, k, v = random_qkv(batch=4)
    pairs = [x.view(2, 2, *x.shape[1:]) for x in (q, k, v)]
    compiled = torch.compile(torch.vmap(lln_diag_attention), fullgraph=True, backend="aot_eager")
    assert relative_rms(compiled(*pairs).view_as(q), lln_diag_attention(q, k, v)) <= FLOAT32_FORWARD


def test_compiled_autocast_rounds_nothing(compiler):
    q, k, v = random_qkv(batch=4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = compiler.compile(lln_diag_attention)(q, k, v)
    assert relative_rms(out, lln_diag_attention(q, k, v)) <= FLOAT32_FORWARD


def test_strictly_exported_program_has_only_operators_of_torch():
    """See also test_model_can_be_traced_and_exported."""
    q, k, v = random_qkv(batch=4)
    attention = build_attention("lln_diag", num_heads=3, head_dim=32, max_positions=128).eval()
    exported = torch.export.export(attention, (q, k, v), strict=True)
    assert OPERATOR not in str(exported.graph)
    assert relative_rms(exported.module()(q, k, v), lln_diag_attention(q, k, v)) <= FLOAT32_FORWARD
