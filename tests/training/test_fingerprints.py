"""A run goes on with the data and the model that it began with."""

import shutil

import numpy as np
import pytest
import torch

from lln_fairseq.checkpoints.reading import OUR_STATE, load_checkpoint_lazily, our_state
from lln_fairseq.errors import InputError
from lln_fairseq.training import run_identity
from tests.fairseq_runs import CLASSIFICATION, LLN, binarize, make_classification, sentences, train
from tests.training.conftest import COMMON


def test_other_data_of_the_same_dictionary(begun, tmp_path, monkeypatch):
    run, other = shutil.copytree(begun[1], tmp_path / "run"), shutil.copytree(begun[0], tmp_path / "other")
    binarize(sentences(60, seed=9), other / "dict.txt", other / "train")
    with pytest.raises(InputError, match="holds another run: other training data"):
        train(monkeypatch, tmp_path / "a.log", other, run, *COMMON, "--max-update", 4)
    moved = shutil.copytree(begun[0], tmp_path / "moved")  # the same data elsewhere
    log = train(monkeypatch, tmp_path / "b.log", moved, run, *COMMON, "--max-update", 3)
    assert next(row["num_updates"] for row in log["train"]) == "3"


def test_other_words_of_the_same_lengths(begun, tmp_path, monkeypatch):
    run, other = shutil.copytree(begun[1], tmp_path / "run"), shutil.copytree(begun[0], tmp_path / "other")
    tokens = np.fromfile(other / "train.bin", np.uint16)
    tokens[tokens == 5] = 6
    tokens.tofile(other / "train.bin")
    with pytest.raises(InputError, match="holds another run: other training data"):
        train(monkeypatch, tmp_path / "a.log", other, run, *COMMON, "--max-update", 4)


def test_the_ends_and_the_middle_of_large_data_count(tmp_path, monkeypatch):
    monkeypatch.setattr(run_identity, "WHOLE_FILE", 1000)
    monkeypatch.setattr(run_identity, "CHUNK", 10)
    content = np.zeros(2000, np.uint8)
    hashes = set()
    for change in (None, 0, 1999, (1990 * 31) // 63):
        content[:] = 0
        if change is not None:
            content[change] = 1
        content.tofile(tmp_path / "train.bin")
        hashes.add(run_identity.data_hash([str(tmp_path)]))
    content[:1999].tofile(tmp_path / "train.bin")
    assert len(hashes | {run_identity.data_hash([str(tmp_path)])}) == 5


def test_labels_that_were_exchanged(tmp_path, monkeypatch):
    a = make_classification(tmp_path / "a")
    b = make_classification(tmp_path / "b", class_of=lambda row, line: "w1 " not in line)
    options = (*CLASSIFICATION, *LLN, "--max-update")
    train(monkeypatch, tmp_path / "a.log", a, tmp_path / "run", *options, 1)
    with pytest.raises(InputError, match="holds another run: other training data"):
        train(monkeypatch, tmp_path / "b.log", b, tmp_path / "run", *options, 2)


def test_checkpoints_of_before_are_not_compared_by_what_they_lack(begun, tmp_path, monkeypatch):
    corpus, run = begun[0], shutil.copytree(begun[1], tmp_path / "run")
    state = torch.load(run / "checkpoint_last.pt")
    record = state["extra_state"][OUR_STATE]
    assert (record.pop("start"), len(record.pop("content"))) == ("", 64)
    record["data"] = "a hash of the lengths"
    torch.save(state, run / "checkpoint_last.pt")
    log = train(monkeypatch, tmp_path / "log", corpus, run, *COMMON, "--max-update", 3)
    assert log["train"][-1]["num_updates"] == "3"
    assert "start" not in torch.load(run / "checkpoint_last.pt")["extra_state"][OUR_STATE]


def test_another_model_to_start_from(begun, tmp_path, monkeypatch):
    """By its content: not by its path, and a file that is gone says nothing."""
    corpus, scratch = begun
    a, b, moved = (tmp_path / f"{name}.pt" for name in ("a", "b", "moved"))
    shutil.copy(scratch / "checkpoint_last.pt", a)
    state = torch.load(a)
    state["model"]["encoder.lm_head.bias"] += 1
    torch.save(state, b)
    shutil.copy(a, moved)

    def go_on(updates, run, *options):
        train(monkeypatch, tmp_path / f"{updates}.log", corpus, run, *COMMON, "--max-update", updates, *options)
        return our_state(load_checkpoint_lazily(str(run / "checkpoint_last.pt")))["start"]

    def refused(run, *options):
        with pytest.raises(InputError, match="holds another run: another model to start from"):
            go_on(9, run, *options)

    run = tmp_path / "run"
    begin = go_on(1, run, "--finetune-from-model", a)
    refused(run, "--finetune-from-model", b)
    refused(run)
    refused(shutil.copytree(scratch, tmp_path / "scratch"), "--finetune-from-model", a)
    assert go_on(2, run, "--finetune-from-model", moved) == begin
    shutil.copy(b, a)
    refused(run, "--finetune-from-model", a)
    a.unlink()
    assert go_on(3, run, "--finetune-from-model", a) == begin
    elsewhere = tmp_path / "elsewhere"
    assert go_on(2, elsewhere, "--restore-file", moved, "--reset-optimizer") == begin
    assert go_on(3, elsewhere) == go_on(4, elsewhere, "--finetune-from-model", moved) == begin
