"""Blocks of ids to fairseq's memory-mapped dataset (PREFIX.bin, PREFIX.idx), read back before it counts as done.

Every line becomes one sample: the ids of its symbols and </s>, which is what `fairseq-preprocess` writes.
fairseq (and with it torch) is imported inside the functions: a run that finds everything finished needs neither.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lln_fairseq.data.encode import EOS, Block
from lln_fairseq.data.files import atomic_path
from lln_fairseq.data.reporting import DataError
from lln_fairseq.data.tokenizers import FAIRSEQ_SPECIAL
from lln_fairseq.data.vocabulary import UNKNOWN

_AT_ONCE = 1 << 22  # tokens
# An index: magic and version, a code for the type of the ids, the number of samples, their lengths and places.
_MAGIC = b"MMIDIDX\0\0" + (1).to_bytes(8, "little")
_CODES: dict[Any, int] = {np.uint16: 8, np.uint32: 9, np.int64: 5}
_NUMBER = len(_MAGIC) + 1
_HEADER = _NUMBER + 8


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
        """What a manifest says of it."""
        return {name: value for name, value in asdict(self).items() if name != "by_id"}


def _indexed_dataset() -> Any:
    # fairseq asks for tensorboardX on import, for a task that has nothing to do with this.
    logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.ERROR)
    from fairseq.data import indexed_dataset

    return indexed_dataset


def dataset_files(prefix: Path) -> list[Path]:
    """The files of the dataset `prefix`."""
    return [prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx")]


def read_back(prefix: Path, size: int) -> DatasetCounts:
    """Count what the dataset holds: the samples as fairseq's reader finds them, every id from the file.

    Raises DataError where the files do not fit each other, a sample does not end with </s>, or an id is not in a
    dictionary of `size` symbols (fairseq's special ones included).
    """
    fairseq = _indexed_dataset()
    dtype = fairseq.best_fitting_int_dtype(size)
    _check_index(prefix, dtype)
    try:
        dataset = fairseq.make_dataset(str(prefix), impl="mmap")
        lengths = np.array(dataset.sizes, dtype=np.int64)
        last = dataset[len(dataset) - 1].numpy()
        ids = np.memmap(dataset_files(prefix)[0], dtype=dtype, mode="r")
    except (AssertionError, ValueError, IndexError, OSError) as error:
        raise DataError(f"{prefix}.bin and .idx cannot be read: {error}") from error
    ends = np.cumsum(lengths) - 1
    wrong = f"{prefix} does not hold samples of a dictionary of {size} symbols that end with </s>"
    if len(ids) != ends[-1] + 1 or lengths.min() < 1 or not np.array_equal(last, ids[-len(last) :]):
        raise DataError(wrong)
    by_id = np.zeros(size, dtype=np.int64)
    for start in range(0, len(ids), _AT_ONCE):
        part = np.asarray(ids[start : start + _AT_ONCE])
        if part.max() >= size:
            raise DataError(wrong)
        by_id += np.bincount(part, minlength=size)
    for start in range(0, len(ends), _AT_ONCE):
        if (ids[ends[start : start + _AT_ONCE]] != EOS).any():
            raise DataError(wrong)
    return DatasetCounts(len(lengths), len(ids), int(by_id[UNKNOWN]), int(lengths.max()), by_id)


def _check_index(prefix: Path, dtype: Any) -> None:
    """DataError where the index is damaged: fairseq's reader would add a traceback of its own to the message."""
    data, index = dataset_files(prefix)
    with index.open("rb") as file:
        header = file.read(_HEADER)
    start, samples = header[:_NUMBER], int.from_bytes(header[_NUMBER:], "little")
    whole = index.stat().st_size == _HEADER + 12 * samples and samples > 0 and data.stat().st_size > 0
    if not whole or start != _MAGIC + bytes([_CODES[dtype]]):
        raise DataError(f"{prefix}.bin and .idx are damaged or cut off; --overwrite builds them anew")


def _write(blocks: Iterable[Block], size: int, prefix: Path) -> tuple[int, int]:
    """Write the dataset; return the numbers of samples and tokens written."""
    fairseq = _indexed_dataset()
    dtype = fairseq.best_fitting_int_dtype(size)
    lengths = [np.zeros(0, dtype=np.int64)]
    with ExitStack() as stack:
        data, index = [stack.enter_context(atomic_path(file)) for file in dataset_files(prefix)]
        with data.open("wb") as file:
            for ids, samples in blocks:
                file.write(ids.astype(dtype).tobytes())
                lengths.append(samples)
        with fairseq.MMapIndexedDataset.Index.writer(str(index), dtype) as writer:
            writer.write(np.concatenate(lengths).tolist())
    return sum(map(len, lengths)), int(sum(samples.sum() for samples in lengths))


def binarize(blocks: Callable[[], Iterable[Block]], size: int, prefix: Path, samples: int) -> DatasetCounts:
    """Write what `blocks()` yields as the dataset `prefix`, for a dictionary of `size` symbols.

    Both files appear at the end, complete; a dataset that is there already is kept (and `blocks` not called). Either
    way it is read back and must have `samples` samples (and as many tokens as were written), else DataError.
    """
    if not samples:
        raise DataError(f"no lines for {prefix}: fairseq cannot load an empty dataset")
    written = None
    if not all(file.is_file() for file in dataset_files(prefix)):
        written = _write(blocks(), size, prefix)
    counts = read_back(prefix, size)
    if counts.samples != samples or written not in (None, (counts.samples, counts.tokens)):
        raise DataError(
            f"{prefix} holds {counts.samples} samples and {counts.tokens} tokens, not {samples} samples"
            f"{f' and {written[1]} tokens' if written else ''}; --overwrite builds it anew"
        )
    return counts


def class_blocks(labels: Sequence[str], classes: Sequence[str]) -> list[Block]:
    """One block of samples of one symbol each: class k has the id 4 + k, so label k is classes[k] to fairseq."""
    ids = np.full((len(labels), 2), EOS, dtype=np.int32)
    number = {name: len(FAIRSEQ_SPECIAL) + k for k, name in enumerate(classes)}
    ids[:, 0] = [number[label] for label in labels]
    return [(ids.reshape(-1), np.full(len(labels), 2, dtype=np.int64))]
