"""Every kernel compiles for sm_80 and sm_90 without a GPU, fits in shared memory, and spills no more than listed here.

`pytest -s tests/ops/backends/test_triton_aot.py` prints the table. float32 is not held to it: three tf32 products for
one need more registers than there are at head dim 128; it runs, slower.
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
# The largest number of bytes of stack, where spilled registers live, by architecture, head dim and kernel; what is not
# here must be 0. Blocks that need several tiles are summed over them in more registers than there are. With tiles of
# half and a quarter of the rows, where nothing spills, warps repeat each other's work: two to four times as many
# instructions.
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


@pytest.fixture(scope="module")
def compiled():
    """Rows of aot_compile.py for every architecture, both compiled at once."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    running = [
        subprocess.Popen(
            [sys.executable, SCRIPT, str(arch), "64", "128", "--timeout", "200"],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for arch in SHARED_MEMORY
    ]  # fmt: skip
    rows = []
    for process in running:
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err[-2000:]
        rows += [json.loads(line) for line in out.splitlines()]
    print(f"\n{'kernel':24} {'case':14} arch  dim dtype    split warps registers stack shared")
    for r in rows:
        print(
            f"{r['kernel']:24} {r['case']:14} {r['arch']:4} {r['dim']:4} {r['dtype']:8} {r['split']!s:5} "
            f"{r['warps']:5} {r['registers']:9} {r['stack']:5} {r['shared']:6}"
        )
    return rows


def test_no_kernel_spills_more_than_is_listed(compiled):
    if version("triton") != PINNED:
        pytest.skip(f"the bytes are those of triton {PINNED}, not {version('triton')}")
    for row in compiled:
        assert row["stack"] <= LARGEST_STACK.get((row["arch"], row["dim"], row["kernel"]), 0), row


def test_shared_memory_fits(compiled):
    assert all(r["shared"] <= SHARED_MEMORY[r["arch"]] for r in compiled)


def test_every_kernel_was_compiled(compiled):
    names = {r["kernel"] for r in compiled}
    assert names == {
        "_lln_state_kernel", "_lln_combine_kernel", "_lln_out_kernel", "_lln_dstate_kernel", "_lln_dcombine_kernel",
        "_lln_dkv_kernel", "_lln_diag_bwd_kernel", "_joint_out_kernel", "_joint_dq_kernel",
        "_joint_dstate_kernel", "_joint_dkv_kernel", "_moments_kernel", "_moments_combine_kernel",
    }  # fmt: skip
    assert {(r["arch"], r["dim"], r["dtype"]) for r in compiled} == {
        (arch, dim, dtype) for arch in SHARED_MEMORY for dim in (64, 128) for dtype in ("float16", "bfloat16")
    }
