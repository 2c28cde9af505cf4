"""One encoder layer over a sequence that lies on several workers of this machine: time, memory, and what is sent.

    python -m scripts.benchmarks.sequence_parallel --tokens 131072 262144 524288 1048576

Every worker is a process (gloo) with its part of the tokens: forward and backward of fairseq's layer with our
attention, once for the memory and then three times for the time. Time is that of the slowest worker; memory the
peak of a worker's resident set above what it was before, the greatest of all; sent is what each worker gives
to the collectives of a forward and backward pass. Freed memory goes back to the system, unlike in a training.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from fairseq.models.transformer import TransformerConfig
from torch import Tensor

from lln_fairseq.attention.registry import parse_attention_spec
from lln_fairseq.command import UserError, run_main
from lln_fairseq.models.presets import PRESETS
from lln_fairseq.modules.encoder import LLNEncoderLayer
from lln_fairseq.modules.token_shards import shard_bounds
from scripts.benchmarks.meter import can_measure_resident_peak, growth, resident_peak_of
from scripts.terminal import aligned, at_least_one, program_parser

PRESET = "small"
REPEATS = 3
COLLECTIVES = {"all_gather": 1, "all_reduce": 0}  # which argument a worker sends


@dataclass
class Row:
    """One length: seconds of forward + backward, bytes."""

    tokens: int
    seconds: float
    peak: int  # of the worker that needs most
    sent: int  # by each worker


def build_layer(args: argparse.Namespace, tokens: int) -> LLNEncoderLayer:
    """A layer of the preset's size without dropout."""
    _, width, inner, heads = PRESETS[PRESET]
    cfg = TransformerConfig(dropout=0.0, attention_dropout=0.0, activation_fn="gelu", max_source_positions=tokens)
    cfg.encoder.embed_dim, cfg.encoder.ffn_embed_dim, cfg.encoder.attention_heads = width, inner, heads
    name, options = parse_attention_spec(args.attention)
    return LLNEncoderLayer(cfg, name, options, args.feed_forward_tokens)


def count_sent() -> list[int]:
    """From now on every collective adds the bytes that this worker gives to it."""
    sent: list[int] = []

    def counted(collective: Callable, index: int) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            sent.append(args[index].nbytes)
            return collective(*args, **kwargs)

        return call

    for name, index in COLLECTIVES.items():
        setattr(dist, name, counted(getattr(dist, name), index))
    return sent


def measure(rank: int, args: argparse.Namespace, tokens: int, folder: str) -> None:
    """A worker: its seconds of each repeat, peak and bytes, as a file of the folder."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    store = dist.FileStore(f"{folder}/store", args.workers)
    dist.init_process_group("gloo", store=store, world_size=args.workers, rank=rank)
    layer = build_layer(args, tokens)
    attention = layer.self_attn.attention
    attention.group = dist.group.WORLD
    first, end = shard_bounds(tokens, args.workers, attention.shard_multiple or 1)[rank]
    sent = count_sent()

    def run(x: Tensor) -> None:
        sent.clear()
        layer(x, encoder_padding_mask=None).sum().backward()
        x.grad = None

    def hidden(count: int) -> Tensor:
        return torch.randn(count, 1, layer.embed_dim, requires_grad=True)

    run(hidden(256))  # loads what is loaded on first use
    x = hidden(end - first)
    peak = resident_peak_of(lambda: run(x))
    seconds = []
    for _ in range(REPEATS):
        dist.barrier()
        begin = time.perf_counter()
        run(x)
        seconds.append(time.perf_counter() - begin)
    Path(folder, f"{rank}.json").write_text(json.dumps({"seconds": seconds, "peak": peak, "sent": sum(sent)}))


def measure_length(args: argparse.Namespace, tokens: int) -> Row:
    """All workers of one length. Raises: UserError where one of them ends early, as without memory."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            processes.spawn(measure, (args, tokens, folder), nprocs=args.workers)
        except (processes.ProcessExitedException, processes.ProcessRaisedException) as error:
            reason = str(error).strip().splitlines()[-1]
            raise UserError(f"{tokens} tokens: a worker has ended, is there memory enough? {reason}") from error
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(args.workers)]
    seconds = [max(times) for times in zip(*(worker["seconds"] for worker in found), strict=True)]
    peak = max(worker["peak"] for worker in found)
    return Row(tokens, median(seconds), peak, found[0]["sent"])


def table(rows: list[Row]) -> str:
    cells = [["tokens", "seconds", "peak of a worker [GB]", "sent by a worker [kB]"]]
    for row in rows:
        cells.append([f"{row.tokens:,}", f"{row.seconds:.2f}", f"{row.peak / 1e9:.2f}", f"{row.sent / 1e3:.1f}"])
    exponent = growth([(row.tokens, row.seconds) for row in rows])
    if exponent is None:
        return aligned(cells)
    return f"{aligned(cells)}\nseconds grow like N^{exponent:.2f}"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = program_parser("python -m scripts.benchmarks.sequence_parallel", __doc__)
    parser.add_argument("--tokens", nargs="+", type=at_least_one, default=[131072, 262144, 524288])
    parser.add_argument("--workers", type=at_least_one, default=2)
    parser.add_argument("--threads", type=at_least_one, default=1, help="of each worker")
    parser.add_argument("--attention", default="lln_diag", metavar="NAME[:OPTION=VALUE,...]")
    parser.add_argument("--feed-forward-tokens", type=int, default=0, help="the model's option: less memory; 0 = all")
    args = parser.parse_args(argv)
    if not can_measure_resident_peak():
        parser.error("memory is measured on Linux alone")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return run_main(lambda: benchmark(args))


def benchmark(args: argparse.Namespace) -> None:
    """Raises: UserError for an attention that cannot, and where memory runs out."""
    try:
        layer = build_layer(args, 1)
    except ValueError as error:
        raise UserError(str(error)) from error
    if layer.self_attn.attention.shard_multiple is None:
        raise UserError(f"attention {args.attention} cannot share a sequence over workers")
    rows = []
    for tokens in sorted(args.tokens):
        rows.append(measure_length(args, tokens))
        print(f"N = {tokens} done: {rows[-1].seconds:.2f} s", file=sys.stderr)
    sizes = f"{PRESET}, {args.attention}, feed_forward_tokens {args.feed_forward_tokens}"
    print(f"{args.workers} workers of {args.threads} threads, {sizes}, torch {torch.__version__}\n{table(rows)}")


if __name__ == "__main__":
    sys.exit(main())
