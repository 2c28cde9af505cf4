"""Binarised data that is damaged or of another dictionary is refused before fairseq reads it."""

import shutil
import struct

import numpy as np
import pytest

from lln_fairseq.data import binary_format
from lln_fairseq.errors import InputError
from tests.fairseq_runs import make_classification, make_corpus
from tests.tasks.test_tasks import make_task

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    make_corpus(folder / "lm", sizes=(("train", 9), ("valid", 9)))
    make_classification(folder / "task", sizes=(("train", 9),))
    return folder


@pytest.fixture
def data(sound, tmp_path):
    """A copy of the data to be damaged: lm/ and task/."""
    return shutil.copytree(sound, tmp_path / "data")


def load(data, split="train"):
    if data.name == "lm":
        task = make_task("lln_masked_lm", data, tokens_per_sample=32)
    else:
        task = make_task("lln_sentence_prediction", data, num_classes=2, regression_target=False)
    task.load_dataset(split, combine=split == "train")
    return task


def refuse(data, message, **options):
    with pytest.raises(InputError, match=message) as error:
        load(data, **options)
    assert "\n" not in str(error.value)


def change(path, function):
    path.write_bytes(function(path.read_bytes()))


def put(offset, form, value):
    return lambda content: content[:offset] + struct.pack(form, value) + content[offset + struct.calcsize(form) :]


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("train.bin", lambda content: content[:-2], r"train\.bin has \d+ bytes, .*train\.idx says \d+: one is cut off"),
        ("train.bin", lambda content: content + b"\5\0", "one is cut off"),
        ("train.bin", lambda content: b"", r"train\.bin is empty"),
        ("train.bin", put(10, "<H", 64), r"holds the id 64, but .*dict\.txt has 64 symbols"),
        ("train.idx", lambda content: content[:-2], r"train\.idx is damaged or cut off"),
        ("train.idx", lambda content: content[:20], r"train\.idx is damaged or cut off"),
        ("train.idx", put(8, "<B", 1), r"train\.idx is damaged or cut off"),
        ("train.idx", put(17, "<B", 6), r"train\.idx is damaged or cut off"),
        ("train.idx", put(18, "<Q", 2**60), r"train\.idx is damaged or cut off"),
        ("train.idx", put(26, "<i", 3000), r"train\.idx is damaged"),
        ("train.idx", put(26, "<i", -3), r"train\.idx is damaged"),
        ("train.idx", put(26 + 4 * 9 + 8, "<q", -2), r"train\.idx is damaged"),
        ("dict.txt", lambda content: b"", r"dict\.txt is empty"),
        ("dict.txt", lambda content: content + content, r"dict\.txt, line 61: the symbol 'w0' occurs twice"),
        ("dict.txt", lambda content: content + b"</s> 1\n", r"line 61: the symbol '</s>' occurs twice"),
        ("dict.txt", lambda content: b"\xff" + content, r"dict\.txt cannot be read: 'utf-8' codec"),
        ("dict.txt", lambda content: content + b"word\n", "line 61: expected a symbol and its count, found 'word"),
        ("dict.txt", lambda content: content + b"5\n", "line 61: expected a symbol and its count"),
        ("dict.txt", lambda content: content + b"a\rb 1\n", "line 61: expected a symbol and its count, found 'a"),
        # <mask>, which the task adds, would take the place of the last word
        ("dict.txt", lambda content: content[: content.rindex(b"w59")], r"holds the id 63, but .* has 63 symbols"),
    ],
)
def test_damaged_corpus(data, file, damage, message):
    load(data / "lm")
    change(data / "lm" / file, damage)
    refuse(data / "lm", message)


def test_a_file_alone_and_the_parts_of_a_split(data):
    shutil.copy(data / "lm/valid.idx", data / "lm/train1.idx")
    refuse(data / "lm", r"train1\.bin is missing beside .*train1\.idx")
    shutil.copy(data / "lm/valid.bin", data / "lm/train1.bin")
    load(data / "lm")
    change(data / "lm/train1.bin", put(0, "<H", 999))
    refuse(data / "lm", r"train1\.bin holds the id 999")
    load(data / "lm", split="valid")


