"""Lines of text to fairseq's memory-mapped dataset (PREFIX.bin, PREFIX.idx), read back before it counts as done.

Every line becomes one sample: the ids of its symbols and </s>, which is what `fairseq-preprocess` writes.
fairseq (and with it torch) is imported inside the functions: a run that finds everything finished needs neither.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from data_prep.command import DataError
from data_prep.fetch import atomic_path


@dataclass(frozen=True)
class DatasetCounts:
    """Samples, tokens (</s> included), tokens that are <unk>, and the tokens of the longest sample."""

    samples: int
    tokens: int
    unknown: int
    longest: int


def _fairseq_data() -> ModuleType:
    # fairseq asks for tensorboardX on import, for a task that has nothing to do with this.
    logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.ERROR)
    import fairseq.data

    return fairseq.data


def dataset_files(prefix: Path) -> list[Path]:
    """The files of the dataset `prefix`."""
    return [prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx")]


def read_back(prefix: Path, dictionary: Path) -> DatasetCounts:
    """Count what the dataset holds by reading every sample with fairseq's reader.

    Raises DataError where the files do not fit each other, a sample does not end with </s>, or an id is not in the
    dictionary.
    """
    data = _fairseq_data()
    vocabulary = data.Dictionary.load(str(dictionary))
    try:
        dataset = data.indexed_dataset.make_dataset(str(prefix), impl="mmap")
        samples = [dataset[i].numpy() for i in range(len(dataset))]
    except (AssertionError, ValueError, OSError) as error:
        raise DataError(f"{prefix}.bin and .idx cannot be read: {error}") from error
    for i, sample in enumerate(samples):
        if not len(sample) or sample[-1] != vocabulary.eos() or sample.max() >= len(vocabulary):
            raise DataError(f"{prefix}: sample {i} does not fit {dictionary}")
    return DatasetCounts(
        samples=len(samples),
        tokens=sum(len(sample) for sample in samples),
        unknown=sum(int((sample == vocabulary.unk()).sum()) for sample in samples),
        longest=max((len(sample) for sample in samples), default=0),
    )


def binarize(lines: Sequence[str], encode: Callable[[str], list[str]], dictionary: Path, prefix: Path) -> DatasetCounts:
    """Write `lines` as the dataset `prefix` with the symbols of `encode` and the ids of the file `dictionary`.

    Both files appear at the end, complete; a dataset that is there already is kept. Either way it is read back and
    must have as many samples as there are lines (and as many tokens as were written), else DataError.
    """
    if not lines:
        raise DataError(f"no lines for {prefix}: fairseq cannot load an empty dataset")
    data = _fairseq_data()
    from tqdm import tqdm

    files = dataset_files(prefix)
    written = None
    if not all(file.is_file() for file in files):
        vocabulary = data.Dictionary.load(str(dictionary))
        written = 0
        with ExitStack() as stack:
            parts = [stack.enter_context(atomic_path(file)) for file in files]
            builder = data.indexed_dataset.make_builder(str(parts[0]), impl="mmap", vocab_size=len(vocabulary))
            for line in tqdm(lines, desc=str(prefix), unit=" lines", leave=False, disable=None):
                ids = vocabulary.encode_line(line, line_tokenizer=encode, add_if_not_exist=False)
                builder.add_item(ids)
                written += len(ids)
            builder.finalize(str(parts[1]))
    counts = read_back(prefix, dictionary)
    if counts.samples != len(lines) or written not in (None, counts.tokens):
        raise DataError(
            f"{prefix} holds {counts.samples} samples and {counts.tokens} tokens, not {len(lines)} and {written}; "
            "--overwrite builds it anew"
        )
    return counts
