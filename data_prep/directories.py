"""Name the files of a directory of fairseq data sets, and write the labels of a classification task."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from lln_fairseq.data.binary_format import binarize, dataset_files, label_blocks
from lln_fairseq.data.files import write_bytes
from lln_fairseq.data.special_symbols import NUM_SPECIAL
from lln_fairseq.data.tokenizers import dictionary_text
from lln_fairseq.data.vocabulary import DICTIONARY


def split_files(directory: str, splits: Iterable[str]) -> list[str]:
    """Return the paths SUBDIRECTORY/SPLIT.bin and SUBDIRECTORY/SPLIT.idx of every split, in fairseq's order of both."""
    paths = []
    for split in splits:
        paths += [str(path) for path in dataset_files(Path(directory, split))]
    return paths


def directory_files(directory: str, splits: Iterable[str]) -> list[str]:
    """Return the paths of SUBDIRECTORY/dict.txt and of the data set files of every split."""
    return [f"{directory}/{DICTIONARY}", *split_files(directory, splits)]


def write_labels(
    directory: Path, classes: Sequence[str], labels: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, int]]:
    """Write dict.txt and the labels of every split in fairseq's binary format.

    dict.txt lists the classes in the given order, each with its number of rows in the train split.

    Args:
        directory: the directory to write to.
        classes: the name of every class; class k of the model is classes[k].
        labels: for each split the name of the class of every row. It must contain the split "train".

    Returns:
        For each split the counts of the written data set, read back from it (DatasetCounts.record).
    """
    dictionary = dictionary_text(classes, Counter(labels["train"]))
    write_bytes(directory / DICTIONARY, dictionary.encode())
    size = NUM_SPECIAL + dictionary.count("\n")
    records = {}
    for split, names in labels.items():
        counts = binarize(partial(label_blocks, names, classes), size, directory / split, len(names))
        records[split] = counts.record()
    return records
