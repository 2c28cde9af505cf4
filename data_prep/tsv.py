"""Build a classification or regression from your own TSV files, for fairseq's sentence_prediction task.

    python -m data_prep.tsv --train train.tsv --valid valid.tsv --text review --label sentiment \\
        --tokenizer encoders/softmax --out data-bin/reviews

A file is UTF-8 and has a row per line, with tabs between the columns. Quotes are ordinary characters. The first line
has the names of the columns, unless --no-header is given. --text and --label select columns by name, or by number from
1. If the test file has no column of labels, `test` has no labels, and a line says so. A row that cannot be used is an
error.

The classes are the labels of `train`, in sorted order. With --labels they are those of a classifier, in its order.

The output has the layout of data_prep.glue. With --regression, label/SPLIT.label has the number of each row.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import Any

from lln_fairseq.errors import UserError
from lln_fairseq.files import sha256_of
from lln_fairseq.terminal import print_status
from lln_fairseq.text.labels import label_dictionary, read_class_names
from lln_fairseq.text.parallel_encoder import ParallelEncoder
from lln_fairseq.text.read_lines import SPLITS, read_lines

from . import manifest
from .command import add_build_options, add_tokenizer_option, run_command
from .download import load_tokenizer
from .glue import describe_result, glue_result_files, summarize_glue_task, write_glue_task
from .glue_rows import GlueRows, read_rows, split_cells
from .glue_tasks import GlueTask

FORMAT = 1  # increase it when the same settings give another result, so that old directories are rejected
QUOTED = re.compile(r'"(?:[^"]|"")*"')  # a cell as CSV writers quote it
LABEL_SEPARATORS = re.compile("[,;|]")
INTEGER = re.compile("[+-]?[0-9]+")
SCORES_ADVICE = "to predict the numbers themselves, give --regression"


@dataclass(frozen=True)
class Columns:
    """The columns of a TSV file: those of the texts and that of the label, by name or by number from 1."""

    texts: Sequence[str]
    label: str
    has_header: bool

    def find(self, column: str, first_line: Sequence[str], file: str) -> int | None:
        """Return the index, from 0, of a column that is given by name or by number from 1; None if there is none.

        `first_line` has the stripped cells of the first line. A name wins over a number. UserError is raised if two
        columns have the name.
        """
        if self.has_header and column in first_line:
            if first_line.count(column) > 1:
                raise UserError(f"{file}, line 1: two columns are called {column!r}; give the number of one, from 1")
            return first_line.index(column)
        if column.isdecimal() and 1 <= int(column) <= len(first_line):
            return int(column) - 1
        return None


class ClassLabels:
    """Checks and renames the labels of a classification.

    Attributes:
        classes: the possible labels, after renaming. Empty accepts any label.
        origin: where `classes` come from, for error messages.
        renamed: the new names by the old ones, for the labels that change.
        seen: the labels that `parse` has met, before renaming.
    """

    def __init__(self, source: Path | None, renamed: Mapping[str, str]) -> None:
        self.classes: list[str] = []
        if source is not None:
            self.classes = read_class_names(source)
        self.origin = f"the labels of {source}"
        self.renamed = renamed
        self.seen: set[str] = set()
        for old, new in renamed.items():
            if self.classes and new not in self.classes:
                raise UserError(
                    f"--rename {old} {new}: {new!r} is not one of {self.origin} ({', '.join(self.classes)[:200]})"
                )

    def parse(self, label: str, location: str) -> str:
        """Return the new name of a row's label, and add the label to `seen` under its old name.

        UserError is raised if the label is empty or in quotes, or if the new name is not a class.
        """
        if not label:
            raise UserError(f"{location}: the label is empty")
        check_quotes(label, location, is_name=True)
        self.seen.add(label)
        name = self.renamed.get(label, label)
        if self.classes and name not in self.classes:
            self.require_single(label, location)
            advice = "--rename OLD NEW renames labels"
            if look_like_scores(self.classes):
                advice = SCORES_ADVICE
            raise UserError(
                f"{location}: the label must be one of {self.origin} ({', '.join(self.classes)[:200]}), got {label!r}; "
                f"{advice}"
            )
        return name

    def require_single(self, label: str, location: str) -> None:
        """Raise UserError if a label is a list of known classes, separated by commas, semicolons or bars."""
        parts = [part.strip() for part in LABEL_SEPARATORS.split(label)]
        if len(parts) > 1 and all(self.renamed.get(part, part) in self.classes for part in parts):
            raise UserError(
                f"{location}: the row has {len(parts)} labels, {label!r}, but multi-label classification is not "
                "supported"
            )

    def use_training_labels(self, labels: Sequence[str], path: Path, first_line: int) -> None:
        """Set `classes` to the labels of the rows of a training file, whose first row is line `first_line`."""
        self.classes = sorted_classes(labels)
        self.origin = f"the labels of {path}"
        for number, label in enumerate(labels, start=first_line):
            self.require_single(label, f"{path}, line {number}")
        if len(self.classes) == 1:
            raise UserError(f"{path}: all rows have the same label, {self.classes[0]!r}")

    def check_names(self) -> None:
        """Raise UserError if fairseq's dictionary cannot store a class, or a label to be renamed is in no row."""
        label_dictionary(self.classes, {})
        for label in self.renamed:
            if label not in self.seen:
                raise UserError(f"--rename {label}: no row has the label {label!r}")


