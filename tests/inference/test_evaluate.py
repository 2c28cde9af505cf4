"""Evaluation of fine-tuned checkpoints, and their predictions for a split."""

import json
import re
import shutil

import pytest
import torch

from lln_fairseq.__main__ import main
from lln_fairseq.errors import UserError
from lln_fairseq.inference.evaluate import compute_outputs, load_finetuned_model
from tests import fairseq_runs
from tests.fairseq_runs import (
    CLASSIFICATION,
    LLN,
    make_classification,
    make_dictionary,
    train,
    write_scores,
)

FINE_TUNING = (*CLASSIFICATION, *LLN, "--criterion", "lln_sentence_prediction", "--lr", 0.003, "--max-update", 8)
SIZES = (("train", 60), ("valid", 61))
BIAS = "encoder.sentence_encoder.layers.0.fc1.bias"


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """Return the data directory, the checkpoint and the log of a fine-tuning."""
    folder = tmp_path_factory.mktemp("tuned")
    data = make_classification(folder / "data", sizes=SIZES)
    with pytest.MonkeyPatch.context() as monkeypatch:
        log = train(monkeypatch, folder / "log", data, folder / "run", *FINE_TUNING)
    return data, folder / "run" / "checkpoint_last.pt", log


def evaluate(capsys, *arguments):
    """Run `lln-fairseq evaluate` and return its exit code, standard output and standard error."""
    code = main(["evaluate", *map(str, arguments)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def read_predictions(path):
    """Return the predictions in a file of GLUE's format, after a check of its header and indices."""
    header, *rows = (line.split("\t") for line in path.read_text().splitlines())
    assert header == ["index", "prediction"]
    assert [index for index, _ in rows] == [str(number) for number in range(len(rows))]
    return [prediction for _, prediction in rows]


def test_every_row_is_scored_and_predicted(tuned, tmp_path, capsys):
    data, checkpoint, log = tuned
    json_file = tmp_path / "valid.json"
    tsv_file = tmp_path / "valid.tsv"

    code, output, _ = evaluate(capsys, checkpoint, data, "--json", json_file, "--predict", tsv_file)

    assert code == 0
    assert re.search(r"valid: 61 rows, accuracy \d+\.\d\d%, majority class .*F1 of label (\w+) .*Matthews", output)
    scores = json.loads(json_file.read_text())
    assert scores["rows"] == 61
    assert scores["provenance"]["versions"]["torch"] == torch.__version__
    for name in ("accuracy", "f1", "mcc"):
        assert 100 * scores[name] == pytest.approx(float(log["valid"][-1][f"valid_{name}"]), abs=0.01)
    predictions = read_predictions(tsv_file)
    labels = [str(int("w1 " in line)) for line in fairseq_runs.sentences(61, 1)]
    correct = sum(label == prediction for label, prediction in zip(labels, predictions, strict=True))
    assert correct / 61 == pytest.approx(scores["accuracy"])


def test_evaluation_has_the_requested_precision(tuned, tmp_path, capsys, monkeypatch):
    data, checkpoint, _ = tuned
    monkeypatch.setenv("LLN_LINEAR", "torch,int_mm")
    losses = {}
    for precision in ("float32", "int8"):
        file = tmp_path / f"{precision}.json"
        assert evaluate(capsys, checkpoint, data, "--json", file, "--precision", precision)[0] == 0
        losses[precision] = json.loads(file.read_text())["loss"]
    assert losses["float32"] != losses["int8"] == pytest.approx(losses["float32"], rel=0.05)


def test_several_splits_give_results_of_each_split(tuned, tmp_path, capsys):
    data, checkpoint, _ = tuned
    expected_output = ""
    for split in ("valid", "train"):
        _, output, _ = evaluate(capsys, checkpoint, data, "--split", split, "--json", tmp_path / split)
        expected_output += output
    files = ("--json", tmp_path / "{split}.json", "--predict", tmp_path / "{split}.tsv")

    code, output, _ = evaluate(capsys, checkpoint, data, "--split", "valid,train", *files)

    assert code == 0
    score_lines = [line for line in output.splitlines() if "predictions" not in line]
    assert score_lines == expected_output.splitlines()
    for split, rows in (("valid", 61), ("train", 60)):
        assert (tmp_path / f"{split}.json").read_text() == (tmp_path / split).read_text()
        assert len(read_predictions(tmp_path / f"{split}.tsv")) == rows


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--predict", "a.tsv", "--scale", "nan"], "--scale must be above 0 and finite"),
        (["--split", "valid,"], "one split is empty"),
        (["--split", "valid,train", "--json", "one.json"], "--json must have {split} in the file's name"),
        (["--json", "one", "--predict", "one"], "--json and --predict must be different files"),
    ],
)
def test_wrong_usage_exits_with_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        main(["evaluate", "unread.pt", *arguments])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def trained_on_names(tmp_path_factory):
    """Return the data and the checkpoint of a fine-tuning in which every row has the label yes."""
    folder = tmp_path_factory.mktemp("names")
    names = ["yes", "no"]  # by frequency, as fairseq-preprocess orders them
    data = make_classification(folder / "data", sizes=SIZES, names=names, class_of=lambda row, line: 0)
    with pytest.MonkeyPatch.context() as monkeypatch:
        train(monkeypatch, folder / "log", data, folder / "run", *FINE_TUNING)
    return data, folder / "run" / "checkpoint_last.pt"


