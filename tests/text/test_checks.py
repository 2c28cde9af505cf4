"""Binarized data that is damaged, or does not belong to its dictionary, is rejected before fairseq reads it."""

import shutil
import struct

import numpy as np
import pytest
import torch.distributed as dist

from lln_fairseq.errors import UserError
from lln_fairseq.text import binary_format
from lln_fairseq.text.checks import check_lines, require_binarized
from tests.fairseq_runs import binarize, make_classification, make_corpus, make_dictionary
from tests.tasks.test_tasks import make_task

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
ROWS = 9


@pytest.fixture(scope="module")
def intact_data(tmp_path_factory):
    """Return a directory with a corpus in lm/ and a classification in task/."""
    directory = tmp_path_factory.mktemp("intact")
    make_corpus(directory / "lm", sizes=(("train", ROWS), ("valid", ROWS)))
    make_classification(directory / "task", sizes=(("train", ROWS),))
    return directory


@pytest.fixture
def corpus(intact_data, tmp_path):
    """Return a copy of the corpus, which a test may damage."""
    return shutil.copytree(intact_data / "lm", tmp_path / "lm")


@pytest.fixture
def classification(intact_data, tmp_path):
    """Return a copy of the classification, which a test may damage."""
    return shutil.copytree(intact_data / "task", tmp_path / "task")


def load(data, split="train"):
    """Load a split of a corpus or a classification and return the task; training data includes train1, train2, ..."""
    if data.name == "lm":
        task = make_task("lln_masked_lm", data, tokens_per_sample=32)
    else:
        task = make_task("lln_sentence_prediction", data, num_classes=2, regression_target=False)
    task.load_dataset(split, combine=split == "train")
    return task


def assert_rejected(data, message):
    """Assert that loading the training data raises a UserError of one line that matches the message."""
    with pytest.raises(UserError, match=message) as error:
        load(data)
    assert "\n" not in str(error.value)


def change_file(path, function):
    """Replace the content of a file by function(content)."""
    path.write_bytes(function(path.read_bytes()))


def overwrite(offset, form, value):
    """Return a function that overwrites bytes of a content with a value in the format `form` of struct."""

    def change(content):
        packed = struct.pack(form, value)
        return content[:offset] + packed + content[offset + len(packed) :]

    return change


def copy_files(source, target):
    """Copy the data set with the prefix `source` to the prefix `target`."""
    for suffix in (".idx", ".bin"):
        shutil.copy(f"{source}{suffix}", f"{target}{suffix}")


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("train.bin", lambda content: content[:-2], r"train\.bin has \d+ bytes, .*train\.idx says \d+: one is cut off"),
        ("train.bin", lambda content: content + b"\5\0", "one is cut off"),
        ("train.bin", lambda content: b"", r"train\.bin is empty"),
        ("train.bin", overwrite(10, "<H", 64), r"holds the id 64, but .*dict\.txt has 64 symbols"),
        ("train.idx", lambda content: content[:-2], r"train\.idx is damaged or cut off"),
        ("train.idx", lambda content: b"", r"train\.idx is damaged or cut off"),
        ("train.idx", overwrite(8, "<B", 1), r"train\.idx is damaged or cut off"),
        ("train.idx", overwrite(17, "<B", 6), r"train\.idx is damaged or cut off"),
        ("train.idx", overwrite(18, "<Q", 2**60), r"train\.idx is damaged or cut off"),
        ("train.idx", overwrite(26, "<i", 3000), r"train\.idx is damaged"),
        ("train.idx", overwrite(26, "<i", -3), r"train\.idx is damaged"),
        ("train.idx", overwrite(26 + 4 * 9 + 8, "<q", -2), r"train\.idx is damaged"),
        ("dict.txt", lambda content: b"", r"dict\.txt is empty"),
        ("dict.txt", lambda content: content + content, r"dict\.txt, line 61: the symbol 'w0' occurs twice"),
        ("dict.txt", lambda content: content + b"</s> 1\n", r"line 61: the symbol '</s>' occurs twice"),
        ("dict.txt", lambda content: b"\xff" + content, r"dict\.txt cannot be read: 'utf-8' codec"),
        ("dict.txt", lambda content: content + b"word\n", "line 61: expected a symbol and its count, found 'word"),
        ("dict.txt", lambda content: content + b"5\n", "line 61: expected a symbol and its count"),
        ("dict.txt", lambda content: content + b"a\rb 1\n", "line 61: expected a symbol and its count, found 'a"),
        # Without the last line, <mask>, which the task appends, would get the id of the last word.
        ("dict.txt", lambda content: content[: content.rindex(b"w59")], r"holds the id 63, but .* has 63 symbols"),
    ],
)
def test_damaged_corpus_is_rejected(corpus, file, damage, message):
    load(corpus)

    change_file(corpus / file, damage)

    assert_rejected(corpus, message)