def sorted_classes(labels: Iterable[str]) -> list[str]:
    """Return the different labels in order: as numbers if all are integers, otherwise as text."""
    names = sorted(set(labels))
    try:
        return sorted(names, key=int)
    except ValueError:
        return names


def look_like_scores(classes: Sequence[str]) -> bool:
    """Return True if all classes are numbers, and not all of them are written as integers."""
    return all(map(_is_finite_number, classes)) and not all(map(INTEGER.fullmatch, classes))


def check_number(label: str, location: str) -> str:
    """Raise UserError unless the label of a regression is a finite number, and return its text."""
    if not _is_finite_number(label):
        raise UserError(f"{location}: the label of a regression must be one finite number, got {label!r}")
    return label


def _is_finite_number(text: str) -> bool:
    try:
        return isfinite(float(text))
    except ValueError:
        return False


def check_quotes(cell: str, location: str, is_name: bool = False) -> None:
    """Raise UserError if a CSV writer has quoted a cell.

    A text in quotes may be a quotation, so it is refused only if it has doubled quotes. A label or a column's name
    (`is_name`) is always refused.
    """
    if QUOTED.fullmatch(cell) and (is_name or '""' in cell):
        raise UserError(
            f"{location}: {cell[:40]} is quoted as in CSV, but quotes are ordinary characters here: write the file "
            "without quoting"
        )


def read_split(path: Path, split: str, columns: Columns, parse_label: Callable[[str, str], str]) -> GlueRows:
    """Read the rows of a split. `parse_label` is as for `read_rows`. Only `test` may lack the column of the label."""
    name = str(path)
    with path.open("rb") as stream:
        numbered_cells = split_cells(read_lines(stream, name))
        first = next(numbered_cells, None)
        if first is None:
            raise UserError(f"{name} is empty")
        first_line = [cell.strip() for cell in first[1]]
        if columns.has_header:
            for cell in first_line:
                check_quotes(cell, f"{name}, line 1", is_name=True)
        indices = []
        for column in (*columns.texts, columns.label):
            index = columns.find(column, first_line, name)
            if index is None:
                if split != "test" or column != columns.label or _is_spelled_otherwise(column, first_line):
                    raise UserError(_missing_column(column, first_line, columns, name))
                print_status(f"{name}: no column {column!r} among {', '.join(first_line)[:200]}: {split} has no labels")
            indices.append(index)
        if len(set(indices)) < len(indices):
            message = f"{name}: --text and --label must be different columns"
            if columns.has_header:
                message += "; if line 1 is a row, add --no-header"
            raise UserError(message)
        inputs = [index for index in indices[:-1] if index is not None]
        label = indices[-1]
        if not columns.has_header:
            numbered_cells = chain([first], numbered_cells)
        width = len(first_line)
        checked = _check_cells(numbered_cells, name, width)
        rows = read_rows(checked, name, width, inputs, label, parse_label)
    if columns.has_header and label is not None:
        header = first_line[label]
        if header == columns.label:
            if header.isdecimal():
                print_status(f"{name}: line 1 is the header, with a column {header!r}; if it is a row, add --no-header")
        elif header in (rows.labels or ()) or _is_finite_number(header):
            raise UserError(
                f"{name}, line 1 looks like a row instead of a header, with the label {header!r}: add --no-header"
            )
    return rows


