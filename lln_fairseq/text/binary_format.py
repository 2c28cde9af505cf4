"""Write and read fairseq's memory-mapped data sets, without importing fairseq.

The data set PREFIX consists of two files. PREFIX.bin holds the concatenated token ids of all samples. PREFIX.idx holds
a magic number, a version, a code for the integer type of the ids, the number of samples, and then the length and the
offset of each sample. Every sample that this module writes or counts ends with </s>.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lln_fairseq.errors import UserError
from lln_fairseq.files import atomic_path
from lln_fairseq.text.special_symbols import EOS, NUM_SPECIAL, UNKNOWN

HEADER = struct.Struct("<9sQBQ")  # magic number, version, type code, number of samples
MAGIC = b"MMIDIDX\0\0"
VERSION = 1
INDEX_BYTES_PER_SAMPLE = 4 + 8  # length and offset
TYPE_CODES: dict[int, Any] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
    9: np.uint32,
    10: np.uint64,
}
CHUNK_ELEMENTS = 1 << 22  # elements of a memory-mapped array that are read at a time

# Several samples: their concatenated ids, </s> included, int32 (tokens,), and the length of each, int64 (samples,).
Block = tuple[np.ndarray, np.ndarray]


class Samples(NamedTuple):
    """The contents of a data set, memory-mapped from its files."""

    ids: np.ndarray  # of all samples, one after the other, (tokens,), in the stored integer type
    lengths: np.ndarray  # the number of ids of each sample, int32 (samples,)


@dataclass(frozen=True)
class DatasetCounts:
    """Statistics of a data set, for its manifest. `==` ignores `by_id`."""

    samples: int
    tokens: int  # </s> included
    unknown: int  # the tokens that are <unk>
    longest: int  # the tokens of the longest sample, </s> included
    by_id: np.ndarray = field(compare=False, repr=False)  # how often each id occurs, int64 (dictionary size,)

    def record(self) -> dict[str, int]:
        """Return the entry of a manifest for this data set: all counts except `by_id`."""
        counts = asdict(self)
        del counts["by_id"]
        return counts


def dataset_files(prefix: Path) -> list[Path]:
    return [prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx")]


def id_type(size: int) -> Any:
    """Return the numpy integer type in which fairseq stores the ids of a dictionary with `size` symbols."""
    if size < 65500:
        return np.uint16
    return np.uint32


def write_dataset(blocks: Iterable[Block], size: int, prefix: Path) -> int:
    """Write the data set `prefix` from blocks of samples, and return the number of tokens.

    Existing files are replaced. Each file gets its final name only when it is complete. `size`, the number of symbols
    of the dictionary with its special symbols, determines the integer type. The ids are not checked.
    """
    dtype = id_type(size)
    block_lengths = [np.zeros(0, dtype=np.int64)]
    data, index = dataset_files(prefix)
    with atomic_path(data) as temporary_data, atomic_path(index) as temporary_index:
        with temporary_data.open("wb") as file:
            for ids, sample_lengths in blocks:
                file.write(ids.astype(dtype).tobytes())
                block_lengths.append(sample_lengths)
        lengths = np.concatenate(block_lengths)
        temporary_index.write_bytes(index_bytes(lengths, dtype))
    return int(lengths.sum())


def index_bytes(lengths: np.ndarray, dtype: Any) -> bytes:
    """Return the content of PREFIX.idx for samples with these lengths, int64 (samples,), and ids of this type."""
    code = next(code for code, known_type in TYPE_CODES.items() if known_type is dtype)
    offsets = (np.cumsum(lengths) - lengths) * np.dtype(dtype).itemsize
    return HEADER.pack(MAGIC, VERSION, code, len(lengths)) + lengths.astype("<i4").tobytes() + offsets.tobytes()


def read_dataset(prefix: str | Path) -> Samples | None:
    """Open the data set `prefix` as memory-mapped arrays, and check that its files are complete.

    The ids are not checked. The result is None if neither file exists or if PREFIX.idx does not have this memory-mapped
    format. UserError is raised if only one of the two files exists, if a file is empty, damaged or cut off, or if they
    do not match.
    """
    index = Path(f"{prefix}.idx")
    data = Path(f"{prefix}.bin")
    has_index = index.is_file()
    has_data = data.is_file()
    if not has_index and not has_data:
        return None
    if not has_index:
        raise UserError(f"{data} exists, but {index} is missing; prepare the data again")
    if not has_data:
        raise UserError(f"{index} exists, but {data} is missing; prepare the data again")
    try:
        return _read_files(index, data)
    except OSError as error:
        raise UserError(f"{index} or {data} cannot be read: {error}; prepare the data again") from error


def _read_files(index: Path, data: Path) -> Samples | None:
    with index.open("rb") as file:
        header = file.read(HEADER.size)
    if not header.startswith(MAGIC[:-1]) and len(header) >= len(MAGIC):
        return None
    magic, version, code, samples = HEADER.unpack(header.ljust(HEADER.size, b"\0"))
    is_known = magic == MAGIC and version == VERSION and code in TYPE_CODES
    if not is_known or index.stat().st_size != HEADER.size + INDEX_BYTES_PER_SAMPLE * samples:
        raise UserError(f"{index} is damaged or cut off; prepare the data again")
    if samples == 0 or data.stat().st_size == 0:
        raise UserError(f"{data} is empty; prepare the data again")
    dtype = np.dtype(TYPE_CODES[code])
    lengths = np.memmap(index, np.int32, "r", HEADER.size, samples)
    offsets = np.memmap(index, np.int64, "r", HEADER.size + 4 * samples, samples)

    expected_bytes = 0
    for length_chunk, offset_chunk in zip(iterate_chunks(lengths), iterate_chunks(offsets), strict=True):
        sizes = length_chunk.astype(np.int64) * dtype.itemsize
        expected_offsets = expected_bytes + np.cumsum(sizes) - sizes
        if (sizes < 0).any() or (offset_chunk != expected_offsets).any():
            raise UserError(f"{index} is damaged; prepare the data again")
        expected_bytes += int(sizes.sum())
    actual_bytes = data.stat().st_size
    if expected_bytes != actual_bytes:
        raise UserError(
            f"{data} has {actual_bytes} bytes, {index} says {expected_bytes}: one is cut off; prepare the data again"
        )
    return Samples(np.memmap(data, dtype, "r"), lengths)


def iterate_chunks(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield consecutive parts of a one-dimensional array, each with at most CHUNK_ELEMENTS elements.

    The parts are views, not copies. They are plain arrays even if `array` is a memory map, because operations on
    `np.memmap` are slow. For an empty array, nothing is yielded.
    """
    plain = array.view(np.ndarray)
    for start in range(0, len(plain), CHUNK_ELEMENTS):
        yield plain[start : start + CHUNK_ELEMENTS]


