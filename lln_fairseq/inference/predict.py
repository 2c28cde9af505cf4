"""Predict a label or a score for every line of text with a fine-tuned checkpoint.

    lln-fairseq predict runs/sst2/checkpoint_best.pt --input texts.txt --output labels.tsv

A line is a text, or two texts separated by a tab for a task with pairs. Every line of the input gives one line of the
output: the label and its probability separated by a tab, or the score of a regression. An empty line gives an empty
line. A tab alone is a pair of two empty texts. With --on-error row, a line that cannot be read or predicted gives empty
columns and the error in one more column.
"""

import argparse
import gzip
import logging
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, islice, tee
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from lln_fairseq.errors import UserError
from lln_fairseq.inference.loading import add_positions_option, add_precision_option
from lln_fairseq.inference.outputs import STANDARD_STREAM, output_path, reject_input_as_output
from lln_fairseq.inference.text_model import Prediction, TextModel, load_text_model
from lln_fairseq.terminal import at_least_one
from lln_fairseq.text.read_lines import read_each_line, read_lines
from lln_fairseq.text.samples import BATCH_TOKENS, END, ON_ERROR, ON_LONG, ROW, LongTextError

logger = logging.getLogger(__name__)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="lln-fairseq predict", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="a fine-tuned checkpoint, for example runs/sst2_lln_diag/checkpoint_best.pt")
    add_text_options(parser)
    parser.add_argument(
        "--output", default=STANDARD_STREAM, help="a file, written completely or not at all (default: -)"
    )
    predict_lines(parser.parse_args(argv))


