"""Time of causal LLN attention by length, beside LLN attention of the whole sequence and torch's causal softmax.

    python -m scripts.benchmarks.causal --lengths 512 2048 8192 16384

α and β are given. All variants of a length are timed in turn, repeat by repeat; medians count.
"""

import argparse
import functools
import math
import sys
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from lln_fairseq.command import run_main
from lln_fairseq.ops.lln import lln_attention
from lln_fairseq.training.malloc import disable_malloc_trim
from scripts.benchmarks.meter import Spread, interleaved
from scripts.columns import aligned

ALPHA = BETA = 2.0
CAUSAL = "causal LLN"
VARIANTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    CAUSAL: lambda q, k, v: lln_attention(q, k, v, ALPHA, BETA, causal=True),
    "LLN": lambda q, k, v: lln_attention(q, k, v, ALPHA, BETA),
    "LLN, backend torch": lambda q, k, v: lln_attention(q, k, v, ALPHA, BETA, backend="torch"),
    "causal softmax": functools.partial(F.scaled_dot_product_attention, is_causal=True),
}
PARTS = ("forward", "both")


def time_length(length: int, args: argparse.Namespace) -> dict[tuple[str, str], list[float]]:
    """Milliseconds of every variant, forward alone and with its backward pass."""
    shape = (4, args.batch, args.heads, length, args.head_dim)
    q, k, v, grad = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(args.device)
    tensors = [x.clone().requires_grad_() for x in (q, k, v)]

    def forward(function: Callable) -> None:
        with torch.no_grad():
            function(*tensors)

    def both(function: Callable) -> None:
        torch.autograd.grad(function(*tensors), tensors, grad)

    runs = {}
    for name, function in VARIANTS.items():
        runs[name, "forward"] = functools.partial(forward, function)
        runs[name, "both"] = functools.partial(both, function)
    return interleaved(runs, args.device, args.repeats, args.seconds)


def benchmark(args: argparse.Namespace) -> None:
    disable_malloc_trim()
    cells = [("attention", "N", "forward [ms]", "forward + backward [ms]", "causal LLN / this")]
    both: dict[int, float] = {}
    for length in args.lengths:
        times = time_length(length, args)
        both[length] = median(times[CAUSAL, "both"])
        for name in VARIANTS:
            texts = [Spread.of(times[name, part]).text(1) for part in PARTS]
            cells.append((name, str(length), *texts, f"{both[length] / median(times[name, 'both']):.2f}"))
        print(f"N = {length} done", file=sys.stderr)
    print(f"{args.device}, {torch.get_num_threads()} threads, float32, B = {args.batch}, H = {args.heads}, "
          f"D = {args.head_dim}\n{aligned(cells)}")  # fmt: skip
    if len(both) > 1:
        (low, fast), (high, slow) = min(both.items()), max(both.items())
        print(f"time of causal LLN grows like N^{math.log(slow / fast) / math.log(high / low):.2f}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmarks.causal", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048, 4096, 8192, 16384])
    for name, value in {"batch": 1, "heads": 12, "head-dim": 64, "repeats": 7}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=20.0, help="no more repeats of what took longer than this")
    args = parser.parse_args(argv)
    if min(*args.lengths, args.batch, args.heads, args.head_dim, args.repeats) < 1:
        parser.error("lengths, sizes and repeats must be at least 1")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch finds no CUDA device")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return run_main(lambda: benchmark(args))


if __name__ == "__main__":
    sys.exit(main())
