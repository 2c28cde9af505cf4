"""Time and peak memory of every registered attention by length, beside torch's scaled_dot_product_attention.

    python -m scripts.benchmarks.attention --lengths 512 2048 8192 16384 --json out.json --png out.png
    python -m scripts.benchmarks.attention --attentions lln_diag lln_diag:mix=joint_offset
    python -m scripts.benchmarks.attention --attentions lln causal_lln causal_sdpa

All variants of a length are timed in turn, repeat by repeat, so that a noisy machine slows all of them alike; medians
count. Before timing, every mechanism is compared with its own quadratic matrix. Peak memory is measured: by torch on a
GPU, on a CPU as the resident-set peak of a child process. On a GPU a column compares every time with its floor: the
time to read q, k, v and to write the output once, backward also the gradients, at the bandwidth of a copy.
"""

import argparse
import functools
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from lln_fairseq.attention import ATTENTION_REGISTRY, Attention, build_attention
from lln_fairseq.attention.registry import parse_row
from lln_fairseq.command import run_main
from lln_fairseq.ops.lln import lln_attention
from lln_fairseq.training.malloc import disable_malloc_trim
from scripts.benchmarks.meter import (
    OutOfMemory,
    Spread,
    check_outputs,
    copy_bandwidth,
    draw_by_length,
    in_child,
    interleaved,
    relative_rms,
    resident_peak_of,
)
from scripts.columns import aligned

SDPA = "sdpa"
CAUSAL = {  # not in the registry, which has encoders' attentions alone
    "causal_sdpa": functools.partial(F.scaled_dot_product_attention, is_causal=True),
    "causal_lln": functools.partial(lln_attention, alpha=2.0, beta=2.0, causal=True),
}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Largest relative RMS difference from the float64 form that may be timed.
GATE = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 1e-1}
GATE_LENGTH = 200
PANELS = {"forward [ms]": "forward", "forward + backward [ms]": "both", "peak memory [tensors of q]": "memory"}


@dataclass
class Row:
    """Medians in ms with the fastest and slowest repeat; memory in tensors of the size of q, None if not measured.

    `floors`: the least time in ms forward, and forward and backward; None if the bandwidth was not measured.
    """

    attention: str
    length: int
    forward: float
    forward_range: tuple[float, float]
    both: float
    both_range: tuple[float, float]
    memory: float | None
    floors: tuple[float, float] | None = None


def attention_function(name: str, args: argparse.Namespace) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    if name == SDPA:
        return F.scaled_dot_product_attention
    if name in CAUSAL:
        return CAUSAL[name]
    return registered_attention(name, args)


def registered_attention(row: str, args: argparse.Namespace) -> Attention:
    """Build the attention of a row that is neither torch's nor causal, in evaluation mode."""
    name, options = parse_row(row)
    sizes = dict(num_heads=args.heads, head_dim=args.head_dim, max_positions=max(*args.lengths, GATE_LENGTH))
    module = build_attention(name, **sizes, **options)
    return module.to(device=args.device, dtype=DTYPES[args.dtype]).eval()


