"""Compile every Triton kernel for an architecture without a GPU and print their resources as JSON lines.

    python tests/ops/backends/aot_compile.py ARCH [DIM ...] [--dtypes float16 ...] [--cases NAME ...] [--timeout S]

A line holds the registers, the stack and the shared memory of a kernel. The host code runs on CPU tensors as it does on
a GPU, with a driver that only names the architecture. So exactly those kernels are compiled that would be launched,
with the same specialization of strides and pointers. Run it as its own process and without TRITON_INTERPRET, because
the driver cannot be replaced again.
"""

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from lln_fairseq.ops.backends import triton as backend
from lln_fairseq.ops.backends.triton import tiles
from lln_fairseq.ops.dispatch import attend
from lln_fairseq.ops.formula import AVERAGE, DIAG, JOINT, LLN, Inputs, Spec


class CompileOnlyDriver:
    """The part of a Triton driver that compilation needs."""

    def __init__(self, arch):
        self.arch = arch

    def get_current_target(self):
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


def compile_only(arch, report, timeout):
    """Make every later launch of a kernel compile it and call `report(name, kernel)` in place of running it.

    A kernel that takes longer than `timeout` seconds ends the process.
    """
    driver.set_active(CompileOnlyDriver(arch))
    tiles.capability = lambda device: arch
    original = JITFunction.run

    def run(self, *positional, grid, warmup, **keywords):
        print("compiling", self.__name__, file=sys.stderr, flush=True)
        signal.alarm(timeout)
        kernel = original(self, *positional, grid=grid, warmup=True, **keywords)
        signal.alarm(0)
        report(kernel.name, kernel)  # and return None, so that no launch calls the compiled kernel

    JITFunction.run = run


def resources(kernel):
    """Return the registers of a thread and the bytes of its stack, which is where spilled registers are stored."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = re.search(r"Function (?!\$).*?:\s*REG:(\d+) STACK:(\d+)", text)
    return {"registers": int(usage[1]), "stack": int(usage[2])}


def inputs(length, dim, dtype):
    """Return q, k, v, α, β that need gradients, and a mask without padding."""
    q, k, v = torch.empty(3, 2, 3, length, dim, dtype=dtype).requires_grad_()
    alpha, beta = torch.empty(2, 2, 3).requires_grad_()
    return q, k, v, alpha, beta, torch.zeros(2, length, dtype=torch.bool)


def cases(dim, dtype):
    """Return functions that launch kernels, by name: long sequences take several splits, short ones a single one."""

    def run_forward_and_backward(length, spec, offset=None):
        q, k, v, alpha, beta, padding = inputs(length, dim, dtype)
        seed = torch.ones(1, dtype=torch.int64) if spec.dropout else None
        counts = torch.ones(2, dtype=torch.int64) if spec.max_global else None
        out = attend(spec, Inputs(q, k, v, alpha, beta, offset, padding, counts, seed), "triton")
        out.backward(torch.empty_like(out))

    def lln(*lengths):
        for length in lengths:
            run_forward_and_backward(length, Spec(LLN))

    def blocks(*lengths, block_size=dim, **options):
        for length in lengths:
            run_forward_and_backward(length, Spec(DIAG, block_size, **options))

    def diag(*lengths, block_size=dim, dropout=0.0):
        for length in lengths:
            run_forward_and_backward(length, Spec(AVERAGE, block_size, dropout))

    def joint(*lengths, block_size=dim, dropout=0.0, max_global=0):
        for length in lengths:
            offset = torch.empty(2, 3).requires_grad_()
            run_forward_and_backward(length, Spec(JOINT, block_size, dropout, max_global=max_global), offset)

    def moments(*lengths):
        for length in lengths:
            q, k, _, _, _, mask = inputs(length, dim, dtype)
            backend.match_moments(q, k, mask, (torch.arange(64.0), torch.arange(64.0)))

    functions = {
        "lln": lambda: lln(512, 8192),
        "diag": lambda: diag(512, 8192),
        "joint": lambda: joint(512, 8192),
        "global": lambda: joint(512, max_global=32),
        "blocks": lambda: blocks(512),
        "blocks-global": lambda: blocks(512, max_global=32),
        "window": lambda: blocks(512, neighbors=1),
        "window-global": lambda: blocks(512, neighbors=1, max_global=32),
        "moments": lambda: moments(512, 8192),
    }
    if dtype != torch.bfloat16:  # which takes nearly the same registers as float16
        functions["dropout"] = lambda: diag(512, dropout=0.1)
        functions["window-block16"] = lambda: blocks(512, block_size=16, neighbors=1, dropout=0.1)
        functions["block16"] = lambda: diag(512, block_size=16)
        functions["block256"] = lambda: diag(512, block_size=256)
        functions["joint-dropout"] = lambda: joint(512, dropout=0.1)
        functions["joint-block16"] = lambda: joint(512, block_size=16)
        functions["joint-block256"] = lambda: joint(512, block_size=256)
        functions["global-block16"] = lambda: joint(512, block_size=16, max_global=32)
        functions["global-block256"] = lambda: joint(512, block_size=256, max_global=32)
    elif dim != 64:
        functions["block64"] = lambda: diag(512, 8192, block_size=64)
        functions["joint-block64"] = lambda: joint(512, 8192, block_size=64)
    return functions


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arch", type=int)
    parser.add_argument("dims", type=int, nargs="*", default=[64, 128])
    parser.add_argument("--dtypes", nargs="+", default=["float16", "bfloat16"])
    parser.add_argument("--cases", nargs="+", help="default: all")
    parser.add_argument("--timeout", type=int, default=60, help="seconds for one kernel, after which the process ends")
    args = parser.parse_args()

    printed = set()

    def print_resources(name, kernel):
        if kernel.hash in printed:
            return
        printed.add(kernel.hash)
        row = {"kernel": name, "arch": args.arch, **current_case, **resources(kernel)}
        row["shared"] = kernel.metadata.shared
        print(json.dumps(row), flush=True)

    compile_only(args.arch, print_resources, args.timeout)
    for dtype in args.dtypes:
        for dim in args.dims:
            for name, run_case in cases(dim, getattr(torch, dtype)).items():
                if args.cases is None or name in args.cases:
                    current_case = {"dim": dim, "dtype": dtype, "case": name}
                    run_case()


if __name__ == "__main__":
    main()
