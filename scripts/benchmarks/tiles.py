"""Measure which tiles of the Triton kernels are the fastest on this GPU.

    python -m scripts.benchmarks.tiles
    python -m scripts.benchmarks.tiles --kernels state grad_state --dtype bfloat16 --head-dim 128

A tile is the number of tokens that a program of a kernel handles at once, with its warps and the stages of its
pipeline. lln_fairseq/ops/backends/triton/tiles.py names the kernels and has the tiles in use. For each kernel, a call
that launches it runs with every candidate, forward and backward, and only the GPU's own time is measured: the call is
captured in a CUDA graph and replayed, all candidates in turn. Several processes compile the candidates first, which
takes most of the time. A candidate that does not compile, or that needs more shared memory than there is, is left out.
"""

import argparse
import functools
import itertools
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from unittest.mock import patch

import torch

from lln_fairseq.command import run_main
from lln_fairseq.errors import UserError, first_line
from lln_fairseq.ops.backends.triton import plan
from lln_fairseq.ops.backends.triton.launch import HEAD_DIMS
from lln_fairseq.ops.backends.triton.tiles import COLUMNS, LONG_BLOCK, MEASURED_ON_H200, TILES, Tile, select_tile
from lln_fairseq.ops.dispatch import attend
from lln_fairseq.ops.formula import AVERAGE, Inputs, Spec
from lln_fairseq.terminal import at_least_one, program_parser, text_table
from lln_fairseq.timing import interleaved
from scripts.benchmarks.meter import captured, device_name

KERNELS = tuple(TILES)
CANDIDATES = [Tile(*fields) for fields in itertools.product((16, 32, 64, 128), (4, 8), (1, 2, 3))]
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
SHOWN = 5  # of the fastest tiles of a kernel


def spec_with_kernel(kernel: str) -> Spec:
    """Return the spec of a call that launches a kernel of KERNELS, with moment matching unless its form has no LLN.

    The length of the call decides between grad_state, for a single split, and grad_state_splits.
    """
    passes, *form = kernel.removesuffix("_long").split("_")
    block_size = LONG_BLOCK
    if kernel.endswith("_long"):
        block_size = 2 * LONG_BLOCK
    if passes in ("moments", "state", "grad"):
        return Spec(AVERAGE, block_size)
    # Without LLN, the gradients of queries and keys are computed apart only if there are global tokens.
    max_global = 0
    if kernel in ("queries_diag", "keys_diag"):
        max_global = block_size
    return Spec(form[0], block_size, max_global=max_global)


