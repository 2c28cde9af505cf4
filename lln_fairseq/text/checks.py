"""Check binarized data before fairseq reads it. Damaged or mismatched files are reported in one line.

Without these checks, a truncated .bin file makes fairseq fail in the middle of a run. So does an id that the embedding
does not have, on a GPU with a device-side assert. If dict.txt lost its last line, fairseq does not fail at all, and
<mask> gets the id of a word. The checks read the ids once, in chunks, which takes 0.1 s for 500 MB. Of several workers,
each reads a share of the ids.
"""

from collections.abc import Iterable, Iterator
from itertools import count
from math import isfinite
from pathlib import Path

import numpy as np

from lln_fairseq.errors import UserError
from lln_fairseq.text.binary_format import Samples, iterate_chunks, read_dataset
from lln_fairseq.text.special_symbols import EOS, NUM_SPECIAL, parse_dictionary

_ADVICE = "prepare the data again"
# The programs of data_prep, by the names of the directories that they write.
PROGRAMS = {"wikitext-103": "wikitext103", "glue": "glue", "lra": "lra", "demo": "demo"}


def require_binarized(directory: str | Path, name: str) -> None:
    """Raise UserError if a data directory lacks a dictionary: dict.txt, input0/dict.txt or label/dict.txt.

    The message says what the directory has instead, or how to prepare the data.
    """
    path = Path(directory)
    if (path / name).is_file():
        return
    if name == "dict.txt" and (path / "input0").is_dir():
        raise UserError(f"{path} has labeled rows, for a classifier, but text without labels is needed")
    if name == "input0/dict.txt" and (path / "dict.txt").is_file():
        raise UserError(f"{path} has text without labels, but labeled rows are needed, for a classifier")
    if name == "label/dict.txt" and any(path.glob("label/*.label")):
        raise UserError(
            f"{path} has the numbers of a regression, but classes are needed: train with glue=stsb, or with "
            "--regression-target --num-classes 1 (task.regression_target=true task.num_classes=1)"
        )
    for dictionary in sorted(path.glob(f"*/{name}")):
        raise UserError(f"{path / name} is missing: did you mean {str(dictionary).removesuffix(f'/{name}')}?")
    reason = f"{path / name} is missing"
    if not path.exists():
        reason = f"{path} does not exist"
    advice = "see docs/data.md"
    for part, program in PROGRAMS.items():
        if part in path.parts:
            advice = f"see python -m data_prep.{program} --help"
    raise UserError(f"{reason}: prepare the data first, {advice}")


def read_symbols(path: Path) -> list[str]:
    """Return the symbols of a dict.txt in order. Symbol i, from 0, has fairseq's id 4 + i.

    UserError is raised if the file cannot be read, is empty, repeats a symbol, or has a line that fairseq cannot parse.
    """
    try:
        symbols = parse_dictionary(_read_lines(path))
    except UserError as error:
        raise UserError(f"{path}, {error}; {_ADVICE}") from error
    if not symbols:
        raise UserError(f"{path} is empty; {_ADVICE}")
    return symbols


def _read_lines(path: Path) -> list[str]:
    """Return the lines of a UTF-8 file with their line ends. As in fairseq, only LF, CR and CRLF end a line."""
    try:
        with path.open(encoding="utf-8") as file:
            return file.readlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}; {_ADVICE}") from error


def require_same_symbols(first: Path, *remaining: Path) -> None:
    """Raise UserError unless all these dict.txt files can be read and have the same symbols in the same order.

    In data that was binarized with another dictionary, the same id stands for another symbol.
    """
    symbols = read_symbols(first)
    for path in remaining:
        if read_symbols(path) != symbols:
            raise UserError(
                f"{path} has other symbols than {first}: data sets can be combined only if their dictionaries are equal"
            )


