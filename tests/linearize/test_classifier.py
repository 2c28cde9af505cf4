"""Tests of `lln-fairseq linearize` with a fine-tuned teacher and the data of its task."""

import re
import shutil

import numpy as np
import pytest
import torch

from lln_fairseq.__main__ import main
from lln_fairseq.inference.evaluate import compute_outputs, compute_scores
from lln_fairseq.inference.loading import load_model
from lln_fairseq.linearize import progress
from lln_fairseq.linearize.attention_transfer import swapped_attention
from lln_fairseq.linearize.layerwise import Students
from lln_fairseq.linearize.task_rows import TaskRows, encoder_tokens
from tests.fairseq_runs import (
    CLASSIFICATION,
    LLN,
    MASKED_LM,
    USER_DIR,
    binarize,
    make_classification,
    make_corpus,
    make_dictionary,
    sentences,
    train,
)

SIZES = (("train", 120), ("valid", 90))
SOFTMAX = (*LLN, "--attention", "softmax", "--dropout", 0)
CLASSIFIER = (*CLASSIFICATION, "--criterion", "lln_sentence_prediction", "--lr", 0.003)
STUDENT = ("--option", "mix=joint_offset", "gain=learned", "block_size=8")
OPTIONS = (*STUDENT, "--steps", 20, "--tokens", 128, "--lr", 0.03)
SHORT = ("--steps", 2, "--tokens", 64)
HEADS = "classification_heads."


def run(*arguments):
    return main(["linearize", *map(str, arguments)])


def make_pairs(directory):
    """Binarize a classification with two inputs per row, and return the directory."""
    make_classification(directory, SIZES)
    shutil.copytree(directory / "input0", directory / "input1")
    for seed, (split, count) in enumerate(SIZES):
        binarize(sentences(count, seed + 7), directory / "input1" / "dict.txt", directory / "input1" / split)
    return directory


def fine_tune(folder, data, *options):
    """Train a classifier, widen its attention scores and its outputs, and return the path of its checkpoint."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        train(monkeypatch, folder / "log", data, folder / "run", *options)
    path = folder / "run" / "checkpoint_last.pt"
    state = torch.load(path, weights_only=False)
    generator = torch.Generator().manual_seed(4)
    for name, value in state["model"].items():
        if re.search(r"\.[qkv]_proj\.(weight|bias)|heads.*weight", name):
            value.copy_(torch.randn(value.shape, generator=generator) * 0.5)
    torch.save(state, path)
    model, task = load_model(str(path), str(data))
    medians = compute_outputs(model, task, "train").logits.median(dim=0).values
    state["model"][f"{HEADS}sentence_classification_head.out_proj.bias"] -= medians  # predict every class
    torch.save(state, path)
    return path


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Return the path and the data of a classifier of pairs."""
    folder = tmp_path_factory.mktemp("classifier")
    data = make_pairs(folder / "data")
    options = (*CLASSIFIER, *SOFTMAX, "--separator-token", 2, "--max-positions", 100, "--max-update", 4)
    return fine_tune(folder, data, *options), data


@pytest.fixture(scope="module")
def regression(tmp_path_factory):
    """Return the path and the data of a regression of single sentences."""
    folder = tmp_path_factory.mktemp("regression")
    data = make_classification(folder / "data", SIZES)
    for split, rows in SIZES:
        (data / "label" / f"{split}.label").write_text("".join(f"{row % 7 / 6}\n" for row in range(rows)))
    options = (*CLASSIFIER, *SOFTMAX, "--regression-target", "--num-classes", 1, "--max-update", 3)
    return fine_tune(folder, data, *options), data


def printed_scores(report):
    """Return the scores in a report by their labels."""
    return dict(re.findall(r"^  (\S.*?)  +((?:accuracy|Spearman) \S+)$", report, re.MULTILINE))


def evaluated_score(capsys, *arguments):
    """Return the first score that `lln-fairseq evaluate` prints, without options on the split valid."""
    capsys.readouterr()
    assert main(["evaluate", *map(str, arguments)]) == 0
    return re.search(r"(accuracy|Spearman) [-.\d]+%?", capsys.readouterr().out)[0]


def test_classifier_keeps_its_task_and_prints_its_scores(teacher, tmp_path, capsys):
    path, data = teacher
    out = tmp_path / "out"

    assert run(path, data, out, *OPTIONS, "--distill", 20, "--distill-lr", 1e-3) == 0

    report = capsys.readouterr().out
    assert f"scores on all 90 rows of split 'valid' of {data}:\n" in report
    scores = printed_scores(report)
    assert list(scores) == [
        "teacher",
        "lln_diag swapped in without training",
        "after the transfer",
        "after the transfer, LLN only",
        "after the transfer, Diag only",
        "after the distillation",
    ]
    assert len(set(scores.values())) > 2  # the attention matters for this teacher
    assert scores["teacher"] == evaluated_score(capsys, path, data)
    assert scores["after the distillation"] == evaluated_score(capsys, out / "model.pt", data)
    assert scores["after the distillation"] == evaluated_score(capsys, out / "model.pt")  # with the same data
    before = torch.load(path, weights_only=False)["model"]
    after = torch.load(out / "model.pt")["model"]
    for name in before:
        assert torch.equal(before[name], after[name]) == (".layers." not in name), name
    assert any(HEADS in name for name in after)
    assert (out / "tokenizer" / "label" / "dict.txt").is_file()

    assert run(path, data, out, *OPTIONS, "--distill", 20, "--distill-lr", 1e-3) == 0
    report = capsys.readouterr().out
    assert printed_scores(report) == scores
    assert "is complete" in report


