"""What the compiled kernels promise on a GPU that is not there: registers, resident warps, bytes, instructions, time.

    python -m scripts.gpu.predict --arch 90 --dims 64 128

Every kernel that walks over the tokens is compiled for the architecture (scripts/gpu/ahead.py) at the shape of the GPU
benchmark, and its machine code is counted, loops as often as they run. Columns:

    warps, waves   that a multiprocessor holds at a time, of 64; rounds of programs until all have run
    MB             the tensors of B H N D that it reads or writes, each once
    instr/byte     of a warp
    memory, issue, MUFU   microseconds at the device's copy bandwidth, at one instruction a cycle of each scheduler, and
                   for exponentials at 16 lanes a cycle of a multiprocessor
    of floor       memory / the largest of the three, times what the last wave fills on the mean; if there is only one,
                   what a multiprocessor has to do on the mean beside the busiest

No latency is in it: a kernel with few resident warps can be slower than this.
"""

import argparse
import math
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from lln_fairseq.command import UserError, run_main
from lln_fairseq.ops.autograd import mixture
from lln_fairseq.ops.backends import Mixture
from scripts.columns import aligned


class Device(NamedTuple):
    """A GPU's figures: bytes/s of a copy and clock as measured or published, shared memory of a multiprocessor."""

    name: str
    multiprocessors: int
    clock: float
    bandwidth: float
    shared: int


DEVICES = {
    80: Device("A100", 108, 1.41e9, 1.7e12, 164 * 1024),
    90: Device("H100", 132, 1.75e9, 3.0e12, 228 * 1024),
}
REGISTERS, WARPS, PROGRAMS, SCHEDULERS, EXPONENTIALS = 65536, 64, 32, 4, 16  # of a multiprocessor
MIXES = {
    "lln": lambda block, like: Mixture(1.0, 0.0),
    "lln_diag": lambda block, like: Mixture(0.5, 0.5, block, 0.0, None),
    "joint_offset": lambda block, like: Mixture(1.0, 1.0, block, 0.0, None, joint=True, parameter=like),
}


class Shape(NamedTuple):
    batch: int
    heads: int
    length: int
    dim: int
    block: int


def dynamic_count(code: Sequence[tuple[int, str]], trips: Sequence[int]) -> tuple[int, int]:
    """Instructions, and exponentials among them, that a warp executes; loops of depth d run trips[d] times."""
    place = {address: number for number, (address, _) in enumerate(code)}
    times = [1] * len(code)
    loops = []
    for number, (address, text) in enumerate(code):
        target = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
        if target and int(target[1], 16) < address and int(target[1], 16) in place:
            loops.append((place[int(target[1], 16)], number))
    for first, last in loops:
        depth = sum(a <= first and last <= b and (a, b) != (first, last) for a, b in loops)
        for number in range(first, last + 1):
            times[number] *= trips[min(depth, len(trips) - 1)]
    exponentials = sum(t for t, (_, text) in zip(times, code, strict=True) if "MUFU" in text)
    return sum(times), exponentials


