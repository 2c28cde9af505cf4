"""Evaluation and prediction of fine-tuned checkpoints."""

import json
import math
import re
import shutil

import pytest
import torch

from lln_fairseq.__main__ import main
from lln_fairseq.inference.evaluate import Outputs, load, score
from tests import fairseq_runs
from tests.fairseq_runs import CLASSIFICATION, LLN, MASKED_LM, make_classification, make_corpus, make_dictionary, train

OURS = (*CLASSIFICATION, *LLN, "--criterion", "lln_sentence_prediction")
SIZES = (("train", 60), ("valid", 61))


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    data = make_classification(tmp_path / "data", sizes=SIZES)
    log = train(monkeypatch, tmp_path / "log", data, tmp_path / "run", *OURS, "--lr", 0.003, "--max-update", 8)
    return data, tmp_path / "run" / "checkpoint_last.pt", log


def evaluate(capsys, *arguments):
    code = main(["evaluate", *map(str, arguments)])
    return code, *capsys.readouterr()


def test_every_row_is_scored_and_predicted(tuned, tmp_path, capsys):
    data, checkpoint, log = tuned
    out, tsv = tmp_path / "valid.json", tmp_path / "valid.tsv"
    code, said, _ = evaluate(capsys, checkpoint, data, "--json", out, "--predict", tsv)
    assert code == 0
    found, trained = json.loads(out.read_text()), log["valid"][-1]
    assert found["rows"] == 61
    for name in ("accuracy", "f1", "mcc"):
        assert 100 * found[name] == pytest.approx(float(trained[f"valid_{name}"]), abs=0.01)
    assert re.search(r"valid: 61 rows, accuracy \d+\.\d\d%, majority class .*F1 of class 1.*Matthews", said)
    header, *rows = (line.split("\t") for line in tsv.read_text().splitlines())
    assert header == ["index", "prediction"]
    assert [row for row, _ in rows] == list(map(str, range(61)))
    labels = [str(int("w1 " in line)) for line in fairseq_runs.sentences(61, 1)]
    hits = sum(label == prediction for label, (_, prediction) in zip(labels, rows, strict=True))
    assert hits / 61 == pytest.approx(found["accuracy"])


def test_several_splits_give_what_each_gives(tuned, tmp_path, capsys):
    data, checkpoint, _ = tuned
    said = "".join(
        evaluate(capsys, checkpoint, data, "--split", x, "--json", tmp_path / x)[1] for x in ("valid", "train")
    )
    names = ("--json", tmp_path / "{split}.json", "--predict", tmp_path / "{split}.tsv")
    code, both, _ = evaluate(capsys, checkpoint, data, "--split", "valid,train", *names)
    assert code == 0
    assert [line for line in both.splitlines() if "predictions" not in line] == said.splitlines()
    for split, rows in (("valid", 61), ("train", 60)):
        assert (tmp_path / f"{split}.json").read_text() == (tmp_path / split).read_text()
        assert len((tmp_path / f"{split}.tsv").read_text().splitlines()) == rows + 1
    with pytest.raises(SystemExit) as error:
        evaluate(capsys, checkpoint, data, "--split", "valid,train", "--json", tmp_path / "one.json")
    assert error.value.code == 2
    assert "--json: several splits need {split} in the file's name" in capsys.readouterr().err
    assert not (tmp_path / "one.json").exists()


def test_scale_that_is_not_finite_is_wrong_usage(capsys):
    with pytest.raises(SystemExit):
        main(["evaluate", "unread.pt", "--predict", "a.tsv", "--scale", "nan"])
    assert "must be above 0 and finite" in capsys.readouterr().err


def test_empty_split_is_wrong_usage(capsys):
    with pytest.raises(SystemExit):
        main(["evaluate", "unread.pt", "--split", "valid,"])
    assert "--split names an empty split" in capsys.readouterr().err


def test_predictions_have_the_names_of_the_labels_whatever_their_order(tmp_path, monkeypatch, capsys):
    names = ["yes", "no"]  # by frequency, as fairseq-preprocess does
    data = make_classification(tmp_path / "data", sizes=SIZES, names=names, class_of=lambda row, line: 0)
    train(monkeypatch, tmp_path / "log", data, tmp_path / "run", *OURS, "--lr", 0.003, "--max-update", 8)
    shutil.rmtree(data / "label")
    make_dictionary(data / "label" / "dict.txt", names)  # a test set has no labels
    checkpoint, tsv = tmp_path / "run" / "checkpoint_last.pt", tmp_path / "out.tsv"
    assert evaluate(capsys, checkpoint, data, "--predict", tsv)[0] == 0
    assert {line.split("\t")[1] for line in tsv.read_text().splitlines()[1:]} == {"yes"}
    code, _, error = evaluate(capsys, checkpoint, data)
    assert (code, error.count("\n")) == (1, 1)
    assert "has no labels to score" in error
    make_dictionary(data / "label" / "dict.txt", ["no", "yes"])
    code, _, error = evaluate(capsys, checkpoint, data)
    assert code == 1
    assert "was trained with the labels ['yes', 'no']" in error


