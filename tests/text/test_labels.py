"""Names of classes: what label/dict.txt keeps, and what it cannot keep."""

import pytest
from fairseq.data import Dictionary

from lln_fairseq.errors import UserError
from lln_fairseq.text.labels import class_names, label_dictionary, read_class_names

NAMES = ["very good", " 1 ", "très\u00a0bon", "a=b 5", "0", "<b>", "#fairseq:overwrite", "\u2028"]


def test_fairseq_reads_names_with_spaces_in_order(tmp_path):
    (tmp_path / "label").mkdir()
    path = tmp_path / "label/dict.txt"
    path.write_text(label_dictionary(NAMES, {"very good": 7}), encoding="utf-8")

    dictionary = Dictionary.load(str(path))

    assert [dictionary.index(name) for name in NAMES] == list(range(4, 4 + len(NAMES)))
    assert dictionary.count[4:6] == [7, 0]
    dictionary.add_symbol("<mask>")  # as tasks do
    assert class_names(dictionary.symbols[4:]) == NAMES
    assert read_class_names(tmp_path) == NAMES


@pytest.mark.parametrize("name", ["", "a\tb", "a\nb", "a\rb", "<unk>", "<mask>", "madeupword0001", "good"])
def test_name_that_would_be_lost_raises(name):
    with pytest.raises(UserError, match=r"^labels? "):
        label_dictionary(["good", name], {})


def test_names_of_a_checkpoint_are_those_of_its_run(tmp_path):
    checkpoint = tmp_path / "run/checkpoint_best.pt"
    (tmp_path / "run/tokenizer/label").mkdir(parents=True)
    checkpoint.touch()
    with pytest.raises(UserError, match=r"there is no label/dict\.txt in .*run or its tokenizer/"):
        read_class_names(checkpoint)

    (tmp_path / "run/tokenizer/label/dict.txt").write_text(label_dictionary(["b", "a"], {}))

    assert read_class_names(checkpoint) == read_class_names(tmp_path / "run") == ["b", "a"]


def test_missing_classifier_is_named(tmp_path):
    with pytest.raises(UserError, match=r"no such classifier: .*/none"):
        read_class_names(tmp_path / "none")
