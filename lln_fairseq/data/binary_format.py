"""Write and read fairseq's memory-mapped datasets, without fairseq.

PREFIX.bin holds the ids of all samples. PREFIX.idx holds a magic number, a version, a code for the type of the ids, the
number of samples, and for each sample its length and its offset in PREFIX.bin. Every sample ends with </s>.
"""

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lln_fairseq.data.files import atomic_path
from lln_fairseq.data.reporting import DataError
from lln_fairseq.data.special_symbols import EOS, NUM_SPECIAL, UNKNOWN

HEADER = struct.Struct("<9sQBQ")  # magic, version, code of the type, number of samples
MAGIC = b"MMIDIDX\0\0"
VERSION = 1
BYTES_PER_SAMPLE = 4 + 8  # of the index: length and offset
TYPES: dict[int, Any] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
    9: np.uint32,
    10: np.uint64,
}
AT_ONCE = 1 << 22  # numbers that are in memory at the same time

Block = tuple[np.ndarray, np.ndarray]  # ids of many samples, </s> included (int32); length of each sample (int64)


class Samples(NamedTuple):
    """A dataset's ids, one sample after the other, and the length of each sample."""

    ids: np.ndarray
    lengths: np.ndarray


@dataclass(frozen=True)
class DatasetCounts:
    """Samples, tokens (</s> included), tokens that are <unk>, the tokens of the longest sample, and how often each
    id occurs."""

    samples: int
    tokens: int
    unknown: int
    longest: int
    by_id: np.ndarray = field(compare=False, repr=False)

    def record(self) -> dict[str, int]:
        """Return the counts for a manifest."""
        return {name: value for name, value in asdict(self).items() if name != "by_id"}


