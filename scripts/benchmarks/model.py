"""Measure time and peak memory of a training iteration of a RoBERTa, by attention and sequence length (Table 2).

    python -m scripts.benchmarks.model --preset tiny --json table2.json

An iteration is a forward pass, a backward pass and an optimizer step of masked language modeling. The tokens are
random, and 15% of them are masked. All attentions are timed in turn in the same model, repeat by repeat, and the tables
show the medians. `softmax` is torch's fused kernel, which fairseq's own RoBERTa also calls with torch 2.
`softmax_matrix` builds the N x N matrix, as fairseq did when the paper was written. As in fairseq, float16 has float32
master weights, but the loss scale is constant. Peak memory is reported by torch on a GPU; on a CPU it is the peak of
the resident set of a child process.
"""

import argparse
import functools
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from lln_fairseq.attention import MECHANISMS
from lln_fairseq.attention.layers import check_attention_spec
from lln_fairseq.command import run_main
from lln_fairseq.models.presets import PRESETS
from lln_fairseq.training.malloc import disable_malloc_trim
from scripts.benchmarks.meter import (
    OutOfMemory,
    Spread,
    add_device_options,
    can_measure_resident_peak,
    device_name,
    interleaved,
    peak_memory,
)
from scripts.benchmarks.model_report import Row, results_text
from scripts.benchmarks.model_training import DTYPES, MATRIX, SOFTMAX, Training, run_two_iterations
from scripts.terminal import at_least_one, program_parser

PAPER_ROWS = ("nystrom:conv_kernel=33", "flash:form=quadratic")  # Nyströmformer as in the paper, and FLASH-Quad
RECIPE_ROWS = ("softmax:dropout=0.1", "lln_diag:dropout=0.1")  # with the recipes' attention dropout
SMALL_VOCABULARY = 4000  # vocabulary size of the presets nano and tiny
VOCABULARY = 50265


def prepare_training(name: str, length: int, args: argparse.Namespace) -> Callable[[], None]:
    """Return a function without arguments that runs two training iterations, to measure its memory.

    The returned function builds the model and the optimizer itself. Before it is returned, a tiny model is trained for
    two iterations, which loads the libraries that are loaded on first use, so that they are not measured.
    """
    torch.set_num_threads(args.threads)
    tiny = argparse.Namespace(**vars(args) | {"preset": "tiny"})
    run_two_iterations(name, 64, tiny)
    return functools.partial(run_two_iterations, name, length, args)


def measure_length(rows: list[Row], length: int, args: argparse.Namespace) -> None:
    """Measure the times of the rows of one length, and also the memory if args.memory is True.

    The results are written into `rows` in place. For a row that runs out of memory, `oom` is set to True, and its time
    is not measured.
    """
    if args.memory:
        for row in rows:
            try:
                row.memory = peak_memory(args.device, prepare_training, row.attention, length, args)
            except OutOfMemory:
                row.oom = True
    timed_rows = [row for row in rows if not row.oom]
    training = args.training(args, length)
    runs = {}
    for row in timed_rows:
        training.add(row.attention)
        runs[row.attention] = functools.partial(training.iteration, row.attention)
    times = interleaved(runs, args.device, args.repeats)
    for row in timed_rows:
        row.time = Spread.of(times[row.attention])


def attention_argument(text: str) -> str:
    """Return an argument unchanged if it is the spec of a mechanism that can be built, or "softmax_matrix".

    Use this function as the `type` of an argparse argument. For any other text, it raises ArgumentTypeError.
    """
    try:
        if text != MATRIX:
            check_attention_spec(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def add_training_options(parser: argparse.ArgumentParser, attentions: list[str]) -> None:
    """Add the options of a training benchmark to a parser. Then call `set_device_defaults` on the parsed arguments.

    Args:
        parser: the parser, which is changed in place.
        attentions: the default of --attentions.
    """
    parser.add_argument(
        "--attentions",
        nargs="+",
        type=attention_argument,
        default=attentions,
        metavar="NAME[:OPTION=VALUE,...]",
        help=f"default: {', '.join(attentions)}",
    )
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument(
        "--attention-dropout",
        type=float,
        help="default: 0.1 on a GPU; 0 on a CPU, where torch's fused softmax has no dropout and would build the matrix",
    )
    parser.add_argument("--threads", type=at_least_one, default=torch.get_num_threads(), help="threads on a CPU")
    parser.add_argument("--repeats", type=at_least_one, default=5)
    add_device_options(parser, DTYPES)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the arguments, fill in the defaults that depend on the device, and set torch's number of threads.

    The returned namespace also has `training`, `batch` and `vocabulary`, which no option sets.
    """
    parser = program_parser("python -m scripts.benchmarks.model", __doc__)
    has_gpu = torch.cuda.is_available()
    other_mechanisms = [name for name in sorted(MECHANISMS) if name != SOFTMAX]
    attentions = [MATRIX, SOFTMAX, *other_mechanisms, *PAPER_ROWS]
    if not has_gpu:
        # The other rows have no attention dropout on a CPU.
        attentions += RECIPE_ROWS
    add_training_options(parser, attentions)
    parser.add_argument("--lengths", nargs="+", type=at_least_one, default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--preset", choices=PRESETS, default="base" if has_gpu else "tiny")
    parser.add_argument("--smoke", action="store_true", help="check that everything runs: tiny sizes, one repeat")
    parser.set_defaults(training=Training, batch=1)
    args = parser.parse_args(argv)
    if args.smoke:
        args.preset = "tiny"
        args.lengths = [96]  # longer than a block, and than the number of landmarks
        args.repeats = 1
    args.vocabulary = SMALL_VOCABULARY if args.preset in ("nano", "tiny") else VOCABULARY
    return set_device_defaults(args)


def set_device_defaults(args: argparse.Namespace) -> argparse.Namespace:
    """Fill in the arguments whose defaults depend on the device, in place, and return the same namespace.

    This also sets torch's number of threads to args.threads.
    """
    on_gpu = args.device == "cuda"
    if args.dtype is None:
        args.dtype = "float16" if on_gpu else "float32"
    if args.attention_dropout is None:
        args.attention_dropout = 0.1 if on_gpu else 0.0
    args.memory = args.memory and (on_gpu or can_measure_resident_peak())
    torch.set_num_threads(args.threads)
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)  # otherwise softmax_matrix would compute in float32
    return args


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the benchmark by name, for the JSON file and the line above the tables."""
    values = {"device": device_name(args.device), "torch": torch.__version__, "model": "fairseq's RoBERTa"}
    for key in ("preset", "batch", "vocabulary", "dropout", "attention_dropout", "dtype"):
        values[key] = getattr(args, key)
    return values


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    args = parse_arguments(argv)
    return run_main(lambda: benchmark(args))


def benchmark(args: argparse.Namespace) -> None:
    """Measure all lengths and print the tables. The JSON file, if requested, is written after each length."""
    disable_malloc_trim()
    rows: list[Row] = []
    for length in args.lengths:
        rows_of_length = [Row(name, length) for name in args.attentions]
        measure_length(rows_of_length, length, args)
        rows += rows_of_length
        print(f"N = {length} done", file=sys.stderr)
        if args.json:
            content = {"settings": settings(args), "rows": [asdict(row) for row in rows]}
            args.json.write_text(json.dumps(content, indent=1) + "\n")
    print(results_text(settings(args), rows))


if __name__ == "__main__":
    sys.exit(main())