@pytest.fixture
def tuned_on_names(trained_on_names, tmp_path):
    """Return a copy of the data of `trained_on_names`, which may be changed, and the checkpoint."""
    data, checkpoint = trained_on_names
    return shutil.copytree(data, tmp_path / "data"), checkpoint


def test_predictions_of_unlabeled_split_have_names_of_labels(tuned_on_names, tmp_path, capsys):
    data, checkpoint = tuned_on_names
    shutil.rmtree(data / "label")
    make_dictionary(data / "label" / "dict.txt", ["yes", "no"])  # a test set has no labels

    assert evaluate(capsys, checkpoint, data, "--predict", tmp_path / "out.tsv")[0] == 0
    assert set(read_predictions(tmp_path / "out.tsv")) == {"yes"}

    code, _, error = evaluate(capsys, checkpoint, data)
    assert code == 1
    assert error.count("\n") == 1
    assert "has no labels to score" in error


def test_labels_in_other_order_are_rejected(tuned_on_names, tmp_path, capsys, monkeypatch):
    data, checkpoint = tuned_on_names
    make_dictionary(data / "label" / "dict.txt", ["no", "yes"])
    code, _, error = evaluate(capsys, checkpoint, data)
    assert code == 1
    assert "was trained with the labels ['yes', 'no']" in error
    start = (*FINE_TUNING, "--finetune-from-model", checkpoint)
    with pytest.raises(UserError, match=r"was trained with the labels \['yes', 'no'\]"):
        train(monkeypatch, tmp_path / "log", data, tmp_path / "head", *start, "--load-checkpoint-heads")
    train(monkeypatch, tmp_path / "log", data, tmp_path / "other", *start)