def test_a_regression_has_correlations_and_scores(tmp_path, monkeypatch, capsys):
    data = make_classification(tmp_path / "data", sizes=SIZES)
    for split, rows in SIZES:
        (data / "label" / f"{split}.label").write_text("".join(f"{row % 7 / 6}\n" for row in range(rows)))
    log = train(monkeypatch, tmp_path / "log", data, tmp_path / "run", *OURS, "--regression-target",
                "--num-classes", 1)  # fmt: skip
    out, tsv = tmp_path / "valid.json", tmp_path / "valid.tsv"
    code, said, _ = evaluate(capsys, tmp_path / "run" / "checkpoint_last.pt", data, "--json", out, "--predict", tsv)
    assert code == 0
    assert "Pearson" in said
    found, trained = json.loads(out.read_text()), log["valid"][-1]
    for name in ("pearson", "spearman"):
        assert 100 * found[name] == pytest.approx(float(trained[f"valid_{name}"]), abs=0.02)
    scores = [float(line.split("\t")[1]) for line in tsv.read_text().splitlines()[1:]]
    assert len(scores) == 61
    assert 0 <= min(scores) <= max(scores) <= 5


BIAS = "encoder.sentence_encoder.layers.0.fc1.bias"


def with_bias(checkpoint, change):
    """Save the checkpoint beside itself with another bias of the first layer, and return its path."""
    state = torch.load(checkpoint)
    state["model"][BIAS] = change(state["model"][BIAS])
    path = checkpoint.with_name("changed.pt")
    torch.save(state, path)
    return path


def test_weights_that_are_no_numbers_are_refused(tuned, capsys):
    data, checkpoint, _ = tuned
    for change, message in (
        (lambda bias: bias.to(torch.int8), "is of dtype int8"),
        (lambda bias: bias.fill_(torch.inf), "has NaN or infinite values"),
    ):
        code, said, error = evaluate(capsys, with_bias(checkpoint, change), data)
        assert (code, said, error.count("\n")) == (1, "", 1)
        assert f"{BIAS} {message}" in error


def test_outputs_that_are_not_finite_are_refused(tuned, tmp_path, capsys):
    data, checkpoint, _ = tuned
    out = tmp_path / "valid.json"
    changed = with_bias(checkpoint, lambda bias: bias.fill_(3e38))
    code, said, error = evaluate(capsys, changed, data, "--json", out)
    assert (code, said, error.count("\n")) == (1, "", 1)
    assert "the model gives NaN or infinite outputs for row 0 of split 'valid'" in error
    assert not out.exists()


def test_loss_of_large_logits_is_finite(tuned):
    _, task = load(str(tuned[1]), str(tuned[0]))
    logits = torch.tensor([[3e38, -3e38]])
    assert math.isfinite(score(task, Outputs("valid", logits, torch.tensor([1])))["loss"])


def test_what_cannot_be_evaluated_is_said_in_one_line(tuned, tmp_path, monkeypatch, capsys):
    data, checkpoint, _ = tuned
    corpus = make_corpus(tmp_path / "corpus")
    train(monkeypatch, tmp_path / "p.log", corpus, tmp_path / "p", *MASKED_LM, *LLN, "--max-update", 1)
    other = shutil.copytree(data, tmp_path / "other")
    make_dictionary(other / "input0" / "dict.txt", fairseq_runs.WORDS[::-1])
    (tmp_path / "text.pt").write_text("no checkpoint")
    cases = [
        (tmp_path / "nowhere.pt", data, "no such checkpoint"),
        (tmp_path / "text.pt", data, "cannot load"),
        (tmp_path / "p" / "checkpoint_last.pt", data, "was not fine-tuned: .*lln_masked_lm"),
        (checkpoint, tmp_path, "is not a binarized data directory"),
        (checkpoint, other, "the dictionary of .*other is not the one"),
        ((checkpoint, "--split", "nope"), data, "cannot load split 'nope'"),
        (("unread.pt", "--predict", tmp_path / "P" / "{split}.tsv"), data, "cannot write .*: no such directory: .*P$"),
    ]
    for path, directory, message in cases:
        path, *options = path if isinstance(path, tuple) else (path,)
        code, _said, error = evaluate(capsys, path, directory, *options)
        assert code == 1
        assert re.search(message, error), error
        assert error.startswith("error: ")
