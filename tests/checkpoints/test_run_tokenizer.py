"""Tests of the tokenizer and the dictionaries that a run keeps next to its checkpoints."""

import json
import shutil

import pytest

from lln_fairseq import load
from lln_fairseq.checkpoints.run_tokenizer import save_tokenizer
from lln_fairseq.text.vocabulary import load_vocabulary
from tests.fairseq_runs import CLASSIFICATION, LLN, MASKED_LM, make_corpus, train
from tests.tasks.test_tasks import make_task
from tests.text_runs import OPTIONS, make_glue, texts_of


@pytest.fixture(scope="module")
def glue(tmp_path_factory):
    return make_glue(tmp_path_factory.mktemp("glue"), "SST-2", "RTE")


def file_names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def finetune(monkeypatch, data, run, task, *start):
    """Fine-tune on a task for one update, and return the tokenizer folder of the run."""
    options = (*CLASSIFICATION, *LLN, *OPTIONS[task], "--max-update", 1, *(start or ["--reset-optimizer"]))
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


def test_finetuning_inherits_tokenizer_of_initial_checkpoint(glue, tmp_path, monkeypatch):
    finetune(monkeypatch, glue, tmp_path / "first", "SST-2")
    binarized = shutil.copytree(
        glue / "SST-2", tmp_path / "data/SST-2"
    )  # as by fairseq-preprocess: without a tokenizer
    (binarized / "spm.model").unlink()
    (binarized / "manifest.json").unlink()
    start = ("--finetune-from-model", tmp_path / "first/checkpoint_last.pt")

    saved = finetune(monkeypatch, tmp_path / "data", tmp_path / "second", "SST-2", *start)

    assert load_vocabulary(str(saved)).identity == load_vocabulary(str(glue / "SST-2")).identity
    texts = [text for (text,) in texts_of(glue, "SST-2")]
    model = load(str(tmp_path / "second/checkpoint_last.pt"))
    assert len(model.predict(texts)) == len(texts)


def test_tokenizer_of_other_dictionary_is_not_inherited(glue, tmp_path, caplog):
    data = shutil.copytree(glue / "SST-2", tmp_path / "data")
    (data / "spm.model").unlink()
    (data / "manifest.json").unlink()
    with (data / "input0/dict.txt").open("a") as file:
        file.write("more 1\n")
    task = make_task("lln_sentence_prediction", data, num_classes=2, regression_target=False)

    save_tokenizer(task, str(tmp_path / "run"), str(glue / "SST-2/checkpoint.pt"))

    assert file_names(tmp_path / "run/tokenizer") == ["input0/dict.txt", "label/dict.txt"]


def test_data_without_tokenizer_saves_only_dictionaries(tmp_path, monkeypatch, caplog):
    corpus = make_corpus(tmp_path / "corpus")
    options = (*MASKED_LM, *LLN, "--max-update", 1)

    train(monkeypatch, tmp_path / "log", corpus, tmp_path / "run", *options)
    assert file_names(tmp_path / "run/tokenizer") == ["dict.txt"]
    assert "only with the option --tokenizer" in caplog.text

    train(monkeypatch, tmp_path / "log", corpus, tmp_path / "none", *options, "--no-save")
    assert not (tmp_path / "none/tokenizer").exists()