def test_scores_are_those_of_the_swapped_attentions(teacher, tmp_path, capsys):
    """Without any step of the transfer, all scores can be computed from the untrained students."""
    path, data = teacher
    assert run(path, data, tmp_path / "out", *STUDENT, "--steps", 0) == 0
    scores = printed_scores(capsys.readouterr().out)
    model, task = load_model(str(path), str(data))
    options = {"mix": "joint_offset", "gain": "learned", "block_size": 8}
    students = Students(model, "lln_diag", options, 0.01, 0, seed=1)
    attentions = {"lln_diag swapped in without training": students.students, "after the transfer": students.students}
    for name, branch in students.branches().items():
        attentions[f"after the transfer, {name}"] = branch

    for label, modules in attentions.items():
        with swapped_attention(students.layers, modules):
            expected = compute_scores(task, compute_outputs(model, task, "valid"))
        assert scores[label] == f"accuracy {expected['accuracy']:.2%}", label


def test_first_rows_can_be_scored_and_other_rows_later(teacher, tmp_path, capsys):
    path, data = teacher
    assert run(path, data, tmp_path / "out", *SHORT, "--evaluate-rows", 20) == 0
    report = capsys.readouterr().out
    assert "scores on the first 20 of 90 rows" in report
    model, task = load_model(str(path), str(data))
    outputs = compute_outputs(model, task, "valid")
    correct = (outputs.logits.argmax(dim=-1) == outputs.targets)[:20].double().mean().item()
    assert printed_scores(report)["teacher"] == f"accuracy {correct:.2%}"

    assert run(path, data, tmp_path / "out", *SHORT) == 0

    report = capsys.readouterr().out
    assert "scores on all 90 rows" in report
    assert printed_scores(report)["teacher"] == evaluated_score(capsys, path, data)


def test_regression_prints_spearman(regression, tmp_path, capsys):
    path, data = regression

    assert run(path, data, tmp_path / "out", *OPTIONS) == 0

    scores = printed_scores(capsys.readouterr().out)
    assert scores["teacher"] == evaluated_score(capsys, path, data)
    assert scores["after the transfer"] == evaluated_score(capsys, tmp_path / "out" / "model.pt")


def test_plain_text_keeps_the_classifier(teacher, tmp_path, capsys):
    path, data = teacher
    corpus = make_corpus(tmp_path / "corpus", SIZES)

    assert run(path, corpus, tmp_path / "out", *SHORT) == 0

    assert "held-out texts of 100 tokens" in capsys.readouterr().out
    before = torch.load(path, weights_only=False)["model"]
    after = torch.load(tmp_path / "out" / "model.pt")["model"]
    heads = [name for name in before if HEADS in name]
    assert heads
    assert all(torch.equal(before[name], after[name]) for name in heads)
    evaluated_score(capsys, tmp_path / "out" / "model.pt")  # on the data of the teacher
    _, task = load_model(str(tmp_path / "out" / "model.pt"))
    assert task.cfg.data == str(data)


def test_models_of_fairseq_are_teachers(tmp_path, capsys):
    data = make_classification(tmp_path / "data", SIZES)
    options = [str(option) for option in CLASSIFICATION]
    options[1] = "sentence_prediction"
    path = fine_tune(tmp_path, data, *options, *USER_DIR, "--arch", "roberta_base", "--max-update", 1)

    assert run(path, data, tmp_path / "out", *OPTIONS) == 0

    scores = printed_scores(capsys.readouterr().out)
    assert scores["teacher"] == evaluated_score(capsys, path, data)
    assert scores["after the transfer"] == evaluated_score(capsys, tmp_path / "out" / "model.pt")


STAGES = {"transfer": (), "distillation": ("--distill", 8)}


