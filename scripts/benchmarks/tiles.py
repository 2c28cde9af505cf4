"""Tries other tiles for the Triton kernels on this GPU and proposes the best as a patch of the table.

    python -m scripts.benchmarks.tiles --minutes 4 --patch runs/tiles.patch

Kernel by kernel: every candidate of rows, warps, stages and registers is put in its place, the whole pass that it
belongs to is timed, and the fastest stays if it gains more than the spread of two measurements of the same tile and its
results are those of the tile that it replaces. Candidates that do not fit the device are skipped. They are compiled
ahead by several processes, into Triton's cache.
"""

import argparse
import difflib
import functools
import itertools
import multiprocessing
import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from lln_fairseq.command import UserError, run_main
from lln_fairseq.data.files import write_bytes
from lln_fairseq.ops.backends.triton import launch
from lln_fairseq.ops.backends.triton.launch import Tile
from scripts.benchmarks import gpu
from scripts.benchmarks.meter import relative_rms

# The pass that each kernel is timed in: mechanism, direction, tokens of a block.
PASSES = {
    "state": ("lln", "forward", 64),
    "out": ("lln", "forward", 64),
    "diag_out": ("lln_diag", "forward", 64),
    "dstate": ("lln", "both", 64),
    "dkv": ("lln", "both", 64),
    "diag_bwd": ("lln_diag", "both", 64),
    "joint_out": ("joint_offset", "forward", 64),
    "joint_dq": ("joint_offset", "both", 64),
    "joint_dkv": ("joint_offset", "both", 64),
    "diag_bwd_long": ("lln_diag", "both", 128),
    "joint_out_long": ("joint_offset", "forward", 128),
    "joint_dq_long": ("joint_offset", "both", 128),
    "joint_dkv_long": ("joint_offset", "both", 128),
}
ROWS, WARPS, STAGES, REGISTERS = (16, 32, 64, 128), (4, 8), (1, 2, 3), (None, 128)
SAME = 1e-2  # largest relative difference of results in half precision, whatever the tile


def candidates(now: Tile) -> list[Tile]:
    """The tiles to try: at most one step of rows from the present one."""
    near = [rows for rows in ROWS if now.rows / 2 <= rows <= 2 * now.rows]
    return [tile for each in itertools.product(near, WARPS, STAGES, REGISTERS) if (tile := Tile(*each)) != now]


