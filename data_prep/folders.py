"""What the programs share about a folder of fairseq's datasets: its files, and the labels of classification."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from lln_fairseq.data.binary_format import binarize, dataset_files, label_blocks
from lln_fairseq.data.files import write_bytes
from lln_fairseq.data.special_symbols import NUM_SPECIAL
from lln_fairseq.data.tokenizers import dictionary_text
from lln_fairseq.data.vocabulary import DICTIONARY


def folder_files(folder: str, splits: Iterable[str]) -> list[str]:
    """Return the files of a folder, dict.txt first, relative to where the folder is."""
    names = [f"{folder}/{DICTIONARY}"]
    for split in splits:
        names += [str(file) for file in dataset_files(Path(folder, split))]
    return names


def write_labels(
    folder: Path, classes: Sequence[str], labels: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, int]]:
    """Write dict.txt, with the counts of train, and the labels of every split; return the counts read back by split.

    Args:
        folder: where the files go.
        classes: the label of class k is classes[k].
        labels: the labels of each split.
    """
    dictionary = dictionary_text(classes, Counter(labels["train"]))
    write_bytes(folder / DICTIONARY, dictionary.encode())
    size = NUM_SPECIAL + dictionary.count("\n")
    records = {}
    for split, names in labels.items():
        counts = binarize(partial(label_blocks, names, classes), size, folder / split, len(names))
        records[split] = counts.record()
    return records
