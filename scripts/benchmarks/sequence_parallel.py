"""Measure one encoder layer over a sequence that several workers of this machine share: time, memory, bytes sent.

    python -m scripts.benchmarks.sequence_parallel --tokens 131072 262144 524288 1048576

Every worker is a process (gloo) with its shard of the tokens. It runs the forward and the backward pass of an encoder
layer with the attention of --attention, once to measure the memory and then three times to measure the time. The table
shows the time of the slowest worker. The memory is the peak growth of the resident set, in the worker where it is
largest. The sent bytes are the bytes that a worker passes to the collectives of one forward and backward pass. Unlike
in training, freed memory is returned to the system.
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

from lln_fairseq.attention import Context
from lln_fairseq.attention.registry import parse_attention_spec
from lln_fairseq.command import run_main
from lln_fairseq.errors import UserError
from lln_fairseq.models.layer import LLNEncoderLayer
from lln_fairseq.models.presets import PRESETS
from lln_fairseq.models.token_shards import shard_bounds
from lln_fairseq.terminal import at_least_one, program_parser, text_table
from scripts.benchmarks.meter import can_measure_resident_peak, growth, resident_peak_of

PRESET = "small"
REPEATS = 3
COLLECTIVES = {"all_gather": 1, "all_reduce": 0}  # the position of the argument that a worker sends


@dataclass
class Row:
    """The results of one length."""

    tokens: int
    seconds: float  # of a forward and a backward pass
    peak: int  # bytes, in the worker where it is largest
    sent: int  # bytes, by each worker


def build_layer(args: argparse.Namespace, tokens: int) -> LLNEncoderLayer:
    """Return an encoder layer of the preset's size, without dropout, for sequences of up to `tokens` tokens."""
    _, width, inner, heads = PRESETS[PRESET]
    cfg = TransformerConfig(dropout=0.0, attention_dropout=0.0, activation_fn="gelu", max_source_positions=tokens)
    cfg.encoder.embed_dim = width
    cfg.encoder.ffn_embed_dim = inner
    cfg.encoder.attention_heads = heads
    name, options = parse_attention_spec(args.attention)
    return LLNEncoderLayer(cfg, name, options, args.feed_forward_tokens)


def count_sent_bytes() -> list[int]:
    """Patch torch's collectives for the rest of the process, and return a list to which they append their bytes."""
    sent: list[int] = []

    def counted(collective: Callable, index: int) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            sent.append(args[index].nbytes)
            return collective(*args, **kwargs)

        return call

    for name, index in COLLECTIVES.items():
        setattr(dist, name, counted(getattr(dist, name), index))
    return sent


def run_worker(rank: int, args: argparse.Namespace, tokens: int, directory: str) -> None:
    """Measure in the process of one worker, and write the results to DIRECTORY/RANK.json.

    The file has the seconds of each repeat, the peak memory in bytes, and the bytes sent in one repeat.
    """
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    store = dist.FileStore(f"{directory}/store", args.workers)
    dist.init_process_group("gloo", store=store, world_size=args.workers, rank=rank)
    layer = build_layer(args, tokens)
    attention = layer.self_attn.attention
    context = Context(group=dist.group.WORLD)
    first, end = shard_bounds(tokens, args.workers, attention.shard_multiple or 1)[rank]
    sent = count_sent_bytes()

    def run(x: Tensor) -> None:
        sent.clear()
        layer(x, context).sum().backward()
        x.grad = None

    def random_hidden(count: int) -> Tensor:
        return torch.randn(count, 1, layer.embed_dim, requires_grad=True)

    run(random_hidden(256))  # loads the libraries that are loaded on first use, so that they are not measured
    x = random_hidden(end - first)
    peak = resident_peak_of(lambda: run(x))
    seconds = []
    for _ in range(REPEATS):
        dist.barrier()
        start = time.perf_counter()
        run(x)
        seconds.append(time.perf_counter() - start)
    Path(directory, f"{rank}.json").write_text(json.dumps({"seconds": seconds, "peak": peak, "sent": sum(sent)}))
    # Otherwise, gloo's threads may abort the process while Python ends (pytorch/pytorch#179291).
    dist.barrier()
    dist.destroy_process_group()


def measure_length(args: argparse.Namespace, tokens: int) -> Row:
    with tempfile.TemporaryDirectory() as directory:
        try:
            processes.spawn(run_worker, (args, tokens, directory), nprocs=args.workers)
        except (processes.ProcessExitedException, processes.ProcessRaisedException) as error:
            reason = str(error).strip().splitlines()[-1]
            raise UserError(f"{tokens} tokens: a worker failed, perhaps because memory ran out: {reason}") from error
        results = [json.loads(Path(directory, f"{rank}.json").read_text()) for rank in range(args.workers)]
    seconds_of_workers = [worker["seconds"] for worker in results]
    seconds = [max(times) for times in zip(*seconds_of_workers, strict=True)]
    peak = max(worker["peak"] for worker in results)
    return Row(tokens, median(seconds), peak, results[0]["sent"])


def results_table(rows: list[Row]) -> str:
    """Return the rows as a table. If there are several lengths, a last line has the growth of the time with length."""
    cells = [["tokens", "seconds", "peak of a worker [GB]", "sent by a worker [kB]"]]
    for row in rows:
        cells.append([f"{row.tokens:,}", f"{row.seconds:.2f}", f"{row.peak / 1e9:.2f}", f"{row.sent / 1e3:.1f}"])
    exponent = growth([(row.tokens, row.seconds) for row in rows])
    if exponent is None:
        return text_table(cells)
    return f"{text_table(cells)}\nseconds grow like N^{exponent:.2f}"


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = program_parser("python -m scripts.benchmarks.sequence_parallel", __doc__)
    parser.add_argument("--tokens", nargs="+", type=at_least_one, default=[131072, 262144, 524288])
    parser.add_argument("--workers", type=at_least_one, default=2)
    parser.add_argument("--threads", type=at_least_one, default=1, help="threads of each worker")
    parser.add_argument("--attention", default="lln_diag", metavar="NAME[:OPTION=VALUE,...]")
    parser.add_argument(
        "--feed-forward-tokens",
        type=int,
        default=0,
        help="tokens that the feed-forward network computes at a time, to save memory; 0 means all (default)",
    )
    args = parser.parse_args(argv)
    if not can_measure_resident_peak():
        parser.error("this benchmark needs Linux: it cannot measure memory on other systems")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    return run_main(lambda: benchmark(args))


def benchmark(args: argparse.Namespace) -> None:
    """Measure all lengths, shortest first, and print the table."""
    try:
        layer = build_layer(args, 1)
    except ValueError as error:
        raise UserError(str(error)) from error
    if layer.self_attn.attention.shard_multiple is None:
        raise UserError(
            f"--attention {args.attention} cannot split a sequence across workers: use lln, block_diag or lln_diag"
        )
    rows = []
    for tokens in sorted(args.tokens):
        row = measure_length(args, tokens)
        rows.append(row)
        print(f"N = {tokens} done: {row.seconds:.2f} s", file=sys.stderr)
    settings = f"{PRESET}, {args.attention}, feed_forward_tokens {args.feed_forward_tokens}, torch {torch.__version__}"
    print(f"{args.workers} workers of {args.threads} threads, {settings}\n{results_table(rows)}")


if __name__ == "__main__":
    sys.exit(main())
