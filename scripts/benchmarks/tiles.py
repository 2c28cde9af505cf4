"""Try other tiles for the Triton kernels on this GPU and print the fastest.

    python -m scripts.benchmarks.tiles
    python -m scripts.benchmarks.tiles --kernels dkv diag_bwd --dim 128

A tile is the number of rows, warps, stages and registers of a kernel (see lln_fairseq/ops/backends/triton/launch.py).
Each candidate replaces the current tile, and the pass that runs the kernel is timed: a forward pass, or a forward and a
backward pass. The fastest tile stays in place while the following kernels are timed. Candidates that fail or change the
results are rejected.
"""

import argparse
import statistics
import sys

import torch
from torch import Tensor

from lln_fairseq.command import UserError, run_main
from lln_fairseq.ops.backends.triton import launch
from lln_fairseq.ops.backends.triton.launch import Tile
from lln_fairseq.ops.lln import lln_attention, lln_diag_attention
from scripts.benchmarks.meter import milliseconds, relative_rms
from scripts.terminal import program_parser

# For each kernel, the pass in which it is timed: mix (None: LLN without blocks), True to run backward too, block size.
PASSES = {
    "state": (None, False, 64),
    "out": (None, False, 64),
    "diag_out": ("average", False, 64),
    "dstate": (None, True, 64),
    "dkv": (None, True, 64),
    "diag_bwd": ("average", True, 64),
    "joint_out": ("joint_offset", False, 64),
    "joint_dq": ("joint_offset", True, 64),
    "joint_dkv": ("joint_offset", True, 64),
    "diag_bwd_long": ("average", True, 128),
    "joint_out_long": ("joint_offset", False, 128),
    "joint_dq_long": ("joint_offset", True, 128),
    "joint_dkv_long": ("joint_offset", True, 128),
}
ALPHA = 1.4
LARGEST_DIFFERENCE = 1e-2  # relative; half precision differs by less than this from tile to tile


def run_pass(kernel: str, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Run the pass in which a kernel is timed.

    Args:
        kernel: a key of PASSES.
        q: the queries, (B, H, N, D).
        k: the keys, (B, H, N, D).
        v: the values, (B, H, N, D).

    Returns:
        A list of the output and, if the pass includes a backward pass, the gradients of q, k and v.
    """
    mix, backward, block_size = PASSES[kernel]
    if mix is None:
        out = lln_attention(q, k, v, ALPHA, ALPHA, backend="triton")
    else:
        out = lln_diag_attention(q, k, v, ALPHA, ALPHA, block_size=block_size, mix=mix, backend="triton")
    if not backward:
        return [out]
    return [out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))]


def candidate_tiles(current: Tile) -> list[Tile]:
    """Return the tiles to try, without the current one.

    They have half, the same or twice the number of rows, between 16 and 128, and several numbers of warps and stages.
    """
    tiles = []
    for rows in (current.rows // 2, current.rows, 2 * current.rows):
        for warps in (4, 8):
            for stages in (1, 2, 3):
                tiles.append(Tile(rows, warps, stages, current.registers))
    return [tile for tile in tiles if 16 <= tile.rows <= 128 and tile != current]


def find_best_tile(key: tuple[int, int, int], kernel: str, inputs: list[Tensor], repeats: int) -> Tile:
    """Time the current tile of a kernel and the candidates, print the result, and return the fastest tile.

    In this process, launch.TILES is changed in place to the fastest tile.

    Args:
        key: key of launch.TILES.
        kernel: a field of launch.Tiles.
        inputs: q, k and v, each (B, H, N, D), which require gradients.
        repeats: number of timed passes; tiles are compared by their medians.
    """
    current = getattr(launch.TILES[key], kernel)
    expected = run_pass(kernel, *inputs)
    times: dict[Tile, float] = {}
    for tile in (current, *candidate_tiles(current)):
        launch.TILES[key] = launch.TILES[key]._replace(**{kernel: tile})
        try:
            results = run_pass(kernel, *inputs)
            repeated = [milliseconds(lambda: run_pass(kernel, *inputs), inputs[0].device.type) for _ in range(repeats)]
        except Exception as error:  # Triton, its assembler or the device cannot run the tile
            print(f"{kernel}: {tuple(tile)} fails: {type(error).__name__}", flush=True)
            continue
        if any(relative_rms(x, y) > LARGEST_DIFFERENCE for x, y in zip(results, expected, strict=True)):
            print(f"{kernel}: {tuple(tile)} changes the results", flush=True)
            continue
        times[tile] = statistics.median(repeated)
    best = min(times, key=times.__getitem__)
    launch.TILES[key] = launch.TILES[key]._replace(**{kernel: best})
    print(f"{kernel}: {tuple(current)} {times[current]:.4f} ms, fastest {tuple(best)} {times[best]:.4f} ms", flush=True)
    return best


def search(args: argparse.Namespace) -> None:
    """Find the best tiles of all requested kernels. Raise UserError if the kernels do not run on the device."""
    batch = args.tokens // args.length
    q = torch.empty(batch, args.heads, args.length, args.dim, device=args.device, dtype=torch.float16)
    if reason := launch.is_supported(q):
        raise UserError(reason)
    inputs = [torch.randn_like(q).requires_grad_() for _ in range(3)]
    for kernel in args.kernels:
        find_best_tile(launch.tiles_key(q), kernel, inputs, args.repeats)


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = program_parser("python -m scripts.benchmarks.tiles", __doc__)
    parser.add_argument("--kernels", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=32768, help="tokens per batch (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a trial in the interpreter")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args(argv)
    return run_main(lambda: search(args))


if __name__ == "__main__":
    sys.exit(main())
