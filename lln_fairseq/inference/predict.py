"""Labels or scores for lines of text, by a fine-tuned checkpoint.

    python -m lln_fairseq predict runs/sst2/checkpoint_best.pt --input texts.txt --output labels.tsv

A line is a text, or two texts with a tab between for a task of pairs. Every line of the input gives one line of the
output: the label and its probability with a tab between, or a score; an empty line gives an empty line.
"""

import argparse
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import repeat
from pathlib import Path
from typing import BinaryIO, TextIO

from tqdm import tqdm

from lln_fairseq.data.files import atomic_path
from lln_fairseq.data.text import read_lines
from lln_fairseq.errors import InputError
from lln_fairseq.inference.text_model import Prediction, TextModel, load

STANDARD = "-"  # standard input, standard output


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="lln-fairseq predict", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="a fine-tuned checkpoint, for example runs/sst2_lln_diag/checkpoint_best.pt")
    parser.add_argument("--input", default=STANDARD, help="a UTF-8 file (default: -, standard input)")
    parser.add_argument("--output", default=STANDARD, help="a file, written whole or not at all (default: -)")
    parser.add_argument("--data", help="directory with the training's dictionaries (default: what the run has kept)")
    parser.add_argument("--tokenizer", help="as of data_prep.glue (default: what lies with the dictionaries)")
    args = parser.parse_args(argv)
    predict(args)


def predict(args: argparse.Namespace) -> None:
    """Does what the command line asks for. Raises: UserError, OSError."""
    if args.input == STANDARD and sys.stdin is None:
        raise InputError("standard input is closed: give --input FILE")
    if args.output == STANDARD and sys.stdout is None:
        raise InputError("standard output is closed: give --output FILE")
    with ExitStack() as stack:
        file = sys.stdin.buffer if args.input == STANDARD else stack.enter_context(open(args.input, "rb"))
        model = load(args.checkpoint, args.data, args.tokenizer)
        if not model.finetuned:
            raise InputError(f"{args.checkpoint} was not fine-tuned and has no labels to predict")
        out = stack.enter_context(_output(args.output))
        lines = read(file, "standard input" if args.input == STANDARD else args.input)
        for line in predictions(model, tqdm(lines, unit=" lines", disable=None)):
            out.write(line + "\n")
        out.flush()


def read(file: BinaryIO, name: str) -> Iterator[tuple[int, str]]:
    """The number and the text of every line. Raises: UserError for one that is not UTF-8 or longer than 4 MiB."""
    return enumerate(read_lines(file, name), start=1)


def predictions(model: TextModel, lines: Iterable[tuple[int, str]]) -> Iterator[str]:
    """A line for each line, in order; a few thousand are in memory. Raises: InputError for a line of other columns."""
    empty = deque([0])  # how many empty lines are before each text that has been read, and at the end

    def texts() -> Iterator[list[str]]:
        for number, line in lines:
            if line.strip():
                empty.append(0)
                yield _columns(line, number, model.inputs)
            else:
                empty[-1] += 1

    for found in model.predict_each(texts()):
        yield from repeat("", empty.popleft())
        yield f"{found.label}\t{found.probability:.6f}" if isinstance(found, Prediction) else f"{found:.6f}"
    yield from repeat("", empty.popleft())


def _columns(line: str, number: int, wanted: int) -> list[str]:
    columns = line.split("\t")
    if len(columns) != wanted:
        form = "two texts with a tab between" if wanted == 2 else "one text without tabs"
        raise InputError(f"line {number} has {len(columns)} columns, and the model takes {form}")
    return columns


@contextmanager
def _output(name: str) -> Iterator[TextIO]:
    """The file, which appears when it is complete and replaces one of its name; or a device, or standard output."""
    path = Path(name)
    if name == STANDARD:
        yield sys.stdout
    elif path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8") as out:
            yield out
    else:
        with atomic_path(path) as part, part.open("w", encoding="utf-8", newline="\n") as out:
            yield out
