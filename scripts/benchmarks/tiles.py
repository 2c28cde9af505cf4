"""Tries other tiles for the Triton kernels on this GPU and prints the fastest.

    python -m scripts.benchmarks.tiles
    python -m scripts.benchmarks.tiles --kernels dkv diag_bwd --dim 128

A tile is rows, warps, stages and registers of a kernel, see lln_fairseq/ops/backends/triton/launch.py. Each candidate
takes the place of the one in use, and the forward or backward pass that the kernel belongs to is timed. The fastest
stays for the kernels after it. A candidate that fails or changes the results is left out.
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

# The pass that each kernel is timed in: the mix (None: LLN alone), whether backward, and the tokens of a block.
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
LARGEST_DIFFERENCE = 1e-2  # relative, of results in half precision by different tiles


def run_pass(kernel: str, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Run the pass that a kernel belongs to and return its output and gradients."""
    mix, backward, block_size = PASSES[kernel]
    if mix is None:
        out = lln_attention(q, k, v, ALPHA, ALPHA, backend="triton")
    else:
        out = lln_diag_attention(q, k, v, ALPHA, ALPHA, block_size=block_size, mix=mix, backend="triton")
    if not backward:
        return [out]
    return [out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))]


def candidates(current: Tile) -> list[Tile]:
    """Return the tiles to try, which have half, as many or twice as many rows."""
    found = []
    for rows in (current.rows // 2, current.rows, 2 * current.rows):
        for warps in (4, 8):
            for stages in (1, 2, 3):
                found.append(Tile(rows, warps, stages, current.registers))
    return [tile for tile in found if 16 <= tile.rows <= 128 and tile != current]


def best_tile(key: tuple[int, int, int], kernel: str, inputs: list[Tensor], repeats: int) -> Tile:
    """Time the tile in use and the candidates, and leave the fastest in the table of this process."""
    current = getattr(launch.TILES[key], kernel)
    expected = run_pass(kernel, *inputs)
    times: dict[Tile, float] = {}
    for tile in (current, *candidates(current)):
        launch.TILES[key] = launch.TILES[key]._replace(**{kernel: tile})
        try:
            results = run_pass(kernel, *inputs)
            repeated = [milliseconds(lambda: run_pass(kernel, *inputs), inputs[0].device.type) for _ in range(repeats)]
        except Exception as error:  # Triton, its assembler or the device cannot do it
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
    q = torch.empty(
        args.tokens // args.length, args.heads, args.length, args.dim, device=args.device, dtype=torch.float16
    )
    if reason := launch.is_supported(q):
        raise UserError(reason)
    inputs = [torch.randn_like(q).requires_grad_() for _ in range(3)]
    for kernel in args.kernels:
        best_tile(launch.tiles_key(q), kernel, inputs, args.repeats)


def main(argv: list[str] | None = None) -> int:
    parser = program_parser("python -m scripts.benchmarks.tiles", __doc__)
    parser.add_argument("--kernels", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=32768, help="in a batch")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: interpreted, as a trial")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args(argv)
    return run_main(lambda: search(args))


if __name__ == "__main__":
    sys.exit(main())
