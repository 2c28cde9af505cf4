"""Read the rows of a search, and split them into those that train, for validation and for the test."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lln_fairseq.errors import UserError
from lln_fairseq.text.read_lines import read_lines
from lln_fairseq.text.rows import Columns, read_file_rows

FEWEST = 300  # rows
FEWEST_GROUPS = 30
SHARES = {"test": 0.4, "valid": 0.2}  # of the rows; all others train
MOST = {"test": 2000, "valid": 1000}  # rows
MOST_ROWS = 20_000


@dataclass
class Rows:
    """Rows of one or two texts, with their labels and groups as text if there are any."""

    texts: list[tuple[str, ...]]
    labels: list[str] | None = None
    groups: list[str] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def first(self, count: int) -> "Rows":
        labels = None if self.labels is None else self.labels[:count]
        groups = None if self.groups is None else self.groups[:count]
        return Rows(self.texts[:count], labels, groups)


def read_labeled_rows(path: Path, columns: Columns) -> Rows:
    """Read the rows of a classifier. Raises UserError if there are fewer than FEWEST."""
    rows = read_file_rows(path, columns, lambda label, location: label)
    return _require_enough(Rows(list(zip(*rows.inputs, strict=True)), rows.labels, rows.groups), path)


def read_text_rows(path: Path) -> Rows:
    """Read the texts of an encoder, one in each line that is not empty. Raises UserError if there are too few."""
    with path.open("rb") as stream:
        texts: list[tuple[str, ...]] = [(line,) for line in read_lines(stream, str(path)) if line.strip()]
    return _require_enough(Rows(texts), path)


def _require_enough(rows: Rows, path: Path) -> Rows:
    different = len(set(rows.texts))
    if different < FEWEST:
        raise UserError(f"{path} has {different} different rows, but a search needs at least {FEWEST}")
    if rows.groups and len(set(rows.groups)) < FEWEST_GROUPS:
        raise UserError(f"{path} has {len(set(rows.groups))} groups, but a search needs at least {FEWEST_GROUPS}")
    return rows


def split_rows(rows: Rows, seed: int) -> dict[str, np.ndarray]:
    """Return the numbers of the rows of "train", "valid" and "test", in random order.

    Rows of the same group, or without groups those with the same longer text, are in the same split. So a question or a
    prompt may be in all of them.
    """
    keys = rows.groups or [max(texts, key=len) for texts in rows.texts]
    digests = [hashlib.sha256(f"{seed} {key}".encode()).digest() for key in keys]
    order = np.array(sorted(range(len(rows)), key=lambda number: digests[number]))
    numbers: dict[str, np.ndarray] = {}
    start = 0
    for split, share in SHARES.items():
        stop = start + round(share * len(rows))
        while stop < len(rows) and keys[order[stop]] == keys[order[stop - 1]]:
            stop += 1
        numbers[split] = order[start:stop]
        start = stop
    numbers["train"] = order[start:]
    if len(numbers["train"]) == 0 or len(numbers["valid"]) == 0:
        raise UserError("too many rows have the same text, or are in the same group, to split them")
    return numbers


def number_labels(labels: Sequence[str], names: Sequence[str], column: str) -> np.ndarray:
    """Return the numbers of the labels of a classifier, (rows,), or of a regression, whose `names` are empty, as float.

    The labels are the names of the classes, or all of them are their numbers, from 0.
    """
    if not names:
        try:
            numbers = np.array([float(label) for label in labels])
        except ValueError as error:
            raise UserError(f"--label {column}: the model has one output, so labels must be numbers: {error}") from None
        if not np.isfinite(numbers).all():
            raise UserError(f"--label {column}: a label is not finite")
        return numbers
    classes = {name: number for number, name in enumerate(names)}
    unknown = sorted(set(labels) - set(classes))
    if unknown and set(labels) <= {str(number) for number in range(len(names))}:
        return np.array([int(label) for label in labels])
    if unknown:
        raise UserError(
            f"--label {column}: {unknown[0]!r} is not a label of the model ({', '.join(names)[:200]}), and the labels "
            f"are not numbers from 0 to {len(names) - 1} either: write these in the file"
        )
    return np.array([classes[label] for label in labels])
