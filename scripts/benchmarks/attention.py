"""Time and peak memory of every registered attention by length, beside torch's scaled_dot_product_attention.

    python -m scripts.benchmarks.attention --lengths 512 2048 8192 16384 --json out.json --png out.png
    python -m scripts.benchmarks.attention --attentions lln_diag lln_diag:mix=joint_offset
    python -m scripts.benchmarks.attention --attentions lln causal_lln causal_sdpa

All variants of a length are timed in turn, repeat by repeat, so that a noisy machine slows all of them alike; medians
count. Peak memory is measured: by torch on a GPU, on a CPU as the resident-set peak of a child process.
On a GPU a column compares every time with its floor: the time to read q, k, v and to write the output once, backward
also the gradients, at the bandwidth of a copy.
"""

import argparse
import functools
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lln_fairseq.attention import ATTENTION_REGISTRY, build_attention
from lln_fairseq.attention.registry import parse_attention_spec
from lln_fairseq.command import run_main
from lln_fairseq.ops.lln import lln_attention
from lln_fairseq.training.malloc import disable_malloc_trim
from scripts.benchmarks.meter import (
    OutOfMemory,
    Spread,
    add_device_options,
    copy_bandwidth,
    device_name,
    growth,
    interleaved,
    peak_memory,
)
from scripts.terminal import aligned, at_least_one, output_file, program_parser

SDPA = "sdpa"
LONG = 2048  # tokens from which on the growth of the times is measured
CAUSAL = {  # not in the registry, which has encoders' attentions alone
    "causal_sdpa": functools.partial(F.scaled_dot_product_attention, is_causal=True),
    "causal_lln": functools.partial(lln_attention, alpha=2.0, beta=2.0, causal=True),
}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass
class Row:
    """Medians in ms with the fastest and slowest repeat; memory in tensors of the size of q, None if not measured.

    `floors`: the least time in ms forward, and forward and backward; None if the bandwidth was not measured.
    """

    attention: str
    length: int
    forward: Spread
    both: Spread
    memory: float | None
    floors: tuple[float, float] | None = None


def attention_function(row: str, args: argparse.Namespace) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return torch's attention, a causal one, or a registered one in evaluation mode."""
    if row == SDPA:
        return F.scaled_dot_product_attention
    if row in CAUSAL:
        return CAUSAL[row]
    name, options = parse_attention_spec(row)
    sizes = dict(num_heads=args.heads, head_dim=args.head_dim, max_positions=max(args.lengths))
    return build_attention(name, **sizes, **options).to(device=args.device, dtype=DTYPES[args.dtype]).eval()