def test_missing_file_of_a_part_is_rejected(corpus):
    shutil.copy(corpus / "valid.idx", corpus / "train1.idx")

    assert_rejected(corpus, r"train1\.idx exists, but .*train1\.bin is missing")


def test_parts_of_a_split_are_checked(corpus):
    copy_files(corpus / "valid", corpus / "train1")
    load(corpus)

    change_file(corpus / "train1.bin", overwrite(0, "<H", 999))

    assert_rejected(corpus, r"train1\.bin holds the id 999")
    load(corpus, split="valid")


def test_parts_with_different_dictionaries_are_rejected(corpus, tmp_path):
    second = shutil.copytree(corpus, tmp_path / "second")
    both = f"{corpus}:{second}"
    make_task("lln_masked_lm", both, tokens_per_sample=32)

    change_file(second / "dict.txt", lambda content: content.replace(b"w0 ", b"w00 "))

    with pytest.raises(UserError, match=r"second/dict\.txt has other symbols than .*lm/dict\.txt"):
        make_task("lln_masked_lm", both, tokens_per_sample=32)


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("label/train.bin", overwrite(4, "<H", 6), r"label/train: sample 2 is not one of the 2 labels"),
        ("label/train.bin", overwrite(4, "<H", 2), r"label/train: sample 2 is not one of the 2 labels"),
        ("label/train.bin", overwrite(6, "<H", 4), r"label/train: sample 2 has 2 labels"),
        ("label/train.bin", lambda content: content[:-4], "one is cut off"),
        ("label/dict.txt", lambda content: content + content, r"label/dict\.txt, line 3: the symbol '0' occurs twice"),
        ("input0/train.bin", overwrite(4, "<H", 65), r"input0/train\.bin holds the id 65"),
    ],
)
def test_damaged_classification_is_rejected(classification, file, damage, message):
    load(classification)

    change_file(classification / file, damage)

    assert_rejected(classification, message)


@pytest.fixture
def pairs(classification):
    """Return the classification with a second input, which a test may damage."""
    shutil.copytree(classification / "input0", classification / "input1")
    return classification


@pytest.fixture
def shorter_classification(tmp_path):
    """Return a classification with one row less."""
    return make_classification(tmp_path / "shorter", sizes=(("train", ROWS - 1),))


def test_missing_file_of_the_second_input_is_rejected(pairs):
    (pairs / "input1/train.idx").unlink()

    assert_rejected(pairs, r"input1/train\.idx is missing")


def test_missing_second_input_is_rejected(pairs):
    """fairseq would train with the first sentences only."""
    (pairs / "input1/train.idx").unlink()
    (pairs / "input1/train.bin").unlink()

    assert_rejected(pairs, "split 'train' of .* has 9 first and 0 second sentences")


def test_inputs_of_different_lengths_are_rejected(pairs, shorter_classification):
    copy_files(shorter_classification / "input0/train", pairs / "input1/train")

    assert_rejected(pairs, "has 9 first and 8 second sentences")