def dataset_files(prefix: Path) -> list[Path]:
    """Return the two files of the dataset `prefix`."""
    return [prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx")]


def id_type(size: int) -> Any:
    """Return the type that fairseq stores the ids of a dictionary of `size` symbols in."""
    if size < 65500:
        return np.uint16
    return np.uint32


def write_dataset(blocks: Iterable[Block], size: int, prefix: Path) -> tuple[int, int]:
    """Write the dataset `prefix` for a dictionary of `size` symbols; return the numbers of samples and tokens.

    Both files appear at the end, complete.
    """
    dtype = id_type(size)
    parts = [np.zeros(0, dtype=np.int64)]
    data, index = dataset_files(prefix)
    with atomic_path(data) as data_part, atomic_path(index) as index_part:
        with data_part.open("wb") as file:
            for ids, sample_lengths in blocks:
                file.write(ids.astype(dtype).tobytes())
                parts.append(sample_lengths)
        lengths = np.concatenate(parts)
        index_part.write_bytes(index_bytes(lengths, dtype))
    return len(lengths), int(lengths.sum())


def index_bytes(lengths: np.ndarray, dtype: Any) -> bytes:
    """Return the content of PREFIX.idx for samples of these lengths (int64)."""
    code = next(code for code, kind in TYPES.items() if kind is dtype)
    offsets = (np.cumsum(lengths) - lengths) * np.dtype(dtype).itemsize
    return HEADER.pack(MAGIC, VERSION, code, len(lengths)) + lengths.astype("<i4").tobytes() + offsets.tobytes()


def read_dataset(prefix: str | Path) -> Samples | None:
    """Return the dataset in `prefix`.idx and `prefix`.bin, or None if there is none, or in another format.

    Raises:
        DataError: if one of the files is missing, or they are damaged.
    """
    index = Path(f"{prefix}.idx")
    data = Path(f"{prefix}.bin")
    existing = [path for path in (index, data) if path.is_file()]
    if not existing:
        return None
    if existing == [data]:
        raise DataError(f"{index} is missing beside {data}; prepare the data again")
    if existing == [index]:
        raise DataError(f"{data} is missing beside {index}; prepare the data again")
    try:
        return _read_files(index, data)
    except OSError as error:
        raise DataError(f"{index} and .bin cannot be read: {error}; prepare the data again") from error


def _read_files(index: Path, data: Path) -> Samples | None:
    with index.open("rb") as file:
        header = file.read(HEADER.size)
    if not header.startswith(MAGIC[:-1]):
        return None
    magic, version, code, samples = HEADER.unpack(header.ljust(HEADER.size, b"\0"))
    is_known = magic == MAGIC and version == VERSION and code in TYPES
    if not is_known or index.stat().st_size != HEADER.size + BYTES_PER_SAMPLE * samples:
        raise DataError(f"{index} is damaged or cut off; prepare the data again")
    if samples == 0 or data.stat().st_size == 0:
        raise DataError(f"{data} is empty; prepare the data again")
    dtype = np.dtype(TYPES[code])
    lengths = np.memmap(index, np.int32, "r", HEADER.size, samples)
    offsets = np.memmap(index, np.int64, "r", HEADER.size + 4 * samples, samples)
    end = 0
    for some_lengths, some_offsets in zip(in_pieces(lengths), in_pieces(offsets), strict=True):
        sizes = some_lengths.astype(np.int64) * dtype.itemsize
        if (sizes < 0).any() or (some_offsets != end + np.cumsum(sizes) - sizes).any():
            raise DataError(f"{index} is damaged; prepare the data again")
        end += int(sizes.sum())
    found = data.stat().st_size
    if end != found:
        raise DataError(f"{data} has {found} bytes, {index} says {end}: one is cut off; prepare the data again")
    return Samples(np.memmap(data, dtype, "r"), lengths)


def in_pieces(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the array in pieces that fit the memory, without the slow class of a memory map."""
    plain = array.view(np.ndarray)
    return (plain[start : start + AT_ONCE] for start in range(0, len(plain), AT_ONCE))


def count_dataset(prefix: Path, size: int) -> DatasetCounts:
    """Read the dataset `prefix` and count what it holds.

    Raises:
        DataError: if it is missing or damaged, a sample does not end with </s>, or an id is not in a dictionary of
            `size` symbols (the special ones included).
    """
    samples = read_dataset(prefix)
    if samples is None:
        raise DataError(f"{prefix}.idx is missing or damaged; --overwrite builds it anew")
    ids, lengths = samples
    wrong = f"{prefix} does not hold samples of a dictionary of {size} symbols that end with </s>"
    by_id = np.zeros(size, dtype=np.int64)
    for part in in_pieces(ids):
        if part.max() >= size:
            raise DataError(wrong)
        by_id += np.bincount(part, minlength=size)
    ends = np.cumsum(lengths, dtype=np.int64) - 1
    if lengths.min() < 1 or any((ids[part] != EOS).any() for part in in_pieces(ends)):
        raise DataError(wrong)
    return DatasetCounts(len(lengths), len(ids), int(by_id[UNKNOWN]), int(lengths.max()), by_id)


def binarize(blocks: Callable[[], Iterable[Block]], size: int, prefix: Path, samples: int) -> DatasetCounts:
    """Write what `blocks()` yields as the dataset `prefix`, for a dictionary of `size` symbols, and read it back.

    A dataset that exists already is kept, and `blocks` is not called.

    Raises:
        DataError: if the dataset does not have `samples` samples, or not as many tokens as were written.
    """
    if not samples:
        raise DataError(f"no lines for {prefix}: fairseq cannot load an empty dataset")
    written = None
    if not all(file.is_file() for file in dataset_files(prefix)):
        written = write_dataset(blocks(), size, prefix)
    counts = count_dataset(prefix, size)
    if counts.samples != samples or written not in (None, (counts.samples, counts.tokens)):
        raise DataError(
            f"{prefix} holds {counts.samples} samples and {counts.tokens} tokens, not {samples} samples"
            f"{f' and {written[1]} tokens' if written else ''}; --overwrite builds it anew"
        )
    return counts


def label_blocks(labels: Sequence[str], classes: Sequence[str]) -> list[Block]:
    """Return one block with a sample of one symbol for each label: class k has the id 4 + k, label k is classes[k]."""
    ids = np.full((len(labels), 2), EOS, dtype=np.int32)
    number = {name: NUM_SPECIAL + k for k, name in enumerate(classes)}
    ids[:, 0] = [number[label] for label in labels]
    return [(ids.reshape(-1), np.full(len(labels), 2, dtype=np.int64))]
