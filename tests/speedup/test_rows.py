"""Tests of the rows of a search: how they are split, and how labels are numbered."""

import numpy as np
import pytest

from lln_fairseq.errors import UserError
from lln_fairseq.speedup.rows import Rows, number_labels, read_labeled_rows, read_text_rows, split_rows
from lln_fairseq.text.rows import Columns


def test_splits_are_disjoint_complete_and_follow_the_seed():
    rows = Rows([("a question", f"passage {number}") for number in range(1000)])
    splits = split_rows(rows, seed=1)
    assert sorted(np.concatenate(list(splits.values()))) == list(range(1000))
    assert {split: len(numbers) for split, numbers in splits.items()} == {"test": 400, "valid": 200, "train": 400}
    assert (split_rows(rows, seed=1)["test"] == splits["test"]).all()
    assert sorted(split_rows(rows, seed=2)["test"]) != sorted(splits["test"])


@pytest.mark.parametrize("kind", ["text", "group"])
def test_equal_texts_and_groups_stay_together(kind):
    numbers = np.random.default_rng(0).integers(200, size=1000)
    if kind == "text":
        rows = Rows([(f"q{place}", f"the passage {number}") for place, number in enumerate(numbers)])
    else:
        rows = Rows([(f"question {number}", f"passage {place}") for place, number in enumerate(numbers)])
        rows.groups = [str(number) for number in numbers]
    members = {split: set(numbers[rows_of_split]) for split, rows_of_split in split_rows(rows, 1).items()}
    assert not members["train"] & members["valid"]
    assert not members["train"] & members["test"]
    assert not members["valid"] & members["test"]


def test_rows_that_are_all_equal_cannot_be_split():
    with pytest.raises(UserError, match="too many rows have the same text"):
        split_rows(Rows([("the same",)] * 500), 1)


def test_labels_are_names_or_numbers_of_classes():
    names = ["no", "yes"]
    assert number_labels(["yes", "no"], names, "label").tolist() == [1, 0]
    assert number_labels(["1", "0", "1"], names, "label").tolist() == [1, 0, 1]
    assert number_labels(["0", "1"], ["1", "0"], "label").tolist() == [1, 0]  # names win
    assert number_labels(["0.5", "2"], [], "score").tolist() == [0.5, 2.0]
    with pytest.raises(UserError, match=r"--label label: 'maybe' is not a label of the model \(no, yes\)"):
        number_labels(["yes", "maybe"], names, "label")
    with pytest.raises(UserError, match="the labels are not numbers from 0 to 1 either"):
        number_labels(["2", "0"], names, "label")
    with pytest.raises(UserError, match="one output, so labels must be numbers"):
        number_labels(["good"], [], "label")
    with pytest.raises(UserError, match="a label is not finite"):
        number_labels(["1", "nan"], [], "label")


def test_groups_must_be_several(tmp_path):
    path = tmp_path / "rows.tsv"
    path.write_text("text\tgroup\n" + "".join(f"text {row}\t{row % 9}\n" for row in range(400)))
    with pytest.raises(UserError, match="has 9 groups, but a search needs at least 30"):
        read_labeled_rows(path, Columns(["text"], None, group="group"))


def test_texts_must_be_different(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("the same\n" * 400)
    with pytest.raises(UserError, match="has 1 different rows, but a search needs at least 300"):
        read_text_rows(path)