def test_inputs_with_different_dictionaries_are_rejected(pairs):
    change_file(pairs / "input1/dict.txt", lambda content: content.replace(b"w0 ", b"w00 "))

    assert_rejected(pairs, r"input1/dict\.txt has other symbols than")


def test_wrong_number_of_labels_is_rejected(classification, shorter_classification):
    copy_files(shorter_classification / "label/train", classification / "label/train")

    assert_rejected(classification, "label/train has 8 labels for 9 rows")


@pytest.mark.parametrize("labels", [["0"] * (ROWS - 1) + ["0 1"], ["0 1"] + ["0"] * (ROWS - 1)])
def test_row_with_two_labels_is_rejected(classification, labels):
    binarize(labels, classification / "label/dict.txt", classification / "label/train")

    row = labels.index("0 1") + 1
    assert_rejected(classification, f"label/train: sample {row} has 2 labels, but multi-label classification is not")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["0.5"] * 8, "has 8 lines for 9 rows"),
        (["0.5"] * 8 + ["nan"], r"line 9: expected 1 finite number\(s\), found 'nan"),
        (["0.5"] * 8 + ["0.5 0.5"], "line 9: expected 1 finite number"),
        (["0.5", "x"] + ["0.5"] * 7, r"line 2: expected 1 finite number\(s\), found 'x"),
    ],
)
def test_damaged_targets_are_rejected(classification, lines, message):
    task = make_task("lln_sentence_prediction", classification, num_classes=1, regression_target=True)
    path = classification / "label/train.label"
    path.write_text("0.5\n" * ROWS)
    task.load_dataset("train")

    path.write_text("\n".join(lines))

    with pytest.raises(UserError, match=message):
        task.load_dataset("train")


def test_corpus_is_checked_in_chunks(corpus, monkeypatch):
    monkeypatch.setattr(binary_format, "CHUNK_ELEMENTS", 7)
    load(corpus)

    ids = np.fromfile(corpus / "train.bin", np.uint16)
    ids[-2] = 64
    ids.tofile(corpus / "train.bin")

    assert_rejected(corpus, "holds the id 64")


@pytest.mark.parametrize(
    ("directory", "message"),
    [
        ("wikitext-103", "{} does not exist: prepare the data first, see python -m data_prep.wikitext103 --help"),
        ("glue/SST-2", "{} does not exist: prepare the data first, see python -m data_prep.glue --help"),
        ("mine", "{} does not exist: prepare the data first, see docs/data.md"),
        ("empty", "{}/dict.txt is missing: prepare the data first, see docs/data.md"),
        ("demo", "{0}/dict.txt is missing: did you mean {0}/lm?"),
    ],
)
def test_missing_dictionary_has_advice(directory, message, tmp_path):
    (tmp_path / "empty").mkdir()
    make_dictionary(tmp_path / "demo" / "lm" / "dict.txt", ["a"])
    make_dictionary(tmp_path / "demo" / "sentiment" / "input0" / "dict.txt", ["a"])

    with pytest.raises(UserError) as error:
        require_binarized(tmp_path / directory, "dict.txt")

    assert str(error.value) == message.format(tmp_path / directory)


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_every_id_is_checked_by_one_worker(workers, corpus, monkeypatch):
    """A wrong id ends exactly one worker, wherever it is."""
    prefix = str(corpus / "valid")
    ids = np.memmap(f"{prefix}.bin", np.uint16, "r+")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: workers)
    for position in (0, len(ids) // 2, len(ids) - 1):
        right = ids[position]
        ids[position] = 60000
        ends = []
        for rank in range(workers):
            monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
            try:
                assert check_lines(prefix, corpus / "dict.txt") == ROWS
            except UserError:
                ends.append(rank)
        assert len(ends) == 1
        ids[position] = right