def check_lines(prefix: str, dictionary: Path, combine: bool = False) -> int:
    """Check the ids of a binarized data set of text, and return the number of its samples.

    Of several workers, each checks a part of the ids, so all of them must call this. A worker that finds a wrong id
    ends, and that ends the others.

    Args:
        prefix: the path of the data set without .bin and .idx.
        dictionary: the dict.txt to which the ids must belong.
        combine: also check and count the data sets prefix1, prefix2, ..., up to the first one that does not exist.

    Returns:
        The number of samples, or 0 if the data set does not exist or is not in fairseq's memory-mapped format.
    """
    size = NUM_SPECIAL + len(read_symbols(dictionary))
    rows = 0
    for name, samples in _read_datasets(prefix, combine):
        rows += len(samples.lengths)
        for ids in iterate_chunks(own_share(samples.ids)):
            if ids.max() >= size or ids.min() < 0:
                raise UserError(
                    f"{name}.bin holds the id {ids.max()}, but {dictionary} has {size} symbols: one of them is "
                    f"damaged or belongs to other data; {_ADVICE}"
                )
    return rows


def own_share(array: np.ndarray) -> np.ndarray:
    """Return the part of an array that belongs to this worker; the parts of all workers are the array."""
    import torch.distributed as dist  # here, because programs of data_prep do without torch until they need it

    if not dist.is_initialized():
        return array
    rank = dist.get_rank()
    workers = dist.get_world_size()
    return array[rank * len(array) // workers : (rank + 1) * len(array) // workers]


def check_labels(prefix: str, classes: int, rows: int, combine: bool = False) -> int:
    """Check the binarized labels of a classification, and return their number: `rows`, or 0 if there are none.

    Every sample must be exactly one label, with or without </s>. Class k has the id 4 + k. With `combine`, the data
    sets prefix1, prefix2, ... are checked too, up to the first one that does not exist; `rows` is the number for all
    together.
    """
    total = 0
    for name, (ids, lengths) in _read_datasets(prefix, combine):
        total += len(lengths)
        starts = np.cumsum(lengths) - lengths
        in_bounds = np.minimum(starts, len(ids) - 1)  # an empty sample at the end starts beyond the ids
        labels = ids[in_bounds].astype(np.int64) - NUM_SPECIAL
        counts_before = np.concatenate([[0], np.cumsum(ids != EOS)])  # of labels, before each id
        counts = counts_before[starts + lengths] - counts_before[starts]
        is_wrong = (labels < 0) | (labels >= classes) | (lengths > 2) | (counts != 1)
        if is_wrong.any():
            row = int(is_wrong.argmax())
            if counts[row] > 1:
                raise UserError(
                    f"{name}: sample {row + 1} has {counts[row]} labels, but multi-label classification is not "
                    "supported"
                )
            raise UserError(
                f"{name}: sample {row + 1} is not one of the {classes} labels in label/dict.txt; "
                f"one of them is damaged or belongs to other data; {_ADVICE}"
            )
    if total not in (0, rows):
        raise UserError(f"{prefix} has {total} labels for {rows} rows; {_ADVICE}")
    return total


def check_targets(path: Path, rows: int, targets: int) -> int:
    """Check the text file with the targets of a regression. Return `rows`, or 0 if there is no such file.

    It must have `rows` lines, each of `targets` finite numbers that are separated by white space.
    """
    if not path.exists():
        return 0
    lines = _read_lines(path)
    if len(lines) != rows:
        raise UserError(f"{path} has {len(lines)} lines for {rows} rows; {_ADVICE}")
    for number, line in enumerate(lines, start=1):
        values = line.split()
        if len(values) != targets or not all(map(is_finite_number, values)):
            raise UserError(
                f"{path}, line {number}: expected {targets} finite number(s), found {line[:40]!r}; {_ADVICE}"
            )
    return rows


def is_finite_number(text: str) -> bool:
    try:
        return isfinite(float(text))
    except ValueError:
        return False


def _read_datasets(prefix: str, combine: bool) -> Iterator[tuple[str, Samples]]:
    """Yield the prefix and the samples of every data set that fairseq's load_indexed_dataset would read.

    These are the data set `prefix` and, with `combine`, prefix1, prefix2 and so on. The first data set that does not
    exist, or is not in fairseq's memory-mapped format, ends the iteration.
    """
    numbers: Iterable[int] = (0,)
    if combine:
        numbers = count()
    for number in numbers:
        name = prefix
        if number > 0:
            name = f"{prefix}{number}"
        samples = read_dataset(name)
        if samples is None:
            return
        yield name, samples
