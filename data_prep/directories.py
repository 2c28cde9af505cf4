"""List the files of a directory of fairseq data sets, and write the labels of a classification task."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from lln_fairseq.files import write_bytes
from lln_fairseq.text.binary_format import binarize, dataset_files, label_blocks
from lln_fairseq.text.labels import label_dictionary
from lln_fairseq.text.special_symbols import NUM_SPECIAL
from lln_fairseq.text.vocabulary import DICTIONARY


def split_files(directory: str, splits: Iterable[str]) -> list[str]:
    """Return DIRECTORY/SPLIT.bin and DIRECTORY/SPLIT.idx of each split, in the order of `splits`."""
    paths = []
    for split in splits:
        paths += [str(path) for path in dataset_files(Path(directory, split))]
    return paths


def directory_files(directory: str, splits: Iterable[str]) -> list[str]:
    """Return DIRECTORY/dict.txt, followed by the `split_files`."""
    return [f"{directory}/{DICTIONARY}", *split_files(directory, splits)]


def write_labels(
    directory: Path, classes: Sequence[str], labels: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, int]]:
    """Write the labels of every split in fairseq's binary format, and a dict.txt with the classes in order.

    Class k of the model is classes[k]. `labels` has the class name of each row, by split. dict.txt also has the
    number of the rows of "train" in each class. The result is the manifest entry of each split.
    """
    dictionary = label_dictionary(classes, Counter(labels.get("train", [])))
    write_bytes(directory / DICTIONARY, dictionary.encode())
    size = NUM_SPECIAL + dictionary.count("\n")
    records = {}
    for split, names in labels.items():
        counts = binarize(label_blocks(names, classes), size, directory / split, len(names))
        records[split] = counts.record()
    return records