@pytest.mark.parametrize("stage", STAGES)
def test_interrupted_stage_resumes_exactly(stage, teacher, tmp_path, monkeypatch, capsys):
    path, data = teacher
    options = (*OPTIONS, "--steps", 8, *STAGES[stage])
    monkeypatch.setattr(progress, "SAVE_INTERVAL", 3)
    monkeypatch.setattr(progress, "LOG_INTERVAL", 3)
    assert run(path, data, tmp_path / "whole", *options) == 0
    whole_report = capsys.readouterr().out
    train_stage = progress.Progress.train

    def interrupted(self, name, trainer, *args):
        train_step = trainer.train_step

        def interrupted_step(*args):
            if name == stage and trainer.step == 5:
                raise KeyboardInterrupt
            return train_step(*args)

        trainer.train_step = interrupted_step
        train_stage(self, name, trainer, *args)

    with monkeypatch.context() as patch:
        patch.setattr(progress.Progress, "train", interrupted)
        assert run(path, data, tmp_path / "out", *options) == 130
    assert not (tmp_path / "out" / "model.pt").exists()
    capsys.readouterr()

    assert run(path, data, tmp_path / "out", *options) == 0

    assert printed_scores(capsys.readouterr().out) == printed_scores(whole_report)
    expected = torch.load(tmp_path / "whole" / "model.pt")["model"]
    actual = torch.load(tmp_path / "out" / "model.pt")["model"]
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


def load_rows(teacher):
    _, task = load_model(str(teacher[0]), str(teacher[1]))
    return TaskRows(task, "train", 100), task


def test_drawn_rows_have_similar_lengths_and_equal_chances(teacher):
    rows, task = load_rows(teacher)
    generator = torch.Generator().manual_seed(2)
    counts = np.zeros(len(rows))
    padded = 0
    total = 0
    for _ in range(2000):
        sample = rows.draw(160, 60, generator)
        tokens = sample["net_input"]["src_tokens"]
        assert tokens.numel() <= 160 or len(tokens) == 1
        assert tokens.shape[1] <= 60
        padded += tokens.eq(task.source_dictionary.pad()).sum().item()
        total += tokens.numel()
        counts[sample["id"].numpy()] += 1

    short = rows.lengths <= 60
    assert counts[~short].sum() == 0
    assert counts[short].min() > 0.5 * counts[short].mean()
    assert counts[short].max() < 2 * counts[short].mean()
    assert padded < 0.1 * total


def test_rows_are_the_sequences_of_the_classifier(teacher):
    rows, task = load_rows(teacher)
    task.load_dataset("train")
    expected = task.dataset("train")[3]["net_input.src_tokens"]

    sample = rows.sample([3, 4])

    assert sample["net_input"]["src_tokens"][0, : len(expected)].equal(expected)
    assert (expected == 2).sum() >= 3  # <s> A </s></s> B </s>
    separate = {"net_input": {"src_tokens": torch.full((2, 3), 5), "other_tokens": torch.full((2, 4), 6)}}
    assert encoder_tokens(separate, pad=1).tolist() == [[5, 5, 5, 1]] * 2 + [[6, 6, 6, 6]] * 2


def without(data, copy, *names):
    """Copy a data directory without these files or directories."""
    shutil.copytree(data, copy)
    for name in names:
        for path in copy.glob(name):
            path.unlink()
    return copy


def with_labels(data, copy, names):
    """Copy a data directory with other names of labels."""
    shutil.copytree(data, copy)
    make_dictionary(copy / "label" / "dict.txt", names)
    return copy


BAD_INPUT = {
    "task.num_classes must be the number of labels": lambda data, copy: with_labels(data, copy, ["0", "1", "2"]),
    "was trained with the labels": lambda data, copy: with_labels(data, copy, ["1", "0"]),
    "cannot load split 'valid'": lambda data, copy: without(data, copy, "input?/valid.*", "label/valid.*"),
    "split 'valid' of .* has no labels": lambda data, copy: without(data, copy, "label/valid.*"),
    "split 'train' of .* has no labels": lambda data, copy: without(data, copy, "label/train.*"),
    "label/dict.txt is missing": lambda data, copy: without(data, copy, "label/dict.txt"),
    "has no row of at most 3 tokens": lambda data, copy: data,
}


@pytest.mark.parametrize("message", BAD_INPUT)
def test_bad_data_is_reported_in_one_line_and_creates_nothing(message, teacher, tmp_path, capsys):
    path, data = teacher
    options = ("--length", 3) if "3 tokens" in message else ()

    assert run(path, BAD_INPUT[message](data, tmp_path / "data"), tmp_path / "out", *SHORT, *options) == 1

    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_options_of_classifiers_need_a_classifier(teacher, tmp_path, monkeypatch, capsys):
    data = make_corpus(tmp_path / "data", SIZES)
    train(monkeypatch, tmp_path / "log", data, tmp_path / "run", *MASKED_LM, *SOFTMAX, "--max-update", 1)
    pretrained = tmp_path / "run" / "checkpoint_last.pt"
    for path, text in ((pretrained, data), (pretrained, teacher[1]), (teacher[0], data)):
        assert run(path, text, tmp_path / "out", *SHORT, "--finetune", 3) == 1
        assert "--finetune needs labels" in capsys.readouterr().err
        assert run(path, text, tmp_path / "out", *SHORT, "--evaluate-rows", 3) == 1
        assert "--evaluate-rows is for a fine-tuned TEACHER" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
