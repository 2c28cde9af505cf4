"""Every kernel compiles for sm_80 and sm_90 without a GPU, spills no more than is said here, and fits in shared memory.

`pytest -s tests/ops/backends/test_triton_aot.py` prints the table. float32 is not held to it: three tf32 products for
one need more registers than there are at head dim 128; it runs, slower.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("aot_compile.py")
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}
# Bytes of stack that are accepted for blocks that fit in a tile of 64 tokens, and for longer ones, which are summed
# over tiles in more registers than there are; everything else must be 0. Where registers do not spill, with tiles of
# half and a quarter of the rows, warps repeat each other's work and the instructions are two to four times as many.
STACK = {
    ("_lln_dstate_kernel", 90): (16, 0),
    ("_lln_diag_bwd_kernel", 80): (144, 376),
    ("_lln_diag_bwd_kernel", 90): (48, 528),
    ("_joint_out_kernel", 80): (8, 240),
    ("_joint_out_kernel", 90): (0, 240),
    ("_joint_dq_kernel", 80): (496, 1480),
    ("_joint_dq_kernel", 90): (24, 816),
    ("_joint_dkv_kernel", 80): (0, 448),
    ("_joint_dkv_kernel", 90): (32, 1304),
}


def accepted_stack(row):
    """Of a row of aot_compile.py, whose blocks have the length of the head dim if its case does not say otherwise."""
    block = int(re.search(r"\d*$", row["case"])[0] or row["dim"])
    return STACK.get((row["kernel"], row["arch"]), (0, 0))[block > 64]


@pytest.fixture(scope="module")
def compiled():
    """Rows of aot_compile.py for every architecture, both compiled at once. It gives up on a kernel after 60 s."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    running = [
        subprocess.Popen(
            [sys.executable, SCRIPT, str(arch), "64", "128"],
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


def test_no_more_spills_than_accepted(compiled):
    spilled = {
        (r["kernel"], r["arch"], r["dim"], r["case"], r["dtype"]): r["stack"]
        for r in compiled
        if r["stack"] > accepted_stack(r)
    }
    assert not spilled


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
