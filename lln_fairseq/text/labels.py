"""Write and read label/dict.txt, which has the names of the classes in the order of their numbers.

fairseq separates the name in a line from its count at the last space, so a name can have spaces.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from lln_fairseq.errors import UserError
from lln_fairseq.text.checks import read_symbols
from lln_fairseq.text.special_symbols import FILLER, MASK, SPECIAL_SYMBOLS, format_dictionary

NOT_LABELS = (MASK, FILLER)  # prefixes of symbols that fairseq's tools add to every dictionary


def label_dictionary(names: Sequence[str], counts: Mapping[str, int]) -> str:
    """Return the content of label/dict.txt for classes with these names, with filler symbols at its end.

    `counts` has the number of rows of each class; 0 if it is missing. UserError is raised if a name is empty, occurs
    twice, contains a tab or a line break, or is a symbol that fairseq or `class_names` takes for something else.
    """
    for number, name in enumerate(names):
        if not name or any(character in name for character in "\t\n\r"):
            raise UserError(f"label {number} is {name!r}: a label must not be empty or contain a tab or a line break")
        if name in SPECIAL_SYMBOLS or name.startswith(NOT_LABELS):
            raise UserError(f"label {number} is {name!r}: fairseq's dictionaries use this symbol, so rename the label")
        if name in names[:number]:
            raise UserError(f"labels {names.index(name)} and {number} are both {name!r}: rename one of them")
    return format_dictionary(names, counts)


def class_names(symbols: Iterable[str]) -> list[str]:
    """Return the symbols of a label dictionary that are names of classes, in order."""
    return [symbol for symbol in symbols if not symbol.startswith(NOT_LABELS)]


def read_class_names(source: Path) -> list[str]:
    """Return the names of a classifier's classes in order, as its run, `convert` or `linearize` has saved them.

    `source` is a checkpoint, its directory, or a directory of binarized data. UserError is raised if it is missing or
    has no label/dict.txt, as a regression.
    """
    if not source.exists():
        raise UserError(f"no such classifier: {source}")
    directory = source
    if source.is_file():
        directory = source.parent
    for path in (directory / "tokenizer/label/dict.txt", directory / "label/dict.txt"):
        if path.is_file():
            return class_names(read_symbols(path))
    raise UserError(
        f"{source} has no names of labels: there is no label/dict.txt in {directory} or its tokenizer/. A regression "
        "and a pre-trained model have none: for a regression, leave out --labels and give --regression"
    )
