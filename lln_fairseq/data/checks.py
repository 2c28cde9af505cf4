"""Binarised data that is damaged or does not belong together, told in one line before fairseq reads it.

fairseq alone fails in the midst of a training (a truncated .bin, an id beyond the embedding; on a GPU as a failed
assertion of the device), or not at all: a dictionary that lost its last lines gives <mask> in the place of a word.
The ids are read once, in chunks: 0.1 s for 500 MB, a tenth of what fairseq takes to read the same file beforehand.
"""

import struct
from collections.abc import Iterator
from itertools import count
from math import isfinite
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lln_fairseq.errors import InputError

SPECIAL = 4  # <s>, <pad>, </s>, <unk>, which dict.txt does not list
EOS = 2
OVERWRITE = " #fairseq:overwrite"
_AT_ONCE = 1 << 22
_ANEW = "prepare the data again"
_MAGIC, _HEADER = b"MMIDIDX\x00", struct.Struct("<9sQBQ")  # magic, version, code of the type, samples
_TYPES = {
    1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16, 9: np.uint32, 10: np.uint64
}  # fmt: skip


class Samples(NamedTuple):
    """A data set's ids, one sample after the other, and the length of each sample."""

    ids: np.ndarray
    lengths: np.ndarray


def read_symbols(path: Path) -> list[str]:
    """The symbols of dict.txt. Raises: InputError where fairseq could not read it, or a symbol is there twice."""
    lines = _read_lines(path)
    seen = {"<s>", "<pad>", "</s>", "<unk>"}
    symbols = []
    for number, line in enumerate(lines, start=1):
        entry = line.rstrip()
        symbol, space, times = entry.removesuffix(OVERWRITE).rpartition(" ")
        try:
            int(space and times)
        except ValueError as error:
            found = f"Incorrect dictionary format, expected a symbol and its count, found {line[:40]!r}"
            raise InputError(f"{path}, line {number}: {found}; {_ANEW}") from error
        if symbol in seen and not entry.endswith(OVERWRITE):
            raise InputError(f"{path}, line {number}: the symbol {symbol!r} is there twice; {_ANEW}")
        seen.add(symbol)
        symbols.append(symbol)
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
    size, rows = SPECIAL + len(read_symbols(dictionary)), 0
    for name, samples in _data_sets(prefix, combine):
        rows += len(samples.lengths)
        for part in _parts(samples.ids):
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
        first = ids[np.minimum(np.cumsum(lengths) - lengths, len(ids) - 1)].astype(np.int64) - SPECIAL
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
        samples = open_samples(name)
        if samples is None:
            return
        yield name, samples


def open_samples(prefix: str) -> Samples | None:
    """The data set in prefix.idx and prefix.bin; None where there is none or it is in another of fairseq's formats.

    Raises: InputError where one file is missing, or they are damaged.
    """
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    there = [path for path in (index, data) if path.is_file()]
    if not there:
        return None
    if len(there) == 1:
        raise InputError(f"{index if there == [data] else data} is missing beside {there[0]}; {_ANEW}")
    try:
        return _read(index, data)
    except OSError as error:
        raise InputError(f"{index} and .bin cannot be read: {error}; {_ANEW}") from error


def _read(index: Path, data: Path) -> Samples | None:
    with index.open("rb") as file:
        header = file.read(_HEADER.size)
    if not header.startswith(_MAGIC):
        return None
    magic, version, code, samples = _HEADER.unpack(header.ljust(_HEADER.size, b"\0"))
    kind = np.dtype(_TYPES.get(code, np.void))
    known = (magic, version) == (_MAGIC + b"\0", 1) and code in _TYPES
    if not known or index.stat().st_size != _HEADER.size + 12 * samples:
        raise InputError(f"{index} is damaged or cut off; {_ANEW}")
    if samples == 0 or data.stat().st_size == 0:
        raise InputError(f"{data} is empty; {_ANEW}")
    lengths = np.memmap(index, np.int32, "r", _HEADER.size, samples)
    pointers = np.memmap(index, np.int64, "r", _HEADER.size + 4 * samples, samples)
    end = 0
    for some, begins in zip(_parts(lengths), _parts(pointers), strict=True):
        sizes = some.astype(np.int64) * kind.itemsize
        if (sizes < 0).any() or (begins != end + np.cumsum(sizes) - sizes).any():
            raise InputError(f"{index} is damaged; {_ANEW}")
        end += int(sizes.sum())
    if end != data.stat().st_size:
        raise InputError(f"{data} has {data.stat().st_size} bytes, {index} says {end}: one is cut off; {_ANEW}")
    return Samples(np.memmap(data, kind, "r"), lengths)


def _parts(array: np.ndarray) -> Iterator[np.ndarray]:
    """The array in pieces that fit the memory, without the memory map's own slow class."""
    plain = array.view(np.ndarray)
    return (plain[start : start + _AT_ONCE] for start in range(0, len(plain), _AT_ONCE))
