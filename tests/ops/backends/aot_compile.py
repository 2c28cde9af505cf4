"""Compile every kernel for an architecture without a GPU and print registers, stack and shared memory as JSON lines.

    python tests/ops/backends/aot_compile.py ARCH [DIM ...] [--dtypes float16 ...] [--cases NAME ...] [--timeout S]

The host code runs as it does on a GPU, on CPU tensors, with a driver that only names the architecture: what is compiled
is exactly what would be launched, specialisation of strides and pointers included. Run it as its own process, without
TRITON_INTERPRET: the driver stays.
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

from lln_fairseq.ops.autograd import hybrid_attention
from lln_fairseq.ops.backends import HybridSpec
from lln_fairseq.ops.backends import triton as backend
from lln_fairseq.ops.backends.triton import launch


class NamedDriver:
    """The part of a triton driver that compilation asks for."""

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


def compile_only(arch, compiled, timeout):
    """From now on a launch compiles and calls `compiled(name, kernel, keywords)`.

    A kernel that takes longer than `timeout` seconds ends the process.
    """
    driver.set_active(NamedDriver(arch))
    launch.capability = lambda device: arch
    original = JITFunction.run

    def run(self, *positional, grid, warmup, **keywords):
        print("compiling", self.__name__, file=sys.stderr, flush=True)
        signal.alarm(timeout)
        kernel = original(self, *positional, grid=grid, warmup=True, **keywords)
        signal.alarm(0)
        compiled(self.__name__, kernel, keywords)
        return kernel

    JITFunction.run = run


def resources(kernel):
    """Registers of a thread and bytes of stack. Spilled registers live on the stack: 0 bytes say that none did."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"Function (?!\$).*?:\s*REG:(\d+) STACK:(\d+)", text)
    return {"registers": int(found[1]), "stack": int(found[2])}


def cases(dim, dtype):
    """name -> function that launches kernels: long sequences take several splits, short ones a single one."""

    def inputs(length):
        q, k, v = torch.empty(3, 2, 3, length, dim, dtype=dtype).requires_grad_()
        alpha, beta = torch.empty(2, 2, 3).requires_grad_()
        return q, k, v, alpha, beta, torch.zeros(2, length, dtype=torch.bool)

    def lln(length):
        out = hybrid_attention(*inputs(length), HybridSpec(1.0, 0.0), "triton")
        out.backward(torch.empty_like(out))

    def diag(length, block_size, dropout=0.0):
        seed = torch.ones(1, dtype=torch.int64) if dropout else None
        out = hybrid_attention(*inputs(length), HybridSpec(0.5, 0.5, block_size, dropout, seed), "triton")
        out.backward(torch.empty_like(out))

    def joint(length, block_size, dropout=0.0):
        seed = torch.ones(1, dtype=torch.int64) if dropout else None
        mix = HybridSpec(1.0, 1.0, block_size, dropout, seed, joint=True, parameter=torch.empty(2, 3))
        out = hybrid_attention(*inputs(length), mix, "triton")
        out.backward(torch.empty_like(out))

    def moments(length):
        q, k, _, _, _, mask = inputs(length)
        backend.match_moments(q, k, mask, (torch.arange(64.0), torch.arange(64.0)))

    found = {
        "lln": lambda: (lln(512), lln(8192)),
        "diag": lambda: (diag(512, dim), diag(8192, dim)),
        "joint": lambda: (joint(512, dim), joint(8192, dim)),
        "moments": lambda: (moments(512), moments(8192)),
    }
    if dtype != torch.bfloat16:  # nearly the same registers as float16
        found["dropout"] = lambda: diag(512, dim, 0.1)
        found["block16"] = lambda: diag(512, 16)
        found["block256"] = lambda: diag(512, 256)
        found["joint-dropout"] = lambda: joint(512, dim, 0.1)
        found["joint-block16"] = lambda: joint(512, 16)
        found["joint-block256"] = lambda: joint(512, 256)
    elif dim != 64:
        found["block64"] = lambda: (diag(512, 64), diag(8192, 64))
        found["joint-block64"] = lambda: (joint(512, 64), joint(8192, 64))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arch", type=int)
    parser.add_argument("dims", type=int, nargs="*", default=[64, 128])
    parser.add_argument("--dtypes", nargs="+", default=["float16", "bfloat16"])
    parser.add_argument("--cases", nargs="+")
    parser.add_argument(
        "--timeout", type=int, default=60, help="seconds for one kernel; the process dies when it is over"
    )
    args = parser.parse_args()

    seen = set()

    def compiled(name, kernel, keywords):
        if kernel.hash in seen:
            return
        seen.add(kernel.hash)
        row = {"kernel": name, "arch": args.arch, **where, "warps": kernel.metadata.num_warps}
        row |= resources(kernel) | {"shared": kernel.metadata.shared, "split": not keywords.get("FINAL", True)}
        print(json.dumps(row), flush=True)

    compile_only(args.arch, compiled, args.timeout)
    for dtype in args.dtypes:
        for dim in args.dims:
            for name, run_case in cases(dim, getattr(torch, dtype)).items():
                if args.cases is None or name in args.cases:
                    where = {"dim": dim, "dtype": dtype, "case": name}
                    run_case()


if __name__ == "__main__":
    main()
