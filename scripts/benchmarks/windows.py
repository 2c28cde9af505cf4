"""Time an encoder of transformers 5 with sliding windows: attn_implementation="lln_window" compared with its own.

    python -m scripts.benchmarks.windows --threads 1

The model has the sizes of ModernBERT-base and random weights, and nothing is downloaded. Its hidden states are compared
before anything is timed: a difference raises RuntimeError. All implementations are called in turn, and times are
medians. Memory is the growth at the peak of one call, in a process of its own.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers

import lln_fairseq.hub
from lln_fairseq.command import run_main
from lln_fairseq.provenance import describe_provenance, write_result
from lln_fairseq.terminal import at_least_one, program_parser, text_table
from lln_fairseq.timing import interleaved
from scripts.benchmarks.meter import device_name, output_file, peak_memory

SDPA = "sdpa"
IMPLEMENTATIONS = (SDPA, lln_fairseq.hub.LLN_WINDOW, "eager")
TOLERANCE = 1e-4  # for the largest difference of hidden states, which have a variance of 1


def make_model(layers: int, max_length: int) -> Any:
    """Return a model with random weights."""
    config = transformers.ModernBertConfig(num_hidden_layers=layers, max_position_embeddings=max(max_length, 8192))
    torch.manual_seed(0)
    return transformers.ModernBertModel(config).eval()


def prepare_call(model: Any, implementation: str, length: int) -> Callable[[], torch.Tensor]:
    """Return a function that computes the hidden states (1, N, C) of the model, always of the same tokens."""
    tokens = torch.randint(100, 50_000, (1, length), generator=torch.Generator().manual_seed(length))

    @torch.no_grad()
    def call() -> torch.Tensor:
        model.set_attn_implementation(implementation)
        return model(tokens, attention_mask=torch.ones_like(tokens)).last_hidden_state

    return call


def prepare_alone(implementation: str, length: int, layers: int, threads: int) -> Callable[[], torch.Tensor]:
    """Return `prepare_call` of a new model, whose first call is over, with this number of threads."""
    torch.set_num_threads(threads)
    model = make_model(layers, length)
    prepare_call(model, implementation, 256)()  # loads the kernels
    return prepare_call(model, implementation, length)


def check_same_states(calls: dict[str, Callable[[], torch.Tensor]]) -> None:
    """Raise RuntimeError if the hidden states of an implementation are not those of sdpa."""
    expected = calls[SDPA]()
    for name, call in calls.items():
        error = (call() - expected).abs().max().item()
        if not error <= TOLERANCE:
            raise RuntimeError(f"{name} gives other hidden states than {SDPA}: {error:.0e}")


def benchmark(args: argparse.Namespace) -> None:
    """Print a table with a row for every implementation and length, and write the file of --json."""
    torch.set_num_threads(args.threads)
    print(f"{device_name('cpu')}, {args.layers} layers, torch {torch.__version__}")
    rows = [["attention", "tokens", "ms", "speed of sdpa", "memory in MB"]]
    results = []
    model = make_model(args.layers, max(args.lengths))
    for length in args.lengths:
        calls = {name: prepare_call(model, name, length) for name in args.implementations}
        if not args.skip_check:
            check_same_states(calls)
        times = {name: statistics.median(values) for name, values in interleaved(calls, "cpu", args.repeats).items()}
        for name, time in times.items():
            memory = None
            if not args.no_memory:
                memory = peak_memory("cpu", prepare_alone, name, length, args.layers, args.threads) / 1e6
            results.append({"attention": name, "tokens": length, "milliseconds": time, "megabytes": memory})
            cells = [name, str(length), f"{time:.0f}", f"{times[SDPA] / time:.2f}"]
            rows.append([*cells, "" if memory is None else f"{memory:.0f}"])
    print(text_table(rows))
    if args.json:
        content = {"threads": args.threads, "layers": args.layers, "results": results}
        write_result(args.json, content, describe_provenance())


def main(argv: list[str] | None = None) -> int:
    """Parse the options, and run the benchmark."""
    parser = program_parser("python -m scripts.benchmarks.windows", __doc__)
    parser.add_argument("--lengths", type=at_least_one, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--threads", type=at_least_one, default=1)
    parser.add_argument("--layers", type=at_least_one, default=22)
    parser.add_argument("--repeats", type=at_least_one, default=5)
    parser.add_argument("--implementations", nargs="+", choices=IMPLEMENTATIONS, default=IMPLEMENTATIONS)
    parser.add_argument("--skip-check", action="store_true", help="do not compare the hidden states first")
    parser.add_argument("--no-memory", action="store_true", help="do not measure the memory")
    parser.add_argument("--json", type=output_file, help="write the results to this file")
    args = parser.parse_args(argv)
    if SDPA not in args.implementations:
        parser.error(f"--implementations needs {SDPA}, with which the others are compared")
    return run_main(lambda: benchmark(args))


if __name__ == "__main__":
    sys.exit(main())
