"""Every Triton kernel compiles for sm_80 and sm_90 without a GPU, fits in shared memory, and spills as listed here.

A compilation takes seconds, so only those run that can fail by themselves:
- sm_80 has the least shared memory. At head dim 128, whose tiles are the largest, every case is compiled for it.
- Head dim 64 has tiles of other sizes. Dropout and blocks of 16 tokens are left to the larger tiles of head dim 128.
- bfloat16 has instructions of its own, but takes as much shared memory and nearly as many registers as float16. Blocks
  of 64 tokens, LLN alone and the moments at head dim 128 use every kernel.
- sm_90 has instructions of its own and more shared memory, so only the largest head dim is compiled for it.

float32 is left out. It runs, but spills at head dim 128: three tf32 products in place of one take more registers than
there are.
"""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import pytest

pytestmark = pytest.mark.exhaustive
SCRIPT = Path(__file__).with_name("aot_compile.py")
ROOT = Path(__file__).parents[3]
PINNED = re.search(r"^triton==([\d.]+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)[1]
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}
# The largest number of bytes of stack, where spilled registers are stored, by architecture, head dim and kernel.
# Kernels that are not listed must not spill. Blocks that take several tiles are summed over them, in more registers
# than there are. Tiles of half or a quarter of the rows would not spill, but their warps repeat each other's work: they
# take two to four times as many instructions.
LARGEST_STACK = {
    (80, 64, "_output_kernel"): 216,
    (80, 64, "_backward_kernel_queries"): 1056,
    (80, 64, "_backward_kernel_keys"): 40,
    (80, 128, "_output_kernel"): 168,
    (80, 128, "_backward_kernel_queries"): 976,
    (80, 128, "_global_keys_kernel"): 72,
    (80, 128, "_backward_kernel_keys"): 648,
    (80, 128, "_backward_kernel_queries_keys"): 288,
    (90, 128, "_output_kernel"): 280,
    (90, 128, "_backward_kernel_queries"): 1600,
    (90, 128, "_global_keys_kernel"): 1712,
    (90, 128, "_backward_kernel_keys"): 2112,
    (90, 128, "_backward_kernel_queries_keys"): 376,
}
TILES = (
    "lln",
    "diag",
    "blocks",
    "blocks-global",
    "window",
    "window-global",
    "joint",
    "global",
    "moments",
    "block256",
    "joint-block256",
    "global-block256",
)
VARIANTS = ("dropout", "window-block16", "block16", "joint-dropout", "joint-block16", "global-block16")
# Architecture, head dim, dtype, and the cases of aot_compile.py.
COMPILED = [
    (80, 128, "float16", (*TILES, *VARIANTS)),
    (80, 64, "float16", TILES),
    (80, 128, "bfloat16", ("lln", "block64", "joint-block64", "global", "moments")),
    (90, 128, "float16", TILES),
]
KERNELS = set()
for path in (ROOT / "lln_fairseq/ops/backends/triton").glob("*.py"):
    KERNELS.update(re.findall(r"^@triton\.jit\(.*\)\ndef (\w+_kernel)\(", path.read_text(), re.MULTILINE))
# One kernel computes the gradients of queries, of keys, or of both, under a name for each.
KERNELS.remove("_backward_kernel")
KERNELS.update(f"_backward_kernel_{passes}" for passes in ("queries", "keys", "queries_keys"))


def compile_kernels(arch, dim, dtype, cases):
    """Return the rows that aot_compile.py prints."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    options = ["--dtypes", dtype, "--cases", *cases, "--timeout", "600"]
    command = [sys.executable, SCRIPT, str(arch), str(dim), *options]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert result.returncode == 0, result.stderr[-2000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture(scope="module")
def compiled():
    """Return the rows of all compilations, of which two run at the same time."""
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda arguments: compile_kernels(*arguments), COMPILED))
    return [row for result in results for row in result]


def test_kernels_spill_no_more_than_listed(compiled):
    if version("triton") != PINNED:
        pytest.skip(f"the stack sizes were measured with triton {PINNED}, not {version('triton')}")
    for row in compiled:
        assert row["stack"] <= LARGEST_STACK.get((row["arch"], row["dim"], row["kernel"]), 0), row


def test_shared_memory_fits(compiled):
    assert all(row["shared"] <= SHARED_MEMORY[row["arch"]] for row in compiled)


def test_every_kernel_is_compiled_for_each_architecture_head_dim_and_dtype(compiled):
    assert KERNELS
    for *target, _ in COMPILED:
        kernels = {row["kernel"] for row in compiled if [row["arch"], row["dim"], row["dtype"]] == target}
        assert kernels == KERNELS, target
