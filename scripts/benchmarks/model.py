"""The paper's Table 2: time of a training iteration and peak memory of a RoBERTa, by attention and sequence length.

    python -m scripts.benchmarks.model --preset tiny --json table2.json

An iteration is forward, backward and optimizer step of the masked-LM loss on random tokens, 15% of them masked. All
attentions sit in turn in one and the same model, repeat by repeat; medians count. `softmax` is torch's fused kernel,
which fairseq's own RoBERTa calls too under torch 2; `softmax_matrix` builds the N x N matrix, as fairseq did when the
paper was written. float16 is fairseq's: a half-precision model, float32 master weights, a constant loss scale.
Peak memory is measured: torch's allocated peak on a GPU, the resident-set peak of a child process on a CPU.
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
from scripts.benchmarks.model_report import Row, table
from scripts.benchmarks.model_training import DTYPES, MATRIX, SOFTMAX, Training, train_a_little
from scripts.terminal import at_least_one, program_parser

PAPER_ROWS = ("nystrom:conv_kernel=33", "flash:form=quadratic")  # with its convolution, as in the paper; FLASH-Quad
RECIPE_ROWS = ("softmax:dropout=0.1", "lln_diag:dropout=0.1")  # as the recipes train, where other rows have none
SMALL_VOCABULARY, VOCABULARY = 4000, 50265


def prepare_training(name: str, length: int, args: argparse.Namespace) -> Callable[[], None]:
    """Return a call that makes model and optimizer and runs two iterations."""
    torch.set_num_threads(args.threads)
    small = argparse.Namespace(**vars(args) | {"preset": "tiny"})
    train_a_little(name, 64, small)  # loads what is loaded on first use
    return functools.partial(train_a_little, name, length, args)


def measure(rows: list[Row], length: int, args: argparse.Namespace) -> None:
    """Fill in the rows of one length. What is out of memory is not timed."""
    for row in rows if args.memory else []:
        try:
            row.memory = peak_memory(args.device, prepare_training, row.attention, length, args)
        except OutOfMemory:
            row.oom = True
    timed = [row for row in rows if not row.oom]
    training = args.training(args, length)
    for row in timed:
        training.add(row.attention)
    runs = {row.attention: functools.partial(training.iteration, row.attention) for row in timed}
    times = interleaved(runs, args.device, args.repeats)
    for row in timed:
        row.time = Spread.of(times[row.attention])


def row_name(text: str) -> str:
    """The type of an argument: a row that can be built."""
    try:
        if text != MATRIX:
            check_attention_spec(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def add_training_options(parser: argparse.ArgumentParser, rows: list[str]) -> None:
    """Of the iterations that are measured, and of the measurement; `complete` fills in what depends on the device."""
    parser.add_argument("--attentions", nargs="+", type=row_name, default=rows, metavar="NAME[:OPTION=VALUE,...]",
                        help=f"default: {', '.join(rows)}")  # fmt: skip
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--attention-dropout", type=float, help="default: 0.1 on a GPU; 0 on a CPU, where torch's "
                        "fused softmax has none and would give way to the matrix")  # fmt: skip
    parser.add_argument("--threads", type=at_least_one, default=torch.get_num_threads(), help="of a CPU")
    parser.add_argument("--repeats", type=at_least_one, default=5)
    add_device_options(parser, DTYPES)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = program_parser("python -m scripts.benchmarks.model", __doc__)
    cuda = torch.cuda.is_available()
    rows = [MATRIX, SOFTMAX, *(name for name in sorted(MECHANISMS) if name != SOFTMAX), *PAPER_ROWS]
    if not cuda:
        rows += RECIPE_ROWS
    add_training_options(parser, rows)
    parser.add_argument("--lengths", nargs="+", type=at_least_one, default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--preset", choices=PRESETS, default="base" if cuda else "tiny")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, one repeat: does everything work?")
    parser.set_defaults(training=Training, batch=1)  # what an iteration is
    args = parser.parse_args(argv)
    if args.smoke:
        args.preset, args.lengths, args.repeats = "tiny", [96], 1  # more than a block, and than the landmarks
    args.vocabulary = SMALL_VOCABULARY if args.preset in ("nano", "tiny") else VOCABULARY
    return complete(args)


def complete(args: argparse.Namespace) -> argparse.Namespace:
    """Fill in what depends on the device, and set torch up for it."""
    on_gpu = args.device == "cuda"
    args.dtype = args.dtype or ("float16" if on_gpu else "float32")
    if args.attention_dropout is None:
        args.attention_dropout = 0.1 if on_gpu else 0.0
    args.memory &= on_gpu or can_measure_resident_peak()  # which needs Linux
    torch.set_num_threads(args.threads)
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)  # else the matrix would be float32
    return args


def settings(args: argparse.Namespace) -> dict[str, Any]:
    keys = ("preset", "batch", "vocabulary", "dropout", "attention_dropout", "dtype")
    found = {"device": device_name(args.device), "torch": torch.__version__, "model": "fairseq's RoBERTa"}
    return found | {key: getattr(args, key) for key in keys}


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return run_main(lambda: benchmark(args))


def benchmark(args: argparse.Namespace) -> None:
    """Measure, write the file after each length, and print the table."""
    disable_malloc_trim()
    rows: list[Row] = []
    for length in args.lengths:
        of_length = [Row(name, length) for name in args.attentions]
        measure(of_length, length, args)
        rows += of_length
        print(f"N = {length} done", file=sys.stderr)
        if args.json:
            content = {"settings": settings(args), "rows": [asdict(row) for row in rows]}
            args.json.write_text(json.dumps(content, indent=1) + "\n")
    print(table(settings(args), rows))


if __name__ == "__main__":
    sys.exit(main())