def inputs(args: argparse.Namespace, length: int) -> tuple[list[Tensor], Tensor]:
    """q, k, v that require gradients, and a gradient of the output."""
    batch = max(1, args.tokens // length) if args.tokens else args.batch
    generator = torch.Generator().manual_seed(0)
    shape = (4, batch, args.heads, length, args.head_dim)
    tensors = torch.randn(shape, generator=generator).to(device=args.device, dtype=DTYPES[args.dtype])
    q, k, v, grad = (x.clone() for x in tensors)
    return [x.requires_grad_() for x in (q, k, v)], grad


def check(name: str, args: argparse.Namespace) -> None:
    """Raise RuntimeError if an attention differs from its matrix times v (from itself in float64 without a matrix)."""
    if name == SDPA or name in CAUSAL:
        return
    attention = registered_attention(name, args)
    (q, k, v), _ = inputs(args, GATE_LENGTH)
    with torch.no_grad():
        attention.double()
        if attention.has_matrix:
            expected = attention.attention_matrix(q.double(), k.double()) @ v.double()
        else:
            expected = attention(q.double(), k.double(), v.double())
        out = attention.to(q.dtype)(q, k, v).double()
    error = relative_rms(out, expected)
    if not error <= GATE[args.dtype]:
        raise RuntimeError(
            f"{name} is off by {error:.1e} (relative RMS) from the float64 form, {GATE[args.dtype]} may be timed"
        )


def run_forward(attention: Callable, tensors: list[Tensor]) -> None:
    with torch.no_grad():
        attention(*tensors)


def run_both(attention: Callable, tensors: list[Tensor], grad: Tensor) -> None:
    for x in tensors:
        x.grad = None
    attention(*tensors).backward(grad)


def floors(q: Tensor, bandwidth: float) -> tuple[float, float]:
    """Return the least time in ms that an attention can take forward, and forward and backward.

    Forward it reads q, k, v and writes the output; backward it reads q, k, v and a gradient and writes three.
    """
    one_tensor = 1e3 * q.numel() * q.element_size() / bandwidth
    return 4 * one_tensor, (4 + 7) * one_tensor


def time_length(length: int, names: list[str], args: argparse.Namespace, bandwidth: float | None) -> list[Row]:
    tensors, grad = inputs(args, length)
    attentions = {name: attention_function(name, args) for name in names}
    runs = {}
    for name, attention in attentions.items():
        runs[name, "forward"] = functools.partial(run_forward, attention, tensors)
        runs[name, "both"] = functools.partial(run_both, attention, tensors, grad)
    times = interleaved(runs, args.device, args.repeats, args.seconds)
    rows = []
    for name in names:
        memory = None if args.no_memory else peak_memory(name, length, args)
        forward = Spread.of(times[name, "forward"])
        both = Spread.of(times[name, "both"])
        least = floors(tensors[0], bandwidth) if bandwidth else None
        rows.append(Row(name, length, forward.median, forward[1:], both.median, both[1:], memory, least))
    return rows


def peak_memory(name: str, length: int, args: argparse.Namespace) -> float | None:
    """Peak of forward + backward above what the inputs take, the results included, in units of one q."""
    if args.device == "cpu":
        try:
            return in_child(resident_peak, name, length, args)
        except OutOfMemory:
            return None
    tensors, grad = inputs(args, length)
    attention = attention_function(name, args)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run_both(attention, tensors, grad)
    return (torch.cuda.max_memory_allocated() - before) / (tensors[0].numel() * tensors[0].element_size())


def resident_peak(name: str, length: int, args: argparse.Namespace) -> float:
    """The child's part: the resident-set peak (VmHWM) above the resident set just before the call."""
    attention = attention_function(name, args)
    run_both(attention, *inputs(args, 64))  # loads what is loaded on first use
    tensors, grad = inputs(args, length)
    peak = resident_peak_of(lambda: run_both(attention, tensors, grad))
    return peak / (tensors[0].numel() * tensors[0].element_size())


def growth(rows: list[Row], name: str, start: int = 2048) -> float | None:
    """Exponent p of time ~ N^p of forward + backward between `start` and the longest length."""
    mine = sorted((row.length, row.both) for row in rows if row.attention == name and row.length >= start)
    if len(mine) < 2:
        return None
    return math.log(mine[-1][1] / mine[0][1]) / math.log(mine[-1][0] / mine[0][0])


def table(rows: list[Row], names: list[str]) -> str:
    baseline = {row.length: row for row in rows if row.attention == SDPA}
    cells = [["attention", "N", "forward [ms]", "vs sdpa", "forward+backward [ms]", "vs sdpa", "memory"]]
    if any(row.floors for row in rows):
        cells[0] += ["floor/forward", "floor/both"]
    for row in rows:
        base = baseline[row.length]
        forward, both = Spread(row.forward, *row.forward_range).text(), Spread(row.both, *row.both_range).text()
        ratios = f"{base.forward / row.forward:.2f}x", f"{base.both / row.both:.2f}x"
        memory = "-" if row.memory is None else f"{row.memory:.1f}"
        cells.append([row.attention, str(row.length), forward, ratios[0], both, ratios[1], memory])
        if row.floors:
            cells[-1] += [f"{row.floors[0] / row.forward:.2f}", f"{row.floors[1] / row.both:.2f}"]
    exponents = {name: growth(rows, name) for name in names}
    lines = [aligned(cells), "", "time of forward + backward grows like N^p from 2048 on:"]
    lines += [f"  {name:<12} p = {p:.2f}" for name, p in exponents.items() if p is not None]
    return "\n".join([*lines, "memory: peak of forward + backward above the inputs, in tensors of the size of q"])


def draw(rows: list[Row], names: list[str], path: Path, title: str) -> None:
    def points(name: str, panel: str) -> list[tuple[int, float]]:
        mine = [(row.length, getattr(row, PANELS[panel])) for row in rows if row.attention == name]
        return [(length, value) for length, value in mine if value is not None]

    draw_by_length(path, title, list(PANELS), names, points)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmarks.attention", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--attentions", nargs="+", metavar="ROW", default=sorted(ATTENTION_REGISTRY),
                        help=f"NAME, NAME:OPTION=VALUE,... or {', '.join(CAUSAL)} (the registry)")  # fmt: skip
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=0, help="tokens in a batch at every length, instead of --batch")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=20.0, help="no more repeats of what took longer than this")
    parser.add_argument("--no-memory", action="store_true", help="skip the measurement of memory")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--png", type=Path, help="draw them here, on logarithmic axes")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, one repeat: does everything work?")
    args = parser.parse_args(argv)
    check_outputs(parser, args.json, args.png)
    if min(args.lengths) < 1 or args.repeats < 1:
        parser.error("lengths and repeats must be at least 1")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch finds no CUDA device")
    if args.smoke:
        args.lengths, args.heads, args.head_dim, args.repeats = [64, 128], 2, 32, 1
    try:
        for name in args.attentions:
            attention_function(name, args)
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return run_main(lambda: benchmark(args))


def benchmark(args: argparse.Namespace) -> None:
    disable_malloc_trim()
    names = [SDPA, *args.attentions]
    for name in names:
        check(name, args)
    rows = []
    bandwidth = copy_bandwidth(args.device) if args.device == "cuda" else None
    for length in args.lengths:
        rows += time_length(length, names, args, bandwidth)
        print(f"N = {length} done", file=sys.stderr)
    device = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    title = f"{device}, torch {torch.__version__}, {args.dtype}, H = {args.heads}, D = {args.head_dim}"
    print(f"{title}\n{table(rows, names)}")
    if args.json:
        args.json.write_text(json.dumps({"title": title, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    if args.png:
        draw(rows, names, args.png, title)


if __name__ == "__main__":
    sys.exit(main())
