"""Every kernel compiles for sm_80 and sm_90 without a GPU, spills what is listed here, and fits in shared memory.

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
# Bytes of stack, where spilled registers live, by (architecture, head dim, kernel) and case of aot_compile.py; what is
# not here must be 0. Blocks that need several tiles are summed over them in more registers than there are. With tiles
# of half and a quarter of the rows, where nothing spills, warps repeat each other's work: two to four times as many
# instructions.
SPILLED = {
    (80, 64, "_joint_out_kernel"): {"joint-dropout": 8, "joint-block16": 8, "joint-block256": 224},
    (80, 64, "_joint_dq_kernel"): {
        "joint": 104, "joint-dropout": 144, "joint-block16": 192, "joint-block256": 1104,
    },
    (80, 128, "_lln_diag_bwd_kernel"): {"diag": 104, "dropout": 208, "block256": 288},
    (80, 128, "_joint_out_kernel"): {
        "joint": 128, "joint-dropout": 208, "joint-block256": 128, "joint-block64": 16,
    },
    (80, 128, "_joint_dq_kernel"): {
        "joint": 1256, "joint-dropout": 1392, "joint-block16": 408, "joint-block256": 1480,
        "joint-block64": 80,
    },
    (80, 128, "_joint_dkv_kernel"): {"joint": 312, "joint-dropout": 448, "joint-block256": 448},
    (90, 64, "_lln_diag_bwd_kernel"): {"block256": 312},
    (90, 64, "_joint_out_kernel"): {"joint-block256": 8},
    (90, 64, "_joint_dq_kernel"): {"joint-block16": 24, "joint-block256": 568},
    (90, 64, "_joint_dkv_kernel"): {"joint-dropout": 32, "joint-block256": 408},
    (90, 128, "_lln_diag_bwd_kernel"): {
        "diag": 256, "dropout": 528, "block16": 48, "block256": 392, "block64": 48,
    },
    (90, 128, "_joint_out_kernel"): {"joint": 168, "joint-dropout": 240, "joint-block256": 240},
    (90, 128, "_joint_dq_kernel"): {
        "joint": 848, "joint-dropout": 1088, "joint-block16": 16, "joint-block256": 1488,
    },
    (90, 128, "_joint_dkv_kernel"): {
        "joint": 408, "joint-dropout": 904, "joint-block16": 24, "joint-block256": 2120,
        "joint-block64": 8,
    },
}  # fmt: skip


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


def test_what_spills_is_what_is_listed(compiled):
    if version("triton") != PINNED:
        pytest.skip(f"the bytes are those of triton {PINNED}, not {version('triton')}")
    listed = {(*place, case): stack for place, cases in SPILLED.items() for case, stack in cases.items()}
    found = {(*place, "not compiled"): 0 for place in listed}
    for r in compiled:
        place = r["arch"], r["dim"], r["kernel"], r["case"]
        found.pop((*place, "not compiled"), None)
        found[*place, r["dtype"]] = max(found.get((*place, r["dtype"]), 0), r["stack"])
    wrong = [
        f"sm_{place[0]}, D = {place[1]}, {', '.join(place[2:])}: {stack} bytes, {listed.get(place[:4], 0)} are listed"
        for place, stack in sorted(found.items())
        if stack != listed.get(place[:4], 0)
    ]
    assert not wrong, "\n".join(wrong)


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
