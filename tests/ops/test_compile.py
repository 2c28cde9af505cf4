"""torch.compile: one graph without a break, the numbers of eager execution, and the kernels in it."""

import dataclasses
import functools
import subprocess
import sys

import pytest
import torch

from lln_fairseq.attention import build_attention
from lln_fairseq.ops.backends import HybridSpec, choose_backend, load_backend
from lln_fairseq.ops.lln import lln_diag_attention
from tests.helpers import FLOAT32_FORWARD, FLOAT32_GRADIENT, random_padding, random_qkv, relative_rms


def results(mask, compute):
    """Output and gradients of q, k, v."""
    q, k, v = (x.requires_grad_() for x in random_qkv())
    out = compute(q, k, v, mask)
    return out, *torch.autograd.grad(out.square().sum(), (q, k, v))


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("name", "options", "compiler"), [
    ("lln", {}, "aot_eager"),
    ("lln_diag", {}, "inductor"),
    ("lln_diag", {"mix": "ratio"}, "aot_eager"),
    ("lln_diag", {"mix": "joint_offset", "block_size": 16}, "aot_eager"),
    ("lln_diag", {"constants": "entropy"}, "aot_eager"),
    ("lln", {"scope": "batch", "gain": "learned"}, "aot_eager"),
    ("block_diag", {}, "aot_eager"),
])  # fmt: skip
def test_one_graph_with_the_numbers_of_eager_execution(name, options, compiler, padded):
    attention = build_attention(name, num_heads=3, head_dim=32, max_positions=128, **options).eval()
    mask = random_padding(2, 97) if padded else None
    expected = results(mask, attention)
    found = results(mask, torch.compile(attention, fullgraph=True, backend=compiler))
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert relative_rms(one, other) <= (FLOAT32_GRADIENT if number else FLOAT32_FORWARD)


@pytest.fixture
def graphs():
    """compile(function) and the names of the operators in what it has compiled."""
    found = []

    def backend(module, inputs):
        found.extend(str(node.target) for node in module.graph.nodes)
        return module.forward

    def compiled(function, **options):
        return torch.compile(function, fullgraph=True, backend=backend, **options)

    compiled.operators = found
    return compiled


OPERATOR = "lln_fairseq.hybrid_attention"
needs_kernels = pytest.mark.skipif(
    choose_backend("auto", torch.zeros(1, 1, 1, 32)) != "cpu", reason="no C compiler, or no CPU of ours"
)


@needs_kernels
@pytest.mark.parametrize(("head_dim", "dtype", "backend", "expected"), [
    (32, torch.float32, "auto", True),
    (32, torch.float32, "triton", True),
    (32, torch.float32, "torch", False),
    (20, torch.float32, "auto", False),
    (32, torch.float64, "auto", False),
])  # fmt: skip
def test_the_kernels_are_in_the_graph_where_they_run(head_dim, dtype, backend, expected, graphs):
    q, k, v = random_qkv(dim=head_dim, dtype=dtype)
    for mix in ("average", "joint"):
        compute = functools.partial(lln_diag_attention, alpha=1.2, beta=0.9, backend=backend, mix=mix)
        assert relative_rms(graphs(compute)(q, k, v), compute(q, k, v)) <= FLOAT32_FORWARD
    assert graphs.operators.count(OPERATOR) == 2 * expected


@pytest.mark.parametrize(
    ("backend", "layout"),
    [("cpu", "heads"), ("cpu", "strided"), pytest.param("triton", "tokens", marks=pytest.mark.exhaustive)],
)
@pytest.mark.parametrize(
    ("weights", "given", "joint"),
    [((0.5, 0.5), False, False), ((1.0, 0.0), True, False), ((0.0, 1.0), True, False), ((1.0, 1.0), True, True)],
)
def test_the_operator_keeps_torchs_contract(layout, weights, given, joint, backend):
    if reason := load_backend(backend).is_supported(torch.empty(1, 1, 1, 32), 16):
        pytest.skip(reason)
    if backend == "triton" and not weights[0]:
        pytest.skip("Triton has no kernel for the blocks alone")
    q, k, v = random_qkv(batch=1, heads=2, length=24)
    if layout == "tokens":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    if layout == "strided":
        q, k, v = (torch.stack((x, x), dim=-1)[..., 0] for x in (q, k, v))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    alpha, beta = (torch.full((1, 2), 1.1, requires_grad=True) if given else None for _ in range(2))
    parameter = torch.full((1, 2), 0.4, requires_grad=given) if joint else None
    seed = torch.tensor([7])
    for mask, dropout in ((None, 0.0), (torch.arange(24)[None] >= 19, 0.1)):
        mix = (*weights, 16, dropout if weights[1] else 0.0, joint, backend)
        arguments = (*leaves, alpha, beta, parameter, mask, seed if dropout else None, *mix)
        torch.library.opcheck(torch.ops.lln_fairseq.hybrid_attention.default, arguments)


def test_the_operator_knows_all_that_a_mixture_is():
    takes = {argument.name for argument in torch.ops.lln_fairseq.hybrid_attention.default._schema.arguments}
    # What is compiled cannot exchange anything, see autograd.py.
    assert {field.name for field in dataclasses.fields(HybridSpec)} - {"exchange"} <= takes


@needs_kernels
def test_one_graph_for_every_length(graphs):
    compiled = graphs(lambda q, k, v: lln_diag_attention(q, k, v), dynamic=True)
    for length in (5, 33, 80, 97):
        q, k, v = random_qkv(length=length)
        assert relative_rms(compiled(q, k, v), lln_diag_attention(q, k, v)) <= FLOAT32_FORWARD
    assert graphs.operators.count(OPERATOR) == 1


@needs_kernels
def test_dropout_is_the_same_in_both_passes():
    def compute(q, k, v, mask):
        torch.manual_seed(3)
        return lln_diag_attention(q, k, v, dropout_p=0.3)

    def compiled(q, k, v, mask):
        torch.manual_seed(3)
        return function(q, k, v)

    function = torch.compile(lambda q, k, v: lln_diag_attention(q, k, v, dropout_p=0.3), fullgraph=True,
                             backend="aot_eager")  # fmt: skip
    for one, other in zip(results(None, compiled), results(None, compute), strict=True):
        assert relative_rms(one, other) <= FLOAT32_GRADIENT


def test_transforms_autocast_and_export_beside_compilation(graphs):
    q, k, v = random_qkv(batch=4)
    several = [x.view(2, 2, *x.shape[1:]) for x in (q, k, v)]
    expected = lln_diag_attention(q, k, v)
    compiled = torch.compile(torch.vmap(lln_diag_attention), fullgraph=True, backend="aot_eager")
    assert relative_rms(compiled(*several).view_as(q), expected) <= FLOAT32_FORWARD
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert relative_rms(graphs(lln_diag_attention)(q, k, v), expected) <= FLOAT32_FORWARD
    attention = build_attention("lln_diag", num_heads=3, head_dim=32, max_positions=128).eval()
    for strict in (False, True):
        exported = torch.export.export(attention, (q, k, v), strict=strict)
        assert OPERATOR not in str(exported.graph)  # whoever loads it may not have it
        assert relative_rms(exported.module()(q, k, v), expected) <= FLOAT32_FORWARD


def test_the_operations_do_not_import_the_compiler():
    code = "import sys, lln_fairseq.ops.lln; print('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
