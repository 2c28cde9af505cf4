"""The paper's Table 2: time of a training iteration and peak memory of a RoBERTa, by attention and sequence length.

    python -m scripts.benchmarks.model --preset tiny --json table2.json --png table2.png

An iteration is forward, backward and optimizer step of the masked-LM loss on random tokens, 15% of them masked. All
attentions sit in turn in one and the same model, repeat by repeat; medians count. `softmax` is torch's fused kernel,
which fairseq's own RoBERTa calls too under torch 2; `softmax_matrix` builds the N x N matrix, as fairseq did when the
paper was written. float16 is fairseq's: a half-precision model, float32 master weights, a constant loss scale.
Peak memory is measured: torch's allocated peak on a GPU, the resident-set peak of a child process on a CPU.
"""

import argparse
import contextlib
import functools
import gc
import sys
from pathlib import Path
from typing import Any

import torch

from lln_fairseq.attention import MECHANISMS
from lln_fairseq.attention.layers import check_row
from lln_fairseq.command import run_main
from lln_fairseq.models.presets import PRESETS
from lln_fairseq.training.malloc import disable_malloc_trim
from scripts.benchmarks.meter import (
    OutOfMemory,
    Spread,
    can_measure_resident_peak,
    check_outputs,
    in_child,
    interleaved,
    is_out_of_memory,
    limited_memory,
    resident_peak_of,
)
from scripts.benchmarks.model_report import Row, draw, table, write_json
from scripts.benchmarks.model_training import DTYPES, MATRIX, SOFTMAX, Training, train_a_little

PAPER_ROWS = ("nystrom:conv_kernel=33", "flash:form=quadratic")  # with its convolution, as in the paper; FLASH-Quad
RECIPE_ROWS = ("softmax:dropout=0.1", "lln_diag:dropout=0.1")  # as the recipes train, where other rows have none
SMALL_VOCABULARY, VOCABULARY = 4000, 50265


def peak_memory(name: str, length: int, args: argparse.Namespace) -> int:
    """Peak of model, optimizer and two iterations in bytes. Raises: OutOfMemory."""
    if args.device == "cpu":
        return in_child(resident_peak, name, length, args)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        train_a_little(name, length, args)
    except torch.OutOfMemoryError:
        raise OutOfMemory from None
    return torch.cuda.max_memory_allocated()


def resident_peak(name: str, length: int, args: argparse.Namespace) -> int:
    """The child's part on a CPU."""
    torch.set_num_threads(args.threads)
    small = argparse.Namespace(**vars(args) | {"preset": "tiny"})
    train_a_little(name, 64, small)  # loads what is loaded on first use
    return resident_peak_of(lambda: train_a_little(name, length, args))


def measure(rows: list[Row], length: int, args: argparse.Namespace) -> None:
    """Fill in the rows of one length. What is out of memory is not timed."""
    for row in rows if args.memory else []:
        try:
            row.memory, row.oom = peak_memory(row.attention, length, args), False
        except OutOfMemory:
            row.memory, row.oom = None, True
    if not args.time:
        return
    training = args.training(args, length)
    for row in rows:
        row.oom = row.oom or not fits(training, row.attention)
    runs = {row.attention: functools.partial(training.iteration, row.attention) for row in rows if not row.oom}
    times = interleaved(runs, args.device, args.repeats, args.seconds)
    for row in rows:
        row.time = None if row.oom else Spread.of(times[row.attention])


def fits(training: Training, name: str) -> bool:
    """Whether an iteration runs beside the other attentions' parameters; on a CPU the child has found out."""
    try:
        training.add(name)
        training.iteration(name)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        del error
        gc.collect()
        return False
    return True


def row_name(text: str) -> str:
    """The type of an argument: a row that can be built."""
    try:
        if text != MATRIX:
            check_row(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """Of the iterations that are measured, and of the measurement; `complete` fills in what depends on the device."""
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--attention-dropout", type=float, help="default: 0.1 on a GPU; 0 on a CPU, where torch's "
                        "fused softmax has none and would give way to the matrix")  # fmt: skip
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="default: float16 on a GPU, float32 on a CPU")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of a CPU")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="no more repeats of what took longer than this")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="skip the measurement of memory")
    parser.add_argument("--no-time", dest="time", action="store_false", help="skip the measurement of time")
    parser.add_argument("--json", type=Path, help="write the figures here")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmarks.model", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    rows = [MATRIX, SOFTMAX, *(name for name in sorted(MECHANISMS) if name != SOFTMAX), *PAPER_ROWS]
    cuda = torch.cuda.is_available()
    rows += () if cuda else RECIPE_ROWS
    parser.add_argument("--attentions", nargs="+", type=row_name, default=rows, metavar="NAME[:OPTION=VALUE,...]",
                        help=f"default: all, {', '.join((*PAPER_ROWS, *RECIPE_ROWS))}")  # fmt: skip
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--preset", choices=PRESETS, default="base" if cuda else "tiny")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--vocabulary", type=int, help=f"default: {VOCABULARY}, RoBERTa's; "
                        f"{SMALL_VOCABULARY} with --preset nano or tiny")  # fmt: skip
    add_training_options(parser)
    parser.add_argument("--compile", action="store_true", help="with torch.compile")
    parser.add_argument("--png", type=Path, help="draw them here, on logarithmic axes")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, one repeat: does everything work?")
    parser.set_defaults(training=Training)  # what an iteration is
    args = parser.parse_args(argv)
    check_outputs(parser, args.json, args.png)
    if min(*args.lengths, args.batch) < 1:
        parser.error("lengths and batch must be at least 1")
    if args.smoke:
        args.preset, args.lengths, args.repeats = "tiny", [96], 1  # more than a block, and than the landmarks
    args.vocabulary = args.vocabulary or (SMALL_VOCABULARY if args.preset in ("nano", "tiny") else VOCABULARY)
    return complete(parser, args)


def complete(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.Namespace:
    """Checks what add_training_options added, and sets torch up for it."""
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch finds no CUDA device")
    if min(args.repeats, args.threads) < 1:
        parser.error("repeats and threads must be at least 1")
    on_gpu = args.device == "cuda"
    args.dtype = args.dtype or ("float16" if on_gpu else "float32")
    if args.attention_dropout is None:
        args.attention_dropout = 0.1 if on_gpu else 0.0
    args.memory &= on_gpu or can_measure_resident_peak()  # which needs Linux
    torch.set_num_threads(args.threads)
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)  # else the matrix would be float32
    return args


def settings(args: argparse.Namespace) -> dict[str, Any]:
    device = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {args.threads} threads"
    keys = ("preset", "batch", "vocabulary", "dropout", "attention_dropout", "dtype", "compile")
    found = {"device": device, "torch": torch.__version__, "model": "fairseq's RoBERTa"}
    return found | {key: getattr(args, key) for key in keys}


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return run_main(lambda: benchmark(args))


def benchmark(args: argparse.Namespace) -> None:
    disable_malloc_trim()
    rows: list[Row] = []
    for length in args.lengths:
        with limited_memory() if args.device == "cpu" else contextlib.nullcontext():
            rows += [Row(name, length) for name in args.attentions]
            measure(rows[-len(args.attentions) :], length, args)
        print(f"N = {length} done", file=sys.stderr)
        if args.json:
            write_json(args.json, settings(args), rows)
    print(table(settings(args), rows))
    if args.png:
        draw(args.png, settings(args), rows)


if __name__ == "__main__":
    sys.exit(main())
