"""Compile every kernel for an architecture without a GPU and print registers, stack and shared memory as JSON lines.

    python tests/ops/backends/aot_compile.py ARCH [DIM ...] [--dtypes float16 ...] [--cases NAME ...] [--timeout S]

See scripts/gpu/ahead.py. Run it as its own process, without TRITON_INTERPRET.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from lln_fairseq.ops.autograd import mixture
from lln_fairseq.ops.backends import Mixture
from lln_fairseq.ops.backends import triton as backend
from scripts.gpu.ahead import compile_only, resources


def cases(dim, dtype):
    """name -> function that launches kernels: long sequences take several splits, short ones a single one."""

    def inputs(length):
        q, k, v = torch.empty(3, 2, 3, length, dim, dtype=dtype).requires_grad_()
        alpha, beta = torch.empty(2, 2, 3).requires_grad_()
        return q, k, v, alpha, beta, torch.zeros(2, length, dtype=torch.bool)

    def lln(length):
        out = mixture(*inputs(length), Mixture(1.0, 0.0), "triton")
        out.backward(torch.empty_like(out))

    def diag(length, block_size, dropout=0.0):
        seed = torch.ones(1, dtype=torch.int64) if dropout else None
        out = mixture(*inputs(length), Mixture(0.5, 0.5, block_size, dropout, seed), "triton")
        out.backward(torch.empty_like(out))

    def joint(length, block_size, dropout=0.0):
        seed = torch.ones(1, dtype=torch.int64) if dropout else None
        mix = Mixture(1.0, 1.0, block_size, dropout, seed, joint=True, parameter=torch.empty(2, 3))
        out = mixture(*inputs(length), mix, "triton")
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

    def compiled(name, kernel, grid, positional, keywords):
        if kernel.hash in seen:
            return
        seen.add(kernel.hash)
        row = {"kernel": name, "arch": args.arch, **where, "warps": kernel.metadata.num_warps}
        row |= resources(kernel) | {"shared": kernel.metadata.shared, "split": not keywords.get("FINAL", True)}
        print(json.dumps(row), flush=True)

    compile_only(args.arch, compiled, args.timeout)
    for dtype in args.dtypes:
        for dim in args.dims:
            for name, launch in cases(dim, getattr(torch, dtype)).items():
                if args.cases is None or name in args.cases:
                    where = {"dim": dim, "dtype": dtype, "case": name}
                    launch()


if __name__ == "__main__":
    main()
