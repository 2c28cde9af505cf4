"""Time and memory of the Triton kernels on a GPU, against the bytes that must move, SDPA's flash kernel and PyTorch.

For every length the batch holds the same number of tokens. Columns:

    floor   the tensors that must be read and written (forward 6 of B H N D, backward 9; LLN alone 4 and 7), over the
            bandwidth of a device-to-device copy measured in this run
    of floor   floor / time: 1.0 is the best there is
    flash, torch   time of SDPA (flash kernel, same q, k, v) and of the PyTorch path, over ours: larger is better
    graph   time of the same work replayed from a CUDA graph: what is left when launches cost nothing
    MB      peak memory beyond q, k, v and the incoming gradient, ours and SDPA's
    error   of output and gradients of the first head, beside the PyTorch path in float64
"""

import argparse
import functools
import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lln_fairseq.command import UserError, run_main
from lln_fairseq.data.files import write_bytes
from lln_fairseq.ops import lln
from lln_fairseq.ops.backends import triton as backend
from scripts.benchmarks import meter
from scripts.columns import aligned


class Mechanism(NamedTuple):
    """The mix of LLN and Diag, None without Diag; tensors of B H N D moved forward, and forward and backward."""

    mix: str | None
    forward: int
    both: int


MECHANISMS = {
    "lln": Mechanism(None, 4, 11),
    "lln_diag": Mechanism("average", 6, 15),
    "joint_offset": Mechanism("joint_offset", 6, 15),
}
LARGEST_ERROR = {"float16": 3e-3, "bfloat16": 2e-2, "float32": 1e-4}
LENGTHS = [512, 1024, 2048, 4096, 8192, 16384, 32768, 65536]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def milliseconds(function: Callable[[], object], repeats: int, cache: Tensor) -> float:
    """Median time of a call; `cache` is overwritten before each, so that nothing is left in the device's cache."""
    for _ in range(3):
        function()
    times = []
    for _ in range(repeats):
        cache.zero_()
        times.append(meter.milliseconds(function, cache.device.type))
    return statistics.median(times)


def cache_of(device: str) -> Tensor:
    """What `milliseconds` overwrites, larger than the device's cache. Raises: UserError where there is no GPU."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("no CUDA device: torch.cuda.is_available() is False")
    return torch.empty(2**28 if device == "cuda" else 2**20, dtype=torch.uint8, device=device)


def copy_bandwidth(cache: Tensor) -> float:
    """Bytes per second of a copy of four times the size of `cache`, counting what is read and what is written."""
    x = torch.empty(4 * cache.numel(), dtype=torch.uint8, device=cache.device).random_()
    y = torch.empty_like(x)
    return 2 * x.numel() / (milliseconds(lambda: y.copy_(x), 10, cache) * 1e-3)


def graphed(function: Callable[[], object]) -> Callable[[], object]:
    """The function's kernels as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def peak_megabytes(function: Callable[[], object]) -> float:
    function()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def attention(name: str, backend: str, alpha: Tensor, beta: Tensor, block_size: int) -> Attention:
    """A mechanism in one backend, as a function of q, k, v."""
    mix = MECHANISMS[name].mix
    if mix is None:
        return functools.partial(lln.lln_attention, alpha=alpha, beta=beta, backend=backend)
    return functools.partial(
        lln.lln_diag_attention, alpha=alpha, beta=beta, block_size=block_size, mix=mix, backend=backend
    )


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention by SDPA's flash kernel."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v)


def both(function: Attention, tensors: list[Tensor], do: Tensor) -> Callable[[], list[Tensor]]:
    """Forward and backward, with gradients of q, k, v."""

    def run() -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = function(*leaves)
        return [out, *torch.autograd.grad(out, leaves, do)]

    return run


def inputs(batch: int, length: int, args: argparse.Namespace) -> tuple[list[Tensor], Tensor, tuple[Tensor, Tensor]]:
    """q, k, v as a model has them, (B, H, N, D) in the memory layout (B, N, H, D), the incoming gradient, α and β."""
    generator = torch.Generator(args.device).manual_seed(0)
    shape, place = (batch, length, args.heads, args.dim), {"device": args.device, "dtype": getattr(torch, args.dtype)}
    q, k, v, do = (torch.randn(shape, generator=generator, **place).transpose(1, 2) for _ in range(4))
    alpha, beta = torch.full((2, batch, args.heads), args.alpha, device=args.device)
    return [q, k, v], do, (alpha, beta)


