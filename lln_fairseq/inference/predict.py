"""Predict a label or a score for every line of text with a fine-tuned checkpoint.

    lln-fairseq predict runs/sst2/checkpoint_best.pt --input texts.txt --output labels.tsv

A line is a text, or two texts separated by a tab for a task with pairs. Every line of the input gives one line of the
output: the label and its probability separated by a tab, or the score of a regression. An empty line gives an empty
line. A tab alone is a pair of two empty texts.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice, tee
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from lln_fairseq.errors import UserError
from lln_fairseq.inference.loading import add_positions_option, add_precision_option
from lln_fairseq.inference.outputs import STANDARD_STREAM, output_path, reject_input_as_output
from lln_fairseq.inference.text_model import Prediction, TextModel, load_text_model
from lln_fairseq.text.read_lines import read_lines
from lln_fairseq.text.samples import ON_LONG, LongTextError


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
    """Add --input, --data, --tokenizer, --precision, --on-long and --positions to a parser."""
    parser.add_argument("--input", default=STANDARD_STREAM, help="a UTF-8 file (default: -, standard input)")
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
    add_positions_option(parser)


def predict_lines(args: argparse.Namespace) -> None:
    """Write a prediction for every line of args.input to args.output. After an error, an output file is not written."""
    reject_input_as_output(args.input, args.output)
    with ExitStack() as stack:
        lines = stack.enter_context(open_lines(args.input))
        model = load_text_model(args.checkpoint, args.data, args.tokenizer, args.precision, args.positions)
        if not model.finetuned:
            raise UserError(f"{args.checkpoint} was not fine-tuned and has no labels to predict")
        out = stack.enter_context(_open_output(args.output))
        for line in prediction_lines(model, enumerate(lines, start=1), args.on_long):
            out.write(line + "\n")
        out.flush()


def prediction_lines(model: TextModel, lines: Iterable[tuple[int, str]], on_long: str = "truncate") -> Iterator[str]:
    """Yield an output line, without a newline, for each pair of an input line's number and text, in order.

    The input is read as the output is consumed, a few thousand lines ahead. An empty line gives an empty line.
    """
    rows, rows_ahead = tee(_split_lines(lines, model.inputs))
    predicted = 0
    try:
        for prediction in model.predict_each((texts for _, texts in rows_ahead if texts), on_long):
            predicted += 1
            for _, texts in rows:
                if texts:
                    break
                yield ""
            if isinstance(prediction, Prediction):
                yield f"{prediction.label}\t{prediction.probability:.6f}"
            else:
                yield f"{prediction:.6f}"
    except LongTextError as error:
        numbers = (number for number, texts in rows if texts)  # of the texts without a prediction
        number = next(islice(numbers, error.index - predicted, None))
        raise LongTextError(f"line {number}", error.index, error.length, error.longest) from error
    for _ in rows:
        yield ""


def _split_lines(lines: Iterable[tuple[int, str]], inputs: Sequence[int]) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the texts of each line, without texts for an empty line.

    UserError is raised if the number of texts in another line is not among `inputs`.
    """
    for number, line in lines:
        columns = line.split("\t")
        is_empty_pair = 2 in inputs and len(columns) > 1
        if not line.strip() and not is_empty_pair:
            yield number, []
            continue
        if len(columns) not in inputs:
            forms = {1: "one text without tabs", 2: "two texts separated by a tab"}
            expected = " or ".join(forms[count] for count in inputs)
            raise UserError(f"line {number} must be {expected}, got {len(columns)} columns")
        yield number, columns


@contextmanager
def open_lines(name: str) -> Iterator[Iterable[str]]:
    """Open a UTF-8 file, or standard input for "-", and yield an iterable of its lines without their ends.

    The iterable shows a progress bar, and raises the exceptions of `read_lines`.
    """
    if name != STANDARD_STREAM:
        with open(name, "rb") as file:
            yield tqdm(read_lines(file, name), unit=" lines", disable=None)
    elif sys.stdin is None:  # closed by the shell, as with <&-
        raise UserError("standard input is closed: give --input FILE")
    else:
        yield tqdm(read_lines(sys.stdin.buffer, "standard input"), unit=" lines", disable=None)


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
