"""Every Triton kernel compiles for sm_80 and sm_90 without a GPU, fits in shared memory, and spills as listed here.

`pytest -s tests/ops/backends/test_triton_aot.py` prints the table. It leaves out float32, which runs but spills at head
dim 128: three tf32 products in place of one take more registers than there are.
"""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

pytestmark = pytest.mark.exhaustive
SCRIPT = Path(__file__).with_name("aot_compile.py")
REQUIREMENTS = Path(__file__).parents[3] / "requirements.txt"
PINNED = re.search(r"^triton==([\d.]+)", REQUIREMENTS.read_text(), re.MULTILINE)[1]
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}
# The largest number of bytes of stack, where spilled registers are stored, by architecture, head dim and kernel.
# Kernels that are not listed must not spill. Blocks that take several tiles are summed over them, in more registers
# than there are. Tiles of half or a quarter of the rows would not spill, but their warps repeat each other's work: they
# take two to four times as many instructions.
LARGEST_STACK = {
    (80, 64, "_joint_out_kernel"): 224,
    (80, 64, "_joint_dq_kernel"): 1104,
    (80, 128, "_lln_diag_bwd_kernel"): 288,
    (80, 128, "_joint_out_kernel"): 208,
    (80, 128, "_joint_dq_kernel"): 1480,
    (80, 128, "_joint_dkv_kernel"): 448,
    (90, 64, "_lln_diag_bwd_kernel"): 312,
    (90, 64, "_joint_out_kernel"): 8,
    (90, 64, "_joint_dq_kernel"): 568,
    (90, 64, "_joint_dkv_kernel"): 408,
    (90, 128, "_lln_diag_bwd_kernel"): 528,
    (90, 128, "_joint_out_kernel"): 240,
    (90, 128, "_joint_dq_kernel"): 1488,
    (90, 128, "_joint_dkv_kernel"): 2120,
}
KERNELS = {
    "_lln_state_kernel",
    "_lln_combine_kernel",
    "_lln_out_kernel",
    "_lln_dstate_kernel",
    "_lln_dcombine_kernel",
    "_lln_dkv_kernel",
    "_lln_diag_bwd_kernel",
    "_joint_out_kernel",
    "_joint_dq_kernel",
    "_joint_dstate_kernel",
    "_joint_dkv_kernel",
    "_moments_kernel",
    "_moments_combine_kernel",
}


@pytest.fixture(scope="module")
def compiled():
    """Return the rows of aot_compile.py for every architecture, which are compiled at the same time."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    processes = []
    for arch in SHARED_MEMORY:
        command = [sys.executable, SCRIPT, str(arch), "64", "128", "--timeout", "200"]
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    rows = []
    for process in processes:
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err[-2000:]
        rows += [json.loads(line) for line in out.splitlines()]
    print_table(rows)
    return rows


def print_table(rows):
    print(f"\n{'kernel':24} {'case':14} arch  dim dtype    split warps registers stack shared")
    for row in rows:
        print(
            f"{row['kernel']:24} {row['case']:14} {row['arch']:4} {row['dim']:4} {row['dtype']:8} {row['split']!s:5} "
            f"{row['warps']:5} {row['registers']:9} {row['stack']:5} {row['shared']:6}"
        )


def test_kernels_spill_no_more_than_listed(compiled):
    if version("triton") != PINNED:
        pytest.skip(f"the stack sizes were measured with triton {PINNED}, not {version('triton')}")
    for row in compiled:
        assert row["stack"] <= LARGEST_STACK.get((row["arch"], row["dim"], row["kernel"]), 0), row


def test_shared_memory_fits(compiled):
    assert all(row["shared"] <= SHARED_MEMORY[row["arch"]] for row in compiled)


def test_every_kernel_is_compiled(compiled):
    assert {row["kernel"] for row in compiled} == KERNELS


@pytest.mark.parametrize("arch", SHARED_MEMORY)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_size_is_compiled(compiled, arch, dim, dtype):
    assert any((row["arch"], row["dim"], row["dtype"]) == (arch, dim, dtype) for row in compiled)