def test_parts_with_different_dictionaries(data, tmp_path):
    second = shutil.copytree(data / "lm", tmp_path / "second")
    both = f"{data / 'lm'}:{second}"
    make_task("lln_masked_lm", both, tokens_per_sample=32)
    change(second / "dict.txt", lambda content: content.replace(b"w0 ", b"w00 "))
    with pytest.raises(InputError, match=r"second/dict\.txt has other symbols than .*lm/dict\.txt"):
        make_task("lln_masked_lm", both, tokens_per_sample=32)


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("label/train.bin", put(4, "<H", 6), r"label/train: sample 2 is not one of the 2 labels"),
        ("label/train.bin", put(4, "<H", 2), r"label/train: sample 2 is not one of the 2 labels"),
        ("label/train.bin", put(6, "<H", 4), r"is not one of the 2 labels"),
        ("label/train.bin", lambda content: content[:-4], "one is cut off"),
        (
            "label/dict.txt",
            lambda content: content + content,
            r"label/dict\.txt, line 3: the symbol '0' occurs twice",
        ),
        ("input0/train.bin", put(4, "<H", 65), r"input0/train\.bin holds the id 65"),
    ],
)
def test_damaged_classification(data, file, damage, message):
    load(data / "task")
    change(data / "task" / file, damage)
    refuse(data / "task", message)


def test_files_of_a_pair_belong_together(data, sound, tmp_path):
    task = data / "task"
    shutil.copytree(task / "input0", task / "input1")
    assert len(load(task).dataset("train")) == 9
    (task / "input1/train.idx").unlink()
    refuse(task, r"input1/train\.idx is missing beside")
    (task / "input1/train.bin").unlink()  # fairseq would take the first sentences alone
    refuse(task, "split 'train' of .* has 9 first and 0 second sentences")
    other = make_classification(tmp_path / "other", sizes=(("train", 8),))
    for suffix in (".idx", ".bin"):
        shutil.copy(other / f"input0/train{suffix}", task / f"input1/train{suffix}")
    refuse(task, "has 9 first and 8 second sentences")
    change(task / "input1/dict.txt", lambda content: content.replace(b"w0 ", b"w00 "))
    refuse(task, r"input1/dict\.txt has other symbols than")
    shutil.rmtree(task / "input1")
    for suffix in (".idx", ".bin"):
        shutil.copy(other / f"label/train{suffix}", task / f"label/train{suffix}")
    refuse(task, "label/train has 8 labels for 9 rows")
    for suffix in (".idx", ".bin"):
        (task / f"label/train{suffix}").unlink()
    refuse(task, "split 'train' of .* has no labels")
    (task / "input0/train.idx").rename(task / "input0/test.idx")
    (task / "input0/train.bin").rename(task / "input0/test.bin")
    load(task, split="test")  # test sets have none


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["0.5"] * 8, "has 8 lines for 9 rows"),
        (["0.5"] * 8 + ["nan"], "line 9: expected finite numbers: 1, found 'nan"),
        (["0.5"] * 8 + ["0.5 0.5"], "line 9: expected finite numbers: 1"),
        (["0.5", "x"] + ["0.5"] * 7, "line 2: expected finite numbers: 1, found 'x"),
    ],
)
def test_damaged_targets(data, lines, message):
    task = make_task("lln_sentence_prediction", data / "task", num_classes=1, regression_target=True)
    path = data / "task/label/train.label"
    path.write_text("0.5\n" * 9)
    task.load_dataset("train")
    path.write_text("\n".join(lines))
    with pytest.raises(InputError, match=message):
        task.load_dataset("train")


def test_a_corpus_is_read_in_pieces(data, monkeypatch):
    monkeypatch.setattr(binary_format, "CHUNK_ELEMENTS", 7)
    load(data / "lm")
    ids = np.fromfile(data / "lm/train.bin", np.uint16)
    ids[-2] = 64
    ids.tofile(data / "lm/train.bin")
    refuse(data / "lm", "holds the id 64")