def _is_spelled_otherwise(column: str, first_line: Sequence[str]) -> bool:
    """Return True if a cell of the first line is the name of the column with other capitals."""
    return column.casefold() in map(str.casefold, first_line)


def _missing_column(column: str, first_line: Sequence[str], columns: Columns, name: str) -> str:
    """Return the message that the file `name` has no such column. `first_line` has the cells of its first line."""
    if len(first_line) == 1:
        return f"{name}, line 1 has no tab: the columns must be separated by tabs, got {first_line[0][:200]!r}"
    advice = "without a header line, give --no-header and the numbers of columns"
    words = column.split(",")
    if len(words) > 1 and all(columns.find(word, first_line, name) is not None for word in words):
        advice = f"separate two columns by a space: {' '.join(words)}"
    elif not columns.has_header:
        advice = f"without a header line, columns are numbers from 1 to {len(first_line)}"
    return f"{name}, line 1: no column {column!r} among {', '.join(first_line)[:200]}; {advice}"


def _check_cells(
    numbered_cells: Iterable[tuple[int, list[str]]], name: str, width: int
) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows unchanged, after `check_quotes` of each cell. `width` is the number of columns.

    UserError is raised for a line with another number of cells and an unpaired quote, which is probably a part of a
    quoted cell. All other lines of a wrong width are yielded.
    """
    for number, cells in numbered_cells:
        if len(cells) != width and any(cell.count('"') % 2 for cell in cells):
            raise UserError(
                f"{name}, line {number}: expected {width} columns, got {len(cells)}; a cell in CSV quotes seems to "
                "hold a tab or a line break: replace them by spaces"
            )
        for cell in cells:
            check_quotes(cell, f"{name}, line {number}")
        yield number, cells


def read_splits(files: Mapping[str, Path], columns: Columns, labels: ClassLabels | None) -> dict[str, GlueRows]:
    """Read the rows of every split, with `train` first. `labels` is None for a regression.

    If `labels` has no classes yet, they are set to those of `train`.
    """
    rows: dict[str, GlueRows] = {}
    for split, path in files.items():
        if labels is None:
            rows[split] = read_split(path, split, columns, check_number)
            continue
        rows[split] = read_split(path, split, columns, labels.parse)
        if not labels.classes:
            first_line = 2 if columns.has_header else 1
            labels.use_training_labels(rows[split].labels or [], path, first_line)
    if labels is not None:
        labels.check_names()
    return rows


def build_tsv(
    out: Path,
    tokenizer: str,
    files: Mapping[str, Path],
    columns: Columns,
    regression: bool = False,
    labels: Path | None = None,
    renamed: Mapping[str, str] | None = None,
    workers: int | None = None,
    overwrite: bool = False,
) -> tuple[GlueTask, dict[str, Any]]:
    """Build the data set in `out`, and return its task and its manifest.

    A finished directory with the same settings is kept.

    Args:
        out: the output directory, which is created.
        tokenizer: a tokenizer that load_tokenizer accepts.
        files: the file of each split, "train" first. Without "train", a classification needs `labels`.
        columns: the columns of all files.
        regression: the labels are numbers.
        labels: a classifier's checkpoint or directory, which determines the classes and their order; None takes the
            labels of "train".
        renamed: the new names by the old ones, for the labels that change.
        workers: number of processes; None uses all cores.
        overwrite: build again even if the directory contains a result.
    """
    vocabulary = load_tokenizer(tokenizer)
    class_labels = None
    if not regression:
        class_labels = ClassLabels(labels, renamed or {})
    rows = read_splits(files, columns, class_labels)
    task = GlueTask(
        out.name,
        inputs=tuple(columns.texts),
        labels=(),
        published=(),
        label=columns.label,
        files={split: path.name for split, path in files.items()},
    )
    if class_labels is not None:
        task = replace(task, labels=tuple(class_labels.classes))
    sources = [{"name": path.name, "split": split, "sha256": sha256_of(path)} for split, path in files.items()]
    settings = {
        "program": "data_prep.tsv",
        "format": FORMAT,
        "source": {source["split"]: source["sha256"] for source in sources},
        "text": list(columns.texts),
        "label": columns.label,
        "header": columns.has_header,
        "labels": list(task.labels),
        "rename": dict(renamed or {}),
        "tokenizer": vocabulary.identity,
    }

    def write(rows: dict[str, GlueRows]) -> dict[str, Any]:
        with ParallelEncoder(vocabulary, workers) as encoder:
            datasets = write_glue_task(out, task, rows, encoder)
        return {"sources": sources, **describe_result(task, vocabulary, rows, datasets)}

    labeled_splits = [split for split in files if rows[split].labels is not None]
    result_files = glue_result_files(task, list(files), vocabulary, labeled_splits)
    return task, manifest.build_directory(out, settings, result_files, lambda: rows, write, overwrite)


def build_and_summarize(**options: Any) -> None:
    """Run `build_tsv` with these arguments, and print the counts of each split and the classes."""
    task, content = build_tsv(**options)
    print_status(summarize_glue_task(task, content))
    if task.labels:
        line = f"{len(task.labels)} classes (task.num_classes): {', '.join(task.labels)}"
        if look_like_scores(task.labels):
            line += f"; {SCORES_ADVICE}"
        print_status(line)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m data_prep.tsv", description=(__doc__ or "").split("\n")[0])
    for split in SPLITS:
        parser.add_argument(f"--{split}", type=Path, metavar="FILE", help=f"TSV file with the rows of {split}")
    parser.add_argument(
        "--text", nargs="+", default=["text"], metavar="COLUMN", help="column of the text, or columns of two texts"
    )
    parser.add_argument("--label", default="label", metavar="COLUMN", help="column of the label (default: %(default)s)")
    parser.add_argument("--no-header", action="store_true", help="the first line is a row: columns are numbers from 1")
    parser.add_argument("--regression", action="store_true", help="the labels are numbers to be predicted")
    parser.add_argument(
        "--labels",
        type=Path,
        metavar="CHECKPOINT",
        help="take the labels and their order from this classifier (default: the labels of train, sorted)",
    )
    parser.add_argument(
        "--rename", nargs=2, action="append", default=[], metavar=("OLD", "NEW"), help="rename a label of the files"
    )
    parser.add_argument("--out", type=Path, required=True, help="output directory")
    add_tokenizer_option(parser)
    add_build_options(parser)
    args = parser.parse_args(argv)
    files = {split: getattr(args, split) for split in SPLITS if getattr(args, split) is not None}
    if not files:
        parser.error("give at least one of --train, --valid and --test")
    if args.train and not args.valid:
        parser.error("give --valid with --train: a training run scores its checkpoints on these rows")
    if len(args.text) > 2:
        parser.error(f"--text must be one or two columns, got {len(args.text)}")
    if len(dict(args.rename)) < len(args.rename):
        parser.error("--rename must give every label once")
    if args.regression and (args.labels or args.rename):
        parser.error("--labels and --rename are for classifications")
    if not args.regression and not args.labels and not args.train:
        parser.error("without --train, a classification needs --labels CHECKPOINT")
    return run_command(
        partial(
            build_and_summarize,
            out=args.out,
            tokenizer=args.tokenizer,
            files=files,
            columns=Columns(args.text, args.label, not args.no_header),
            regression=args.regression,
            labels=args.labels,
            renamed=dict(args.rename),
            workers=args.workers,
            overwrite=args.overwrite,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