def make_call(kernel: str, length: int, args: argparse.Namespace) -> Callable[[], object]:
    """Return a function that runs the forward and the backward pass of a call that launches this kernel."""
    spec = spec_with_kernel(kernel)
    batch = max(1, args.tokens // length)
    shape = (4, batch, args.heads, length, args.head_dim)
    q, k, v, grad = torch.randn(shape, dtype=DTYPES[args.dtype], device=args.device)
    counts = None
    if spec.max_global:
        counts = torch.full((batch,), spec.max_global, dtype=torch.int64, device=args.device)
    offset = None
    if spec.form == "joint":
        offset = torch.zeros(batch, args.heads, device=args.device)
    for x in (q, k, v):
        x.requires_grad_()
    inputs = Inputs(q, k, v, offset=offset, global_counts=counts)

    def run() -> None:
        for x in (q, k, v):
            x.grad = None
        attend(spec, inputs, "triton").backward(grad)

    return run


@contextmanager
def selected_tile(kernel: str, tile: Tile) -> Iterator[None]:
    """Use a tile for a kernel in all calls that are made inside, with any GPU, dtype and head dimension."""
    forget_plans()
    row = {kernel: (tile,) * len(COLUMNS)}
    with patch.dict(TILES, row), patch.dict(MEASURED_ON_H200, {kernel: tile}):
        yield
    forget_plans()


def forget_plans() -> None:
    """Clear the caches of plans, because a plan contains its tiles."""
    for function in (plan.plan_moments, plan.plan_forward, plan.plan_backward):
        function.cache_clear()


def why_not_compiled(kernel: str, tile: Tile, args: argparse.Namespace) -> str:
    """Run a call with a tile, which compiles it, and return the first line of its error; empty if there is none."""
    try:
        with selected_tile(kernel, tile):
            for length in args.lengths:
                make_call(kernel, length, args)()
        torch.cuda.synchronize()
    except Exception as error:  # whatever Triton, its assembler or the GPU raise
        return first_line(error) or type(error).__name__
    return ""


def time_kernel(kernel: str, tiles: list[Tile], args: argparse.Namespace) -> list[tuple[Tile, list[float]]]:
    """Time whole calls that launch a kernel, with each of the tiles.

    Returns: the tiles with the medians of the GPU's time in ms at each length. The fastest over all lengths is first.
    """
    medians: dict[Tile, list[float]] = {tile: [] for tile in tiles}
    for length in args.lengths:
        runs = {}
        for tile in tiles:
            with selected_tile(kernel, tile):
                replay = captured(make_call(kernel, length, args))
            if replay is None:
                raise UserError(f"a call with the kernel {kernel} cannot be captured in a CUDA graph")
            runs[tile] = replay
        for tile, times in interleaved(runs, args.device, args.repeats).items():
            medians[tile].append(statistics.median(times))
    return sorted(medians.items(), key=lambda item: sum(item[1]))


def benchmark(args: argparse.Namespace) -> None:
    if not torch.cuda.is_available():
        raise UserError("tiles are timed on a GPU, and torch finds none")
    print(f"{device_name(args.device)}, torch {torch.__version__}, {args.dtype}, D = {args.head_dim}")
    context = multiprocessing.get_context("spawn")
    for kernel in args.kernels:
        with ProcessPoolExecutor(args.workers, context) as pool:
            reasons = list(pool.map(functools.partial(why_not_compiled, kernel, args=args), CANDIDATES))
        tiles = [tile for tile, reason in zip(CANDIDATES, reasons, strict=True) if not reason]
        print(
            f"\n{kernel}: {len(tiles)} of {len(CANDIDATES)} tiles run", *sorted({x for x in reasons if x}), sep="\n  "
        )
        used = tile_in_use(kernel, args)
        if used not in tiles:
            tiles.append(used)
        print(kernel_table(used, time_kernel(kernel, tiles, args), args.lengths))


def tile_in_use(kernel: str, args: argparse.Namespace) -> Tile:
    """Return the tile that the package uses for a kernel on this GPU."""
    return select_tile(kernel, torch.device(args.device), DTYPES[args.dtype], args.head_dim)


def kernel_table(used: Tile, rows: list[tuple[Tile, list[float]]], lengths: list[int]) -> str:
    """Return a table of the fastest tiles and of the tile in use, which is marked."""
    cells = [["", "tokens", "warps", "stages", "registers", *(f"N = {length} [ms]" for length in lengths)]]
    for place, (tile, times) in enumerate(rows):
        if place < SHOWN or tile == used:
            mark = "in use" if tile == used else ""
            settings = (tile.rows, tile.warps, tile.stages, tile.registers or "any")
            cells.append([mark, *map(str, settings), *(f"{time:.4f}" for time in times)])
    return text_table(cells)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = program_parser("python -m scripts.benchmarks.tiles", __doc__)
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS, metavar="NAME", help="default: all")
    parser.add_argument("--lengths", nargs="+", type=at_least_one, default=[512, 4096])
    parser.add_argument("--tokens", type=at_least_one, default=32768, help="per batch (default: %(default)s)")
    parser.add_argument("--heads", type=at_least_one, default=12)
    parser.add_argument("--head-dim", type=int, choices=HEAD_DIMS, default=64)
    parser.add_argument("--dtype", choices=DTYPES, default="float16")
    parser.add_argument("--repeats", type=at_least_one, default=20)
    parser.add_argument("--workers", type=at_least_one, default=os.cpu_count(), help="processes that compile")
    parser.set_defaults(device="cuda")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    return run_main(lambda: benchmark(args))


if __name__ == "__main__":
    sys.exit(main())
