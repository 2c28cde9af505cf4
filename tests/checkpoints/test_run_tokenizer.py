"""Tests of the tokenizer and the dictionaries that a run keeps next to its checkpoints."""

import json

import pytest

from lln_fairseq.text.vocabulary import load_vocabulary
from tests.fairseq_runs import CLASSIFICATION, LLN, MASKED_LM, make_corpus, train
from tests.text_runs import OPTIONS, make_glue


@pytest.fixture(scope="module")
def glue(tmp_path_factory):
    return make_glue(tmp_path_factory.mktemp("glue"), "SST-2", "RTE")


def file_names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def finetune(monkeypatch, data, run, task):
    """Fine-tune on a task for one update, and return the tokenizer folder of the run."""
    options = (*CLASSIFICATION, *LLN, *OPTIONS[task], "--max-update", 1, "--reset-optimizer")
    train(monkeypatch, run.parent / "log", data / task, run, *options)
    return run / "tokenizer"


def test_finetuning_saves_tokenizer_and_dictionaries(glue, tmp_path, monkeypatch):
    saved = finetune(monkeypatch, glue, tmp_path / "run", "RTE")
    expected = ["input0/dict.txt", "input1/dict.txt", "label/dict.txt", "manifest.json", "spm.model"]
    assert file_names(saved) == expected
    for name in set(expected) - {"manifest.json"}:
        assert (saved / name).read_bytes() == (glue / "RTE" / name).read_bytes()
    assert load_vocabulary(str(saved)).identity == load_vocabulary(str(glue / "RTE")).identity

    # The same run again does not write unchanged files.
    times = {name: (saved / name).stat().st_mtime_ns for name in expected}
    finetune(monkeypatch, glue, tmp_path / "run", "RTE")
    assert {name: (saved / name).stat().st_mtime_ns for name in expected} == times

    # Another task in the same directory (--reset-optimizer) replaces the files.
    finetune(monkeypatch, glue, tmp_path / "run", "SST-2")
    assert file_names(saved) == ["input0/dict.txt", "label/dict.txt", "manifest.json", "spm.model"]
    assert "label" in json.loads((glue / "SST-2/manifest.json").read_text())["datasets"]
    assert (saved / "label/dict.txt").read_bytes() == (glue / "SST-2/label/dict.txt").read_bytes()


def test_data_without_tokenizer_saves_only_dictionaries(tmp_path, monkeypatch, caplog):
    corpus = make_corpus(tmp_path / "corpus")
    options = (*MASKED_LM, *LLN, "--max-update", 1)

    train(monkeypatch, tmp_path / "log", corpus, tmp_path / "run", *options)
    assert file_names(tmp_path / "run/tokenizer") == ["dict.txt"]
    assert "only with the option --tokenizer" in caplog.text

    train(monkeypatch, tmp_path / "log", corpus, tmp_path / "none", *options, "--no-save")
    assert not (tmp_path / "none/tokenizer").exists()
