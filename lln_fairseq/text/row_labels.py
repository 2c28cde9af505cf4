"""Check the labels of a user's rows: names of classes, or numbers."""

import re
from collections.abc import Iterable, Mapping, Sequence

from lln_fairseq.errors import UserError
from lln_fairseq.text.checks import is_finite_number
from lln_fairseq.text.labels import label_dictionary

LABEL_SEPARATORS = re.compile("[,;|]")
INTEGER = re.compile("[+-]?[0-9]+")
SCORES_ADVICE = "to predict the numbers themselves, give --regression"


class ClassLabels:
    """Checks and renames the labels of a classification.

    Attributes:
        classes: the possible labels, after renaming. Empty accepts any label.
        origin: where `classes` come from, for error messages.
        renamed: the new names by the old ones, for the labels that change.
        seen: the labels that `parse` has met, before renaming, each with the place of its first row.
    """

    def __init__(self, classes: Sequence[str], origin: str, renamed: Mapping[str, str]) -> None:
        self.classes = list(classes)
        self.origin = origin
        self.renamed = renamed
        self.seen: dict[str, str] = {}
        for old, new in renamed.items():
            if self.classes and new not in self.classes:
                raise UserError(
                    f"--rename {old} {new}: {new!r} is not one of {self.origin} ({', '.join(self.classes)[:200]})"
                )

    def parse(self, label: str, location: str) -> str:
        """Return the new name of a row's label, and add the label to `seen` under its old name.

        UserError is raised if the label is empty, or if the new name is not a class.
        """
        if not label:
            raise UserError(f"{location}: the label is empty")
        self.seen.setdefault(label, location)
        name = self.renamed.get(label, label)
        if self.classes and name not in self.classes:
            self.require_single(label, location)
            advice = "--rename OLD NEW renames labels"
            if look_like_scores(self.classes):
                advice = SCORES_ADVICE
            raise UserError(
                f"{location}: the label must be one of {self.origin} ({', '.join(self.classes)[:200]}), got {label!r}; "
                f"{advice}"
            )
        return name

    def require_single(self, label: str, location: str) -> None:
        """Raise UserError if a label is a list of known classes, separated by commas, semicolons or bars."""
        parts = [part.strip() for part in LABEL_SEPARATORS.split(label)]
        if len(parts) > 1 and all(self.renamed.get(part, part) in self.classes for part in parts):
            raise UserError(
                f"{location}: the row has {len(parts)} labels, {label!r}, but multi-label classification is not "
                "supported"
            )

    def use_seen_labels(self, source: str) -> None:
        """Set `classes` to the labels that have been seen, which all are from the rows of the file `source`."""
        self.classes = sorted_classes(self.renamed.get(label, label) for label in self.seen)
        self.origin = f"the labels of {source}"
        for label, location in self.seen.items():
            self.require_single(label, location)
        if len(self.classes) == 1:
            raise UserError(f"{source}: all rows have the same label, {self.classes[0]!r}")

    def check_names(self) -> None:
        """Raise UserError if fairseq's dictionary cannot store a class, or a label to be renamed is in no row."""
        label_dictionary(self.classes, {})
        for label in self.renamed:
            if label not in self.seen:
                raise UserError(f"--rename {label}: no row has the label {label!r}")


def sorted_classes(labels: Iterable[str]) -> list[str]:
    """Return the different labels in order: as numbers if all are integers, otherwise as text."""
    names = sorted(set(labels))
    try:
        return sorted(names, key=int)
    except ValueError:
        return names


def look_like_scores(classes: Sequence[str]) -> bool:
    """Return True if all classes are numbers, and not all of them are written as integers."""
    return all(map(is_finite_number, classes)) and not all(map(INTEGER.fullmatch, classes))


def check_number(label: str, location: str) -> str:
    """Raise UserError unless the label of a regression is a finite number, and return its text."""
    if not is_finite_number(label):
        raise UserError(f"{location}: the label of a regression must be one finite number, got {label!r}")
    return label