def inputs(args: argparse.Namespace, length: int) -> tuple[list[Tensor], Tensor]:
    """q, k, v that require gradients, and a gradient of the output."""
    batch = max(1, args.tokens // length)
    generator = torch.Generator().manual_seed(0)
    shape = (4, batch, args.heads, length, args.head_dim)
    tensors = torch.randn(shape, generator=generator).to(device=args.device, dtype=DTYPES[args.dtype])
    q, k, v, grad = (x.clone() for x in tensors)
    return [x.requires_grad_() for x in (q, k, v)], grad


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
    times = interleaved(runs, args.device, args.repeats)
    rows = []
    for name in names:
        memory = memory_in_tensors(name, length, args) if args.memory else None
        forward = Spread.of(times[name, "forward"])
        both = Spread.of(times[name, "both"])
        least = floors(tensors[0], bandwidth) if bandwidth else None
        rows.append(Row(name, length, forward, both, memory, least))
    return rows


def memory_in_tensors(name: str, length: int, args: argparse.Namespace) -> float | None:
    """Peak of forward + backward above what the inputs take, the results included, in units of one q."""
    try:
        peak = peak_memory(args.device, prepare_both, name, length, args)
    except OutOfMemory:
        return None
    (q, _, _), _ = inputs(args, length)
    return peak / q.nbytes


def prepare_both(name: str, length: int, args: argparse.Namespace) -> Callable[[], None]:
    """Return a call of forward and backward."""
    attention = attention_function(name, args)
    run_both(attention, *inputs(args, 64))  # loads what is loaded on first use
    return functools.partial(run_both, attention, *inputs(args, length))


def table(rows: list[Row], names: list[str]) -> str:
    baseline = {row.length: row for row in rows if row.attention == SDPA}
    cells = [["attention", "N", "forward [ms]", "vs sdpa", "forward+backward [ms]", "vs sdpa", "memory"]]
    if any(row.floors for row in rows):
        cells[0] += ["floor/forward", "floor/both"]
    for row in rows:
        base = baseline[row.length]
        line = [row.attention, str(row.length)]
        line += [row.forward.text(), f"{base.forward.median / row.forward.median:.2f}x"]
        line += [row.both.text(), f"{base.both.median / row.both.median:.2f}x"]
        line.append("-" if row.memory is None else f"{row.memory:.1f}")
        if row.floors:
            line += [f"{row.floors[0] / row.forward.median:.2f}", f"{row.floors[1] / row.both.median:.2f}"]
        cells.append(line)
    lines = [aligned(cells), "", f"time of forward + backward grows like N^p from {LONG} on:"]
    for name in names:
        points = [(row.length, row.both.median) for row in rows if row.attention == name and row.length >= LONG]
        exponent = growth(points) if points else None
        if exponent is not None:
            lines.append(f"  {name:<12} p = {exponent:.2f}")
    return "\n".join([*lines, "memory: peak of forward + backward above the inputs, in tensors of the size of q"])


def draw(rows: list[Row], names: list[str], path: Path, title: str) -> None:
    """Draw times and memory by length on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(16.5, 4.8), constrained_layout=True)
    for number, name in enumerate(names):
        mine = [row for row in rows if row.attention == name]
        lengths = [row.length for row in mine]
        turn = number // 10 % 3  # ten colours, then the same with other lines and markers
        style: dict[str, Any] = {"color": f"C{number % 10}", "marker": "os^"[turn], "linestyle": ("-", "--", ":")[turn]}
        axes[0].loglog(lengths, [row.forward.median for row in mine], label=name, **style)
        axes[1].loglog(lengths, [row.both.median for row in mine], **style)
        axes[2].loglog(lengths, [row.memory or math.nan for row in mine], **style)
    for axis, label in zip(
        axes, ("forward [ms]", "forward + backward [ms]", "peak memory [tensors of q]"), strict=True
    ):
        axis.set(xlabel="sequence length N [tokens]", ylabel=label)
        axis.set_xticks(lengths, list(map(str, lengths)))
        axis.set_xticks([], minor=True)
        axis.grid(True, which="major", alpha=0.3)
    figure.legend(fontsize=8, loc="outside right center")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, format="png", dpi=120)
    plt.close(figure)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = program_parser("python -m scripts.benchmarks.attention", __doc__)
    parser.add_argument(
        "--attentions",
        nargs="+",
        metavar="ROW",
        default=sorted(ATTENTION_REGISTRY),
        help=f"NAME, NAME:OPTION=VALUE,... or {', '.join(CAUSAL)} (the registry)",
    )
    parser.add_argument("--lengths", nargs="+", type=at_least_one, default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--tokens", type=int, default=1, help="in a batch at every length; default: one sequence")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=at_least_one, default=7)
    add_device_options(parser, DTYPES)
    parser.set_defaults(dtype="float32")
    parser.add_argument("--png", type=output_file, help="draw them here, on logarithmic axes")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, one repeat: does everything work?")
    args = parser.parse_args(argv)
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
    rows = []
    bandwidth = copy_bandwidth(args.device) if args.device == "cuda" else None
    for length in args.lengths:
        rows += time_length(length, names, args, bandwidth)
        print(f"N = {length} done", file=sys.stderr)
    title = (
        f"{device_name(args.device)}, torch {torch.__version__}, {args.dtype}, H = {args.heads}, D = {args.head_dim}"
    )
    print(f"{title}\n{table(rows, names)}")
    if args.json:
        args.json.write_text(json.dumps({"title": title, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    if args.png:
        draw(rows, names, args.png, title)


if __name__ == "__main__":
    sys.exit(main())
