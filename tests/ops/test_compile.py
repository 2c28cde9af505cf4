"""torch.compile: one graph without a break, and the numbers of eager execution."""

import subprocess
import sys

import pytest
import torch

from lln_fairseq.attention import build_attention
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
@pytest.mark.parametrize(("name", "options"), [
    ("lln", {}),
    ("lln_diag", {}),
    ("lln_diag", {"mix": "ratio"}),
    ("lln_diag", {"constants": "paper"}),
    ("lln", {"scope": "batch"}),
    ("block_diag", {}),
])  # fmt: skip
def test_one_graph_with_the_numbers_of_eager_execution(name, options, padded):
    attention = build_attention(name, num_heads=3, head_dim=32, max_positions=128, **options).eval()
    mask = random_padding(2, 97) if padded else None
    expected = results(mask, attention)
    found = results(mask, torch.compile(attention, fullgraph=True, backend="aot_eager"))
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert relative_rms(one, other) <= (FLOAT32_GRADIENT if number else FLOAT32_FORWARD)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lln", "lln_diag"])
def test_so_does_the_default_compiler(name):
    attention = build_attention(name, num_heads=3, head_dim=32, max_positions=128).eval()
    mask = random_padding(2, 97)
    expected = results(mask, attention)
    found = results(mask, torch.compile(attention, fullgraph=True))
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert relative_rms(one, other) <= (FLOAT32_GRADIENT if number else FLOAT32_FORWARD)


def test_the_operations_do_not_import_the_compiler():
    code = "import sys, lln_fairseq.ops.lln; print('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