def resident_programs(registers: int, warps: int, shared: int, device: Device) -> int:
    """Programs that a multiprocessor holds at a time."""
    by_registers = REGISTERS // (8 * math.ceil(registers / 8) * 32 * warps)
    by_shared = device.shared // (shared + 1024) if shared else PROGRAMS
    return min(by_registers, by_shared, WARPS // warps, PROGRAMS)


def row(found: dict[str, Any], device: Device, shape: Shape) -> list[str]:
    """A line of the table for one launch."""
    programs = math.prod(found["grid"])
    rows, tokens = found["rows"], shape.batch * shape.heads * shape.length / programs
    trips = [max(1, round(tokens / rows)), max(1, shape.block // rows)]
    executed, exponentials = dynamic_count(found["code"], trips)
    resident = resident_programs(found["registers"], found["warps"], found["shared"], device)
    waves = programs / (device.multiprocessors * resident)
    executed, exponentials = (count * programs * found["warps"] for count in (executed, exponentials))
    memory = found["bytes"] / device.bandwidth
    issue = executed / (device.multiprocessors * SCHEDULERS * device.clock)
    slow = exponentials * 32 / (device.multiprocessors * EXPONENTIALS * device.clock)
    share = waves if waves > 1 else programs / device.multiprocessors
    of_floor = memory / max(memory, issue, slow) * share / math.ceil(share)
    times = [f"{1e6 * x:.0f}" for x in (memory, issue, slow)]
    return [found["name"], str(shape.dim), str(found["registers"]), f"{found['shared'] / 1024:.0f}",
            str(resident * found["warps"]), f"{waves:.1f}", f"{found['bytes'] / 1e6:.0f}",
            f"{executed / found['bytes']:.2f}", *times, f"{of_floor:.2f}"]  # fmt: skip


HEADS = ["", "D", "registers", "shared KB", "warps", "waves", "MB", "instr/byte", "memory", "issue", "MUFU", "of floor"]


def launches(arch: int, shape: Shape, mechanism: str) -> tuple[list[dict[str, Any]], int]:
    """What a forward and backward pass would launch, the kernels that combine splits left out (they are small), and how
    many launches there are with them."""
    from scripts.gpu.ahead import compile_only, instructions, resources  # the driver stays in this process

    found: list[dict[str, Any]] = []
    combining: list[str] = []
    large = shape.batch * shape.heads * shape.length * shape.dim

    def compiled(name: str, kernel: Any, grid: Any, positional: tuple, keywords: dict[str, Any]) -> None:
        if "combine" in name:
            return combining.append(name)
        tensors = [x for x in positional if isinstance(x, torch.Tensor) and x.numel() >= large]
        found.append(
            {"name": name, **resources(kernel), "shared": kernel.metadata.shared, "warps": kernel.metadata.num_warps,
             "grid": grid, "rows": keywords["ROWS"], "code": instructions(kernel),
             "bytes": sum(x.numel() * x.element_size() for x in tensors)}
        )  # fmt: skip

    compile_only(arch, compiled)
    size = (shape.batch, shape.length, shape.heads, shape.dim)
    q, k, v = (torch.empty(size, dtype=torch.float16).transpose(1, 2).requires_grad_() for _ in range(3))
    alpha, beta = torch.empty(2, shape.batch, shape.heads)
    out = mixture(q, k, v, alpha, beta, None, MIXES[mechanism](shape.block, alpha), "triton")
    out.backward(torch.empty_like(out))
    return found, len(found) + len(combining)


def predict(args: argparse.Namespace) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise UserError("TRITON_INTERPRET=1 interprets the kernels: unset it, so that they are compiled")
    device = DEVICES[args.arch]
    print(f"sm_{args.arch}, as on the {device.name}: {device.multiprocessors} multiprocessors, "
          f"{device.clock / 1e9:.2f} GHz, {device.bandwidth / 1e12:.1f} TB/s; float16, {args.tokens} tokens, "
          f"N = {args.length}, H = {args.heads}, blocks of {args.block}")  # fmt: skip
    for mechanism in args.mechanisms:
        for dim in args.dims:
            shape = Shape(max(args.tokens // args.length, 1), args.heads, args.length, dim, args.block)
            found, count = launches(args.arch, shape, mechanism)
            rows = [row(each, device, shape) for each in found]
            print(f"\n{aligned([[mechanism, *HEADS[1:]], *rows])}\n{count} launches forward and backward", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu.predict", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--arch", type=int, choices=DEVICES, default=90)
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--mechanisms", nargs="+", choices=MIXES, default=list(MIXES))
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=32768, help="in a batch")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--block", type=int, default=64)
    args = parser.parse_args(argv)
    return run_main(lambda: predict(args))


if __name__ == "__main__":
    sys.exit(main())
