"""A run keeps what turns text into its model's ids."""

import json

import pytest

from lln_fairseq.data.vocabulary import load_vocabulary
from tests.fairseq_runs import CLASSIFICATION, LLN, MASKED_LM, make_corpus, train
from tests.text_runs import OPTIONS, make_glue


@pytest.fixture(scope="module")
def glue(tmp_path_factory):
    return make_glue(tmp_path_factory.mktemp("glue"), "SST-2", "RTE")


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def finetune(monkeypatch, data, run, name):
    options = (*CLASSIFICATION, *LLN, *OPTIONS[name], "--max-update", 1, "--reset-optimizer")
    train(monkeypatch, run.parent / "log", data / name, run, *options)
    return run / "tokenizer"


def test_a_finetuning_keeps_the_tokenizer_and_the_dictionaries_of_its_data(glue, tmp_path, monkeypatch):
    kept = finetune(monkeypatch, glue, tmp_path / "run", "RTE")
    expected = ["input0/dict.txt", "input1/dict.txt", "label/dict.txt", "manifest.json", "spm.model"]
    assert names(kept) == expected
    for name in set(expected) - {"manifest.json"}:
        assert (kept / name).read_bytes() == (glue / "RTE" / name).read_bytes()
    assert load_vocabulary(str(kept)).identity == load_vocabulary(str(glue / "RTE")).identity
    before = {name: (kept / name).stat().st_mtime_ns for name in expected}
    finetune(monkeypatch, glue, tmp_path / "run", "RTE")
    assert {name: (kept / name).stat().st_mtime_ns for name in expected} == before
    finetune(monkeypatch, glue, tmp_path / "run", "SST-2")  # another task in the same directory, by --reset-optimizer
    assert names(kept) == ["input0/dict.txt", "label/dict.txt", "manifest.json", "spm.model"]
    assert "label" in json.loads((glue / "SST-2/manifest.json").read_text())["datasets"]
    assert (kept / "label/dict.txt").read_bytes() == (glue / "SST-2/label/dict.txt").read_bytes()


def test_data_of_others_has_dictionaries_alone(tmp_path, monkeypatch, caplog):
    corpus = make_corpus(tmp_path / "corpus")
    train(monkeypatch, tmp_path / "log", corpus, tmp_path / "run", *MASKED_LM, *LLN, "--max-update", 1)
    assert names(tmp_path / "run/tokenizer") == ["dict.txt"]
    assert "only with the option --tokenizer" in caplog.text
    train(monkeypatch, tmp_path / "log", corpus, tmp_path / "none", *MASKED_LM, *LLN, "--max-update", 1, "--no-save")
    assert not (tmp_path / "none/tokenizer").exists()