def count_dataset(prefix: Path, size: int) -> DatasetCounts:
    """Read the data set `prefix`, check its ids, and return its statistics.

    UserError is raised if the data set is missing or damaged, a sample does not end with </s>, or an id is negative or
    at least `size`. `size` is the number of symbols of the dictionary with its special symbols.
    """
    samples = read_dataset(prefix)
    if samples is None:
        raise UserError(f"{prefix}.idx is missing or damaged; run the command again")
    ids, lengths = samples
    message = f"{prefix}.bin is damaged: samples must end with </s>, and ids must be below {size}"
    by_id = np.zeros(size, dtype=np.int64)
    for id_chunk in iterate_chunks(ids):
        if id_chunk.min() < 0 or id_chunk.max() >= size:
            raise UserError(message)
        by_id += np.bincount(id_chunk, minlength=size)
    if lengths.min() < 1:
        raise UserError(message)
    last_positions = np.cumsum(lengths, dtype=np.int64) - 1
    for position_chunk in iterate_chunks(last_positions):
        if (ids[position_chunk] != EOS).any():
            raise UserError(message)
    return DatasetCounts(
        samples=len(lengths),
        tokens=len(ids),
        unknown=int(by_id[UNKNOWN]),
        longest=int(lengths.max()),
        by_id=by_id,
    )


def binarize(blocks: Iterable[Block], size: int, prefix: Path, samples: int) -> DatasetCounts:
    """Write the data set `prefix` from blocks of samples, then read it back and return its statistics.

    `size` is the number of symbols of the dictionary, special ones included. UserError is raised for 0 samples, which
    fairseq cannot load, and if the files hold another number of samples than `samples`, a sample that does not end with
    </s>, or an id of `size` or more. The files that were written remain.
    """
    if not samples:
        raise UserError(f"no lines for {prefix}: fairseq cannot load an empty data set")
    tokens = write_dataset(blocks, size, prefix)
    counts = count_dataset(prefix, size)
    if counts.samples != samples or counts.tokens != tokens:
        raise UserError(
            f"{prefix} holds {counts.samples} samples and {counts.tokens} tokens, not {samples} samples and {tokens} "
            "tokens; run the command again"
        )
    return counts


def label_blocks(labels: Sequence[str], classes: Sequence[str]) -> list[Block]:
    """Return one block with a sample "LABEL </s>" for each label. The label classes[k] has the id 4 + k."""
    id_of = {name: NUM_SPECIAL + number for number, name in enumerate(classes)}
    ids = np.full((len(labels), 2), EOS, dtype=np.int32)
    ids[:, 0] = [id_of[label] for label in labels]
    lengths = np.full(len(labels), 2, dtype=np.int64)
    return [(ids.reshape(-1), lengths)]