def add_text_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the input, the tokenizer and the computation to a parser."""
    parser.add_argument(
        "--input", default=STANDARD_STREAM, help="a UTF-8 file, which may be a .gz file (default: -, standard input)"
    )
    parser.add_argument("--data", help="directory with the dictionaries (default: those saved with the run)")
    parser.add_argument(
        "--tokenizer", help="a tokenizer, as for data_prep.glue (default: the one next to the dictionaries)"
    )
    add_precision_option(parser)
    parser.add_argument(
        "--on-long",
        choices=ON_LONG,
        default="truncate",
        help="cut texts that are longer than the model takes and say at the end how many, or end with an error at the "
        "first one (default: %(default)s)",
    )
    parser.add_argument(
        "--on-error",
        choices=ON_ERROR,
        default=END,
        help="end at the first line with an error, or give it the error instead of an output (default: %(default)s)",
    )
    parser.add_argument(
        "--batch-tokens",
        type=at_least_one,
        default=BATCH_TOKENS,
        help="tokens of a batch, padding included; a longer text is computed alone. A large GPU is faster with more "
        "(default: %(default)s)",
    )
    add_positions_option(parser)


def predict_lines(args: argparse.Namespace) -> None:
    """Write a prediction for every line of args.input to args.output. After an error, an output file is not written."""
    reject_input_as_output(args.input, args.output)
    with ExitStack() as stack:
        lines = stack.enter_context(open_lines(args.input, args.on_error))
        model = load_text_model(args.checkpoint, args.data, args.tokenizer, args.precision, args.positions)
        model.batch_tokens = args.batch_tokens
        if not model.finetuned:
            raise UserError(f"{args.checkpoint} was not fine-tuned and has no labels to predict")
        out = stack.enter_context(_open_output(args.output))
        for line in prediction_lines(model, lines, args.on_long, args.on_error):
            out.write(line + "\n")
        out.flush()


def prediction_lines(
    model: TextModel, lines: Iterable[str | UserError], on_long: str = "truncate", on_error: str = END
) -> Iterator[str]:
    """Yield an output line, without a newline, for each line, in order.

    The input is read as the output is consumed, a few thousand lines ahead. An empty line gives an empty line. A line
    with an error gives empty columns and the error in a last column; with `on_error="end"`, it raises the error.
    """
    predict = partial(model.predict_each, on_long=on_long, on_error=on_error)
    for output in map_lines(predict, _split_lines(lines, model.inputs, on_error)):
        if isinstance(output, UserError):
            columns = "\t" if model.task.cfg.regression_target else "\t\t"
            yield columns + " ".join(str(output).split())
        elif isinstance(output, Prediction):
            yield f"{output.label}\t{output.probability:.6f}"
        elif output is None:
            yield ""
        else:
            yield f"{output:.6f}"


def map_lines(compute: Callable[[Iterable[Any]], Iterator[Any]], rows: Iterable[Any]) -> Iterator[Any]:
    """Yield the output of `compute` for each row, in order, and None and a UserError as they are.

    `compute` gets the remaining rows and yields an output for each. A LongTextError names the line, the first row being
    line 1. At the end, a warning says how many outputs are errors.
    """
    rows, rows_ahead = tee(rows)
    outputs = compute(row for row in rows_ahead if _has_text(row))
    line = 0
    texts = 0
    errors = 0
    try:
        for row in rows:
            line += 1
            output = row
            if _has_text(row):
                output = next(outputs)
                texts += 1
            errors += isinstance(output, UserError)
            yield output
    except LongTextError as error:
        later = (number for number, row in enumerate(rows, start=line + 1) if _has_text(row))
        number = next(islice(chain([line], later), error.index - texts, None))
        raise LongTextError(f"line {number}", error.index, error.length, error.longest) from error
    if errors:
        logger.warning(f"{errors} of {line} lines have an error instead of an output")


def _has_text(row: Any) -> bool:
    return row is not None and not isinstance(row, UserError)


def _split_lines(
    lines: Iterable[str | UserError], inputs: Sequence[int], on_error: str
) -> Iterator[list[str] | UserError | None]:
    """Yield the texts of each line, None for an empty line, and the UserErrors among the lines.

    A UserError for a line whose number of texts is not among `inputs` is raised, or yielded with `on_error="row"`.
    """
    for number, line in enumerate(lines, start=1):
        if isinstance(line, UserError):
            yield line
            continue
        columns = line.split("\t")
        is_empty_pair = 2 in inputs and len(columns) > 1
        if not line.strip() and not is_empty_pair:
            yield None
            continue
        if len(columns) in inputs:
            yield columns
            continue
        forms = {1: "one text without tabs", 2: "two texts separated by a tab"}
        expected = " or ".join(forms[count] for count in inputs)
        error = UserError(f"line {number} must be {expected}, got {len(columns)} columns")
        if on_error != ROW:
            raise error
        yield error


@contextmanager
def open_lines(name: str, on_error: str = END) -> Iterator[Iterable[str | UserError]]:
    """Open a UTF-8 file, a .gz file of one, or standard input for "-", and yield an iterable of its lines.

    The iterable shows a progress bar, and raises the exceptions of `read_lines`, or with `on_error="row"` has them in
    the places of their lines.
    """
    read = read_each_line if on_error == ROW else read_lines
    if name == STANDARD_STREAM:
        if sys.stdin is None:  # closed by the shell, as with <&-
            raise UserError("standard input is closed: give --input FILE")
        yield tqdm(read(sys.stdin.buffer, "standard input"), unit=" lines", disable=None)
        return
    with ExitStack() as stack:
        file: Any = stack.enter_context(open(name, "rb"))
        if name.endswith(".gz"):
            file = stack.enter_context(gzip.open(file))
        try:
            yield tqdm(read(file, name), unit=" lines", disable=None)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(f"{name} is not a complete gzip file: {error}") from error


@contextmanager
def _open_output(name: str) -> Iterator[TextIO]:
    """Open standard output or a file, see `output_path`."""
    if name == STANDARD_STREAM and sys.stdout is None:  # closed by the shell, as with >&-
        raise UserError("standard output is closed: give --output FILE")
    if name == STANDARD_STREAM:
        yield sys.stdout
    else:
        with output_path(Path(name)) as path, path.open("w", encoding="utf-8", newline="\n") as out:
            yield out
