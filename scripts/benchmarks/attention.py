"""Measure time and peak memory of every registered attention by sequence length, compared with torch's SDPA.

    python -m scripts.benchmarks.attention --lengths 512 2048 8192 16384 --json out.json
    python -m scripts.benchmarks.attention --attentions lln_diag lln_diag:mix=joint_offset

SDPA is torch's scaled_dot_product_attention. For each length, all attentions are timed in turn, repeat by repeat, so
that a noisy machine slows all of them alike. The table shows the medians. Peak memory is reported by torch on a GPU; on
a CPU it is the peak of the resident set of a child process.

On a GPU, there are three times, each forward, and forward and backward together: of the call as it is; of the GPU
alone, which replays the call as a CUDA graph; and of the host alone, which makes many calls of a small input without
waiting. Two columns show the floor divided by the GPU's time. The floor is the least possible time: every input is read
once and every output is written once, at the bandwidth of a copy. The backward pass also reads and writes gradients.
"""

import argparse
import functools
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lln_fairseq.attention import ATTENTION_REGISTRY, build_attention
from lln_fairseq.attention.registry import parse_attention_spec
from lln_fairseq.command import run_main
from lln_fairseq.provenance import describe_provenance, write_result
from lln_fairseq.terminal import at_least_one, program_parser, text_table
from lln_fairseq.timing import Spread, can_measure_resident_peak, interleaved
from lln_fairseq.training.malloc import disable_malloc_trim
from scripts.benchmarks.meter import (
    OutOfMemory,
    add_device_options,
    captured,
    copy_bandwidth,
    device_name,
    growth,
    host_milliseconds,
    peak_memory,
)

SDPA = "sdpa"
HOST_TOKENS = 128  # of the one sequence with which the host's time is measured
LONG = 2048  # the growth of the times is measured from this number of tokens
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass
class Row:
    """The results of one attention at one length. Times are in ms."""

    attention: str
    length: int  # tokens per sequence
    forward: Spread
    both: Spread  # the forward and the backward pass together
    memory: float | None  # peak, divided by the size of q; None if it was not measured, or ran out
    floors: tuple[float, float] | None = None  # the least possible `forward` and `both`, if they are known
    card: tuple[Spread, Spread] | None = None  # `forward` and `both` of the GPU alone; None if it cannot be captured


@dataclass
class HostTime:
    """The host's time of one call of an attention in microseconds."""

    attention: str
    forward: float
    both: float  # the forward and the backward pass together


def attention_function(name: str, args: argparse.Namespace) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return torch's SDPA for "sdpa", or the attention of a spec in evaluation mode, as a function of q, k and v.

    An unknown name or option raises ValueError.
    """
    if name == SDPA:
        return F.scaled_dot_product_attention
    registered_name, options = parse_attention_spec(name)
    sizes = {"num_heads": args.heads, "head_dim": args.head_dim, "max_positions": max(args.lengths)}
    attention = build_attention(registered_name, **sizes, **options)
    return attention.to(device=args.device, dtype=DTYPES[args.dtype]).eval()


def make_inputs(args: argparse.Namespace, length: int) -> tuple[list[Tensor], Tensor]:
    """Return q, k and v, which require gradients, and a gradient of the output, each (B, H, N, D).

    They are random but the same in every call. The batch has as many sequences as fit in args.tokens, but at least one.
    """
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
    """Run the forward and the backward pass. The gradients of an earlier call are dropped first."""
    for x in tensors:
        x.grad = None
    attention(*tensors).backward(grad)


def floors(q: Tensor, bandwidth: float) -> tuple[float, float]:
    """Return the least time in ms of a forward pass, and of a forward and a backward pass together.

    The forward pass reads q, k and v and writes the output. The backward pass reads q, k, v and the gradient of the
    output, and writes the gradients of q, k and v. `bandwidth` is the bytes that are read or written per second.
    """
    one_tensor = 1e3 * q.numel() * q.element_size() / bandwidth
    return 4 * one_tensor, (4 + 7) * one_tensor


def time_length(length: int, names: list[str], args: argparse.Namespace, bandwidth: float | None) -> list[Row]:
    """Measure the attentions at one length. Without a bandwidth, in bytes per second, the rows have no floors."""
    tensors, grad = make_inputs(args, length)
    runs: dict[tuple[str, str], Callable[[], object]] = {}
    for name in names:
        attention = attention_function(name, args)
        runs[name, "forward"] = functools.partial(run_forward, attention, tensors)
        runs[name, "both"] = functools.partial(run_both, attention, tensors, grad)
    if args.device == "cuda":
        for (name, passes), run in list(runs.items()):
            replay = captured(run)
            if replay is not None:
                runs[name, f"card {passes}"] = replay
    times = interleaved(runs, args.device, args.repeats)
    row_floors = None
    if bandwidth is not None:
        row_floors = floors(tensors[0], bandwidth)
    rows = []
    for name in names:
        memory = None
        if args.memory:
            memory = memory_in_tensors(name, length, args)
        forward = Spread.of(times[name, "forward"])
        both = Spread.of(times[name, "both"])
        card = None
        if (name, "card forward") in times and (name, "card both") in times:
            card = (Spread.of(times[name, "card forward"]), Spread.of(times[name, "card both"]))
        rows.append(Row(name, length, forward, both, memory, row_floors, card))
    return rows


def time_host(names: list[str], args: argparse.Namespace) -> list[HostTime]:
    """Measure the host's time of the attentions on a GPU, with one sequence of HOST_TOKENS tokens."""
    tensors, grad = make_inputs(argparse.Namespace(**vars(args) | {"tokens": 1}), HOST_TOKENS)
    times = []
    for name in names:
        attention = attention_function(name, args)
        forward = host_milliseconds(functools.partial(run_forward, attention, tensors))
        both = host_milliseconds(functools.partial(run_both, attention, tensors, grad))
        times.append(HostTime(name, 1e3 * forward, 1e3 * both))
    return times