def work(kernel: str, args: argparse.Namespace) -> Callable[[], list[torch.Tensor]]:
    """The pass that the kernel belongs to, as a function that gives its results."""
    name, direction, block_size = PASSES[kernel]
    tensors, do, factors = gpu.inputs(max(args.tokens // args.length, 1), args.length, args)
    function = gpu.attention(name, "triton", *factors, block_size)
    return gpu.both(function, tensors, do) if direction == "both" else lambda: [function(*tensors)]


@contextmanager
def tile_in_place(key: tuple[int, int, int], kernel: str, tile: Tile) -> Iterator[None]:
    """While it lasts, the kernel has this tile."""
    before = launch.TILES[key]
    launch.TILES[key] = before._replace(**{kernel: tile})
    try:
        yield
    finally:
        launch.TILES[key] = before


def attempt(key: tuple[int, int, int], kernel: str, args: argparse.Namespace, tile: Tile) -> str | None:
    """Compiles a candidate and runs it once; why it cannot be used, None where it can."""
    try:
        with tile_in_place(key, kernel, tile):
            work(kernel, args)()
            if args.device == "cuda":
                torch.cuda.synchronize()
    except Exception as error:  # whatever Triton, its assembler or the device have against it
        return f"{type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}"
    return None


class Search:
    """The best tiles so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.end = args, time.monotonic() + 60 * args.minutes
        self.cache = gpu.cache_of(args.device)
        sample = torch.empty(1, 1, 1, args.dim, device=args.device, dtype=getattr(torch, args.dtype))
        self.key = launch.tiles_key(sample) if args.device == "cuda" else (90, 2, 64)
        self.found: dict[str, Tile] = {}

    def milliseconds(self, kernel: str) -> float:
        return gpu.milliseconds(work(kernel, self.args), self.args.repeats, self.cache)

    def best_of(self, kernel: str, tiles: list[Tile]) -> None:
        """Times the candidates of one kernel; the best takes its place in the table of this process."""
        now = getattr(launch.TILES[self.key], kernel)
        expected, times = work(kernel, self.args)(), [self.milliseconds(kernel) for _ in range(2)]
        best, best_time, spread = now, min(times), abs(times[0] - times[1])
        for tile in tiles:
            if time.monotonic() > self.end:
                break
            with tile_in_place(self.key, kernel, tile):
                passed = self.milliseconds(kernel)
                if passed < best_time - spread and self.same(work(kernel, self.args)(), expected):
                    best, best_time = tile, passed
        print(f"{kernel}: {tuple(now)} {min(times):.4f} ms (two runs differ by {spread:.4f}) -> "
              f"{tuple(best)} {best_time:.4f} ms, {len(tiles)} candidates", flush=True)  # fmt: skip
        if best != now:
            self.found[kernel] = best
            launch.TILES[self.key] = launch.TILES[self.key]._replace(**{kernel: best})

    @staticmethod
    def same(results: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
        return all(relative_rms(x, y) < SAME for x, y in zip(results, expected, strict=True))

    def all(self) -> None:
        with compilers(self.args.jobs) as run:
            for kernel in self.args.kernels:
                if time.monotonic() > self.end:
                    print(f"{kernel} and those after it: no time left")
                    break
                tiles = candidates(getattr(launch.TILES[self.key], kernel))[: self.args.candidates]
                problems = list(run(functools.partial(attempt, self.key, kernel, self.args), tiles))
                for tile, problem in zip(tiles, problems, strict=True):
                    if problem:
                        print(f"{kernel}: {tuple(tile)} cannot be used: {problem}")
                self.best_of(kernel, [tile for tile, problem in zip(tiles, problems, strict=True) if not problem])


@contextmanager
def compilers(jobs: int) -> Iterator[Callable[..., Iterator[str | None]]]:
    """`map` over so many processes; the built-in one for a single job."""
    if jobs == 1:
        yield map
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool.map


def patch_of(key: tuple[int, int, int], tiles: launch.Tiles) -> str:
    """A patch of launch.py with these tiles in the row of the table."""
    file = Path(launch.__file__)
    source = file.read_text()
    shown = [tuple(tile) if tile.registers else tuple(tile)[:3] for tile in tiles]
    row = f"    {key}: ({', '.join(map(str, shown[:5]))},\n                  {', '.join(map(str, shown[5:]))}),\n"
    new, count = re.subn(rf"^    {re.escape(str(key))}: \(.*?\)\),\n", lambda _: row, source, flags=re.S | re.M)
    if count != 1:
        raise UserError(f"{file} has no row {key} of its own")
    name = "lln_fairseq/ops/backends/triton/launch.py"
    return "".join(difflib.unified_diff(source.splitlines(True), new.splitlines(True), f"a/{name}", f"b/{name}"))


def search(args: argparse.Namespace) -> None:
    run = Search(args)
    run.all()
    if not run.found:
        print("the table's tiles are the fastest that were tried")
        return
    patch = patch_of(run.key, launch.TILES[run.key])
    print(patch)
    if args.patch:
        write_bytes(args.patch, patch.encode())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmarks.tiles", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--kernels", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument("--minutes", type=float, default=4.0, help="when to stop (default: %(default)s)")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=32768, help="in a batch")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--alpha", type=float, default=1.4)
    parser.add_argument("--dtype", choices=gpu.LARGEST_ERROR, default="float16")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: interpreted, as a trial")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--candidates", type=int, default=100, help="of a kernel at most")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile")
    parser.add_argument("--patch", type=Path, help="write the patch here")
    args = parser.parse_args(argv)
    return run_main(lambda: search(args))


if __name__ == "__main__":
    sys.exit(main())
