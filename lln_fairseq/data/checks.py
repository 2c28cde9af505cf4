"""Binarised data that is damaged or does not belong together, told in one line before fairseq reads it.

fairseq alone fails in the midst of a training (a truncated .bin, an id beyond the embedding; on a GPU as a failed
assertion of the device), or not at all: a dictionary that lost its last lines gives <mask> in the place of a word.
The ids are read once, in chunks: 0.1 s for 500 MB, a tenth of what fairseq takes to read the same file beforehand.
"""

from collections.abc import Iterator
from itertools import count
from math import isfinite
from pathlib import Path

import numpy as np

from lln_fairseq.data.binary_format import Samples, in_pieces, read_dataset
from lln_fairseq.data.reporting import DataError
from lln_fairseq.data.special_symbols import EOS, NUM_SPECIAL, parse_dictionary
from lln_fairseq.errors import InputError

_ANEW = "prepare the data again"


def read_symbols(path: Path) -> list[str]:
    """Return the symbols of dict.txt.

    Raises:
        InputError: if fairseq could not read it, or a symbol is there twice.
    """
    try:
        symbols = parse_dictionary(_read_lines(path))
    except DataError as error:
        raise InputError(f"{path}, {error}; {_ANEW}") from error
    if not symbols:
        raise InputError(f"{path} is empty; {_ANEW}")
    return symbols


def _read_lines(path: Path) -> list[str]:
    """The lines as fairseq sees them: only LF, CR and CRLF end one."""
    try:
        with path.open(encoding="utf-8") as file:
            return file.readlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}; {_ANEW}") from error


def same_symbols(first: Path, *others: Path) -> None:
    """Raises: InputError where a dictionary of the same data has other symbols, which would get the wrong ids."""
    symbols = read_symbols(first)
    for path in others:
        if read_symbols(path) != symbols:
            raise InputError(f"{path} has other symbols than {first}: data with several dictionaries cannot be mixed")


def check_lines(prefix: str, dictionary: Path, combine: bool = False) -> int:
    """The number of samples of the data set `prefix`, with `combine` of prefix1, prefix2, ... too.

    Zero where there is none, or one in another of fairseq's formats. Raises: InputError where its files do not fit
    each other or an id is not in the dictionary.
    """
    size = NUM_SPECIAL + len(read_symbols(dictionary))
    rows = 0
    for name, samples in _data_sets(prefix, combine):
        rows += len(samples.lengths)
        for part in in_pieces(samples.ids):
            if part.max() >= size or part.min() < 0:
                raise InputError(
                    f"{name}.bin holds the id {part.max()}, but {dictionary} has {size} symbols: one of them is "
                    f"damaged or belongs to other data; {_ANEW}"
                )
    return rows


def check_labels(prefix: str, classes: int, rows: int, combine: bool = False) -> int:
    """The number of labels; zero where there are none.

    Raises: InputError where the data set is not one of `classes` labels for each of `rows`.
    """
    found = 0
    for name, (ids, lengths) in _data_sets(prefix, combine):
        found += len(lengths)
        first = ids[np.minimum(np.cumsum(lengths) - lengths, len(ids) - 1)].astype(np.int64) - NUM_SPECIAL
        wrong = (first < 0) | (first >= classes) | (lengths > 2)
        if wrong.any() or np.count_nonzero(ids != EOS) != len(lengths):
            raise InputError(
                f"{name}: sample {int(wrong.argmax()) + 1} is not one of the {classes} labels in label/dict.txt; one "
                f"of them is damaged or belongs to other data; {_ANEW}"
            )
    if found not in (0, rows):
        raise InputError(f"{prefix} has {found} labels for {rows} rows; {_ANEW}")
    return found


def check_targets(path: Path, rows: int, targets: int) -> int:
    """The number of rows with targets; zero where there is no such file.

    Raises: InputError where it is not `targets` finite numbers for each of `rows`.
    """
    if not path.exists():
        return 0
    lines = _read_lines(path)
    if len(lines) != rows:
        raise InputError(f"{path} has {len(lines)} lines for {rows} rows; {_ANEW}")
    for number, line in enumerate(lines, start=1):
        if len(values := line.split()) != targets or not all(map(_is_finite, values)):
            raise InputError(f"{path}, line {number}: expected numbers: {targets}, found {line[:40]!r}; {_ANEW}")
    return rows


def _is_finite(value: str) -> bool:
    try:
        return isfinite(float(value))
    except ValueError:
        return False


def _data_sets(prefix: str, combine: bool) -> Iterator[tuple[str, Samples]]:
    """What fairseq's load_indexed_dataset reads, with the names."""
    for number in count() if combine else (0,):
        name = f"{prefix}{number or ''}"
        try:
            samples = read_dataset(name)
        except DataError as error:
            raise InputError(str(error)) from error
        if samples is None:
            return
        yield name, samples