def test_regression_has_correlations_and_scores(tmp_path, monkeypatch, capsys):
    data = make_classification(tmp_path / "data", sizes=SIZES)
    write_scores(data, SIZES)
    regression = ("--regression-target", "--num-classes", 1, "--lr", 0.001, "--max-update", 3)
    log = train(monkeypatch, tmp_path / "log", data, tmp_path / "run", *FINE_TUNING, *regression)
    checkpoint = tmp_path / "run" / "checkpoint_last.pt"
    json_file = tmp_path / "valid.json"
    tsv_file = tmp_path / "valid.tsv"

    code, output, _ = evaluate(capsys, checkpoint, data, "--json", json_file, "--predict", tsv_file)

    assert code == 0
    assert "Pearson" in output
    scores = json.loads(json_file.read_text())
    for name in ("pearson", "spearman"):
        assert 100 * scores[name] == pytest.approx(float(log["valid"][-1][f"valid_{name}"]), abs=0.02)
    predictions = [float(value) for value in read_predictions(tsv_file)]
    model, task = load_finetuned_model(str(checkpoint), str(data))
    outputs = compute_outputs(model, task, "valid").logits.view(-1)
    assert predictions == pytest.approx(outputs.tolist(), abs=6e-4)
    assert evaluate(capsys, checkpoint, data, "--predict", tsv_file, "--scale", 5)[0] == 0
    scaled = [float(value) for value in read_predictions(tsv_file)]
    assert scaled == pytest.approx((5 * outputs).clamp(0, 5).tolist(), abs=6e-4)


def with_bias(checkpoint, change):
    """Save the checkpoint with a changed bias of the first layer in the same directory, and return its path."""
    state = torch.load(checkpoint)
    state["model"][BIAS] = change(state["model"][BIAS])
    path = checkpoint.with_name("changed.pt")
    torch.save(state, path)
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda bias: bias.to(torch.int8), "is of dtype int8"),
        (lambda bias: bias.fill_(torch.inf), "has NaN or infinite values"),
    ],
)
def test_weights_that_are_no_finite_numbers_are_rejected(change, message, tuned, capsys):
    data, checkpoint, _ = tuned
    code, output, error = evaluate(capsys, with_bias(checkpoint, change), data)
    assert (code, output, error.count("\n")) == (1, "", 1)
    assert f"{BIAS} {message}" in error


def test_missing_parameter_is_named(tuned, capsys):
    data, checkpoint, _ = tuned
    state = torch.load(checkpoint)
    del state["model"][BIAS]
    changed = checkpoint.with_name("changed.pt")
    torch.save(state, changed)
    code, _, error = evaluate(capsys, changed, data)
    assert code == 1
    assert BIAS in error


def test_outputs_that_are_not_finite_are_rejected(tuned, tmp_path, capsys):
    data, checkpoint, _ = tuned
    json_file = tmp_path / "valid.json"
    changed = with_bias(checkpoint, lambda bias: bias.fill_(3e38))
    code, output, error = evaluate(capsys, changed, data, "--json", json_file)
    assert (code, output, error.count("\n")) == (1, "", 1)
    assert "NaN or infinite outputs for row 0 of split 'valid'" in error
    assert not json_file.exists()


def test_bad_input_is_reported_in_one_line(tuned, tmp_path, capsys):
    data, checkpoint, _ = tuned
    state = torch.load(checkpoint)
    state["cfg"]["task"]["_name"] = "lln_masked_lm"
    torch.save(state, tmp_path / "pretrained.pt")
    other = shutil.copytree(data, tmp_path / "other")
    make_dictionary(other / "input0" / "dict.txt", fairseq_runs.WORDS[::-1])
    (tmp_path / "text.pt").write_text("no checkpoint")
    (tmp_path / "empty").mkdir()
    cases = [
        ([tmp_path / "nowhere.pt", data], "no such checkpoint"),
        ([tmp_path / "text.pt", data], "cannot load"),
        ([tmp_path / "pretrained.pt", data], "was not fine-tuned: .*lln_masked_lm"),
        ([checkpoint, tmp_path / "empty"], "input0/dict.txt is missing: prepare the data first"),
        ([checkpoint, other], "the dictionary of .*other is not the one"),
        ([checkpoint, data, "--split", "nope"], "cannot load split 'nope'"),
        (["unread.pt", data, "--predict", tmp_path / "P" / "{split}.tsv"], "cannot write .*: no such directory: .*P$"),
        (["unread.pt", data, "--json", ""], r"cannot write \.: it is a directory"),
    ]
    for arguments, message in cases:
        code, _, error = evaluate(capsys, *arguments)
        assert code == 1
        assert re.search(message, error), error
        assert error.startswith("error: ")