def error_of(name: str, tensors: list[Tensor], do: Tensor, factors: tuple[Tensor, Tensor], block_size: int) -> float:
    """The largest relative error of output and gradients in the first head."""
    found = both(attention(name, "triton", *factors, block_size), tensors, do)()
    one, one_do, (alpha, beta) = ([x[:1, :1].double() for x in part] for part in (tensors, [do], factors))
    expected = both(attention(name, "torch", alpha, beta, block_size), one, one_do[0])()
    errors = [meter.relative_rms(x[:1, :1], y) for x, y in zip(found, expected, strict=True)]
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def measure(name: str, length: int, args: argparse.Namespace, bandwidth: float, cache: Tensor) -> list[dict[str, Any]]:
    """The rows of one mechanism at one length, forward and both."""
    batch, rows, on_gpu = max(args.tokens // length, 1), [], args.device == "cuda"
    tensors, do, factors = inputs(batch, length, args)
    ours, plain = (attention(name, kind, *factors, args.block_size) for kind in ("triton", "torch"))
    error = error_of(name, tensors, do, factors, args.block_size)
    for direction in ("forward", "both"):
        calls = {
            key: both(f, tensors, do) if direction == "both" else functools.partial(f, *tensors)
            for key, f in (("ours", ours), ("flash", flash), ("torch", plain))
        }
        moved = getattr(MECHANISMS[name], direction) * tensors[0].numel() * tensors[0].element_size()
        rows.append(
            {"mechanism": name, "dtype": args.dtype, "batch": batch, "heads": args.heads, "length": length,
             "dim": args.dim, "direction": direction, "floor_ms": moved / bandwidth * 1e3, "error": error,
             **{f"{key}_ms": milliseconds(call, args.repeats, cache) for key, call in calls.items()},
             "graph_ms": milliseconds(graphed(calls["ours"]), args.repeats, cache) if on_gpu else None,
             "ours_mb": peak_megabytes(calls["ours"]) if on_gpu else None,
             "flash_mb": peak_megabytes(calls["flash"]) if on_gpu else None}
        )  # fmt: skip
    return rows


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    ours = row["ours_ms"]
    figures = [1e3 * ours, 1e3 * row["floor_ms"], row["floor_ms"] / ours, row["graph_ms"] and 1e3 * row["graph_ms"],
               row["flash_ms"] / ours, row["torch_ms"] / ours, row["ours_mb"], row["flash_mb"]]  # fmt: skip
    digits = (0, 0, 2, 0, 2, 2, 0, 0)
    texts = ["-" if x is None else f"{x:.{d}f}" for x, d in zip(figures, digits, strict=True)]
    return [row["mechanism"], str(row["length"]), str(row["batch"]), row["direction"], *texts, f"{row['error']:.1e}"]


HEADS = ["", "N", "B", "", "us", "floor", "of floor", "graph", "flash", "torch", "MB", "flash MB", "error"]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmarks.gpu", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--mechanisms", nargs="+", choices=MECHANISMS, default=["lln", "lln_diag", "joint_offset"])
    parser.add_argument("--tokens", type=int, default=32768, help="tokens in a batch")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--alpha", type=float, default=1.4)
    parser.add_argument("--dtype", choices=LARGEST_ERROR, default="float16")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: interpreted, as a trial")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the figures here, after every length")
    args = parser.parse_args(argv)
    meter.check_outputs(parser, args.json)
    return args


def benchmark(args: argparse.Namespace) -> None:
    on_gpu, cache = args.device == "cuda", cache_of(args.device)
    sample = torch.empty(1, 1, 1, args.dim, device=args.device, dtype=getattr(torch, args.dtype))
    if reason := backend.is_supported(sample, args.block_size):
        raise UserError(reason)
    bandwidth = copy_bandwidth(cache)
    device, rows = torch.cuda.get_device_name() if on_gpu else "CPU, interpreted", []
    print(f"{device}: a copy moves {bandwidth / 1e12:.2f} TB/s (read + written); {args.dtype}, H = {args.heads}, "
          f"D = {args.dim}, blocks of {args.block_size}")  # fmt: skip
    for name in args.mechanisms:
        for length in args.lengths:
            rows += measure(name, length, args, bandwidth, cache)
            print("  ".join(cells(rows[-2])), "  ".join(cells(rows[-1])), sep="\n", flush=True)
            if args.json:
                content = {"device": device, "bandwidth": bandwidth, "torch": torch.__version__, "rows": rows}
                write_bytes(args.json, (json.dumps(content, indent=1) + "\n").encode())
    print(f"\n{aligned([HEADS, *map(cells, rows)])}")
    if not all(row["error"] < LARGEST_ERROR[args.dtype] for row in rows):
        raise UserError("the kernels' error is too large")


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return run_main(lambda: benchmark(args))


if __name__ == "__main__":
    sys.exit(main())