def memory_in_tensors(name: str, length: int, args: argparse.Namespace) -> float | None:
    """Return the peak memory of a forward and a backward pass divided by the size of q, or None if memory runs out.

    The output and the gradients are counted, the inputs are not.
    """
    try:
        peak = peak_memory(args.device, prepare_both, name, length, args)
    except OutOfMemory:
        return None
    (q, _, _), _ = make_inputs(args, length)
    return peak / q.nbytes


def prepare_both(name: str, length: int, args: argparse.Namespace) -> Callable[[], None]:
    """Return a function that runs a forward and a backward pass, to measure its memory.

    One pass over 64 tokens loads what is loaded on first use, so that it is not measured.
    """
    attention = attention_function(name, args)
    run_both(attention, *make_inputs(args, 64))
    return functools.partial(run_both, attention, *make_inputs(args, length))


def results_table(rows: list[Row], names: list[str]) -> str:
    """Return the rows as a table with their speed compared with SDPA, and the growth of the times with length.

    There must be a row of SDPA for every length. The growth is that of forward + backward from LONG tokens on. It is
    left out for an attention with fewer than two such lengths.
    """
    baseline = {row.length: row for row in rows if row.attention == SDPA}
    cells = [["attention", "N", "forward [ms]", "vs sdpa", "forward+backward [ms]", "vs sdpa", "memory"]]
    if any(row.floors for row in rows):
        cells[0] += ["GPU alone: forward", "both", "floor/forward", "floor/both"]
    for row in rows:
        sdpa = baseline[row.length]
        line = [row.attention, str(row.length)]
        line += [row.forward.text(), f"{sdpa.forward.median / row.forward.median:.2f}x"]
        line += [row.both.text(), f"{sdpa.both.median / row.both.median:.2f}x"]
        line.append("-" if row.memory is None else f"{row.memory:.1f}")
        if row.card and row.floors:
            line += [spread.text(3) for spread in row.card]
            line += [f"{floor / spread.median:.2f}" for floor, spread in zip(row.floors, row.card, strict=True)]
        elif row.floors:
            line += 4 * ["-"]
        cells.append(line)
    lines = [text_table(cells), "", f"time of forward + backward grows like N^p from N = {LONG}:"]
    for name in names:
        points = [(row.length, row.both.median) for row in rows if row.attention == name and row.length >= LONG]
        exponent = None
        if points:
            exponent = growth(points)
        if exponent is not None:
            lines.append(f"  {name:<12} p = {exponent:.2f}")
    lines.append("memory: peak of forward + backward without the inputs, in tensors of the size of q")
    return "\n".join(lines)


def host_table(times: list[HostTime]) -> str:
    cells = [["host alone", "forward [µs]", "forward+backward [µs]"]]
    for row in times:
        cells.append([row.attention, f"{row.forward:.0f}", f"{row.both:.0f}"])
    return text_table(cells)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = program_parser("python -m scripts.benchmarks.attention", __doc__)
    parser.add_argument(
        "--attentions",
        nargs="+",
        metavar="ROW",
        default=sorted(ATTENTION_REGISTRY),
        help="NAME or NAME:OPTION=VALUE,OPTION=VALUE (default: all registered attentions)",
    )
    parser.add_argument("--lengths", nargs="+", type=at_least_one, default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--tokens", type=int, default=1, help="tokens per batch at every length (default: 1 sequence)")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=at_least_one, default=7)
    add_device_options(parser, DTYPES)
    parser.set_defaults(dtype="float32")
    args = parser.parse_args(argv)
    args.memory = args.memory and (args.device == "cuda" or can_measure_resident_peak())
    try:
        for name in args.attentions:
            attention_function(name, args)
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    return run_main(lambda: benchmark(args))


def benchmark(args: argparse.Namespace) -> None:
    disable_malloc_trim()
    provenance = describe_provenance()
    names = [SDPA, *args.attentions]
    rows = []
    bandwidth = None
    host_times = []
    if args.device == "cuda":
        bandwidth = copy_bandwidth(args.device)
        host_times = time_host(names, args)
    for length in args.lengths:
        rows += time_length(length, names, args, bandwidth)
        print(f"N = {length} done", file=sys.stderr)
    title = (
        f"{device_name(args.device)}, torch {torch.__version__}, {args.dtype}, H = {args.heads}, D = {args.head_dim}"
    )
    print(f"{title}\n{results_table(rows, names)}")
    if host_times:
        print(f"\n{host_table(host_times)}")
    if args.json:
        sizes = {"tokens": args.tokens, "heads": args.heads, "head_dim": args.head_dim, "dtype": args.dtype}
        content: dict[str, Any] = {"title": title, "sizes": sizes, "rows": [asdict(row) for row in rows]}
        content["host"] = [asdict(row) for row in host_times]
        write_result(args.json, content, provenance)


if __name__ == "__main__":
    sys.exit(main())
