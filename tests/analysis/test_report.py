"""`lln-fairseq analyze` on checkpoints that are trained here."""

import json
import math
import re
from pathlib import Path

import matplotlib.image
import pytest
import torch
from matplotlib.figure import Figure

from lln_fairseq.__main__ import main
from lln_fairseq.analysis import entropy, measure
from lln_fairseq.analysis.analyze import analyze_checkpoint
from lln_fairseq.analysis.lognormal import normality
from lln_fairseq.analysis.probe import record_layers, spread_batches
from lln_fairseq.analysis.rank_collapse import relative_residual
from lln_fairseq.analysis.report import VARIANTS, measure_model
from lln_fairseq.inference.loading import load_model
from tests.fairseq_runs import CLASSIFICATION, MASKED_LM, make_classification, make_corpus, train

USER_DIR = ("--user-dir", Path(__file__).parents[2] / "lln_fairseq")
LLN = (*USER_DIR, "--arch", "lln_roberta_tiny")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The data directory, and a checkpoint of one masked language model for each of two attentions."""
    folder = tmp_path_factory.mktemp("trained")
    data = make_corpus(folder / "data")
    checkpoints = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        for attention in ("lln_diag", "softmax"):
            options = (*MASKED_LM, *LLN, "--attention", attention, "--max-update", 2)
            train(monkeypatch, folder / "log", data, folder / attention, *options)
            checkpoints[attention] = folder / attention / "checkpoint_last.pt"
    return data, checkpoints


def run_analyze(capsys, *arguments):
    """Return the exit code, the standard output and the standard error of the program."""
    code = main(["analyze", *map(str, arguments)])
    return code, *capsys.readouterr()


@pytest.mark.parametrize("attention", ["lln_diag", "softmax"])
def test_analyze_writes_table_json_and_figure(attention, trained, tmp_path, capsys, monkeypatch):
    data, checkpoints = trained
    titles = []
    save = Figure.savefig

    def savefig(figure, *arguments, **options):
        titles.append(figure.get_suptitle())
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    json_file = tmp_path / "a.json"
    png = tmp_path / "a.png"
    options = ("--batches", 2, "--batch-size", 3, "--json", json_file, "--png", png)

    code, table, _ = run_analyze(capsys, checkpoints[attention], data, *options)

    assert code == 0
    heading = f"{checkpoints[attention]}, split 'valid' of {data}: 4 sequences, "  # fewer than 2 · 3
    assert table.startswith(heading)
    assert titles[0].startswith(heading)
    assert "nan" not in table
    numbers = json.loads(json_file.read_text())
    assert numbers["sequences"] == 4
    assert numbers["provenance"]["versions"]["torch"] == torch.__version__
    assert numbers["longest"] <= 64
    assert len(numbers["layers"]) == 2
    for layer in numbers["layers"]:
        assert len(layer["entropy"]["by_head"]) == 2
        assert f"{layer['entropy']['mean']:.3f}" in table
        assert 0 < layer["entropy"]["mean"] <= math.log2(64)
        assert layer["entropy"]["mean"] == pytest.approx(sum(layer["entropy"]["by_head"]) / 2)
        assert (layer["tau_lln"]["mean"] is None) == (attention == "softmax")
        assert 0 < layer["q_ks"]["mean"] < 0.2
        assert 1 <= layer["rank"]["mean"] <= 64
    for name in ("residual", "rank"):
        assert set(numbers[name]) == set(VARIANTS)
        assert all(len(values) == 3 for values in numbers[name].values())
    assert numbers["residual"]["neither"][2] < numbers["residual"]["model"][2]
    assert matplotlib.image.imread(png).std() > 0.1


def test_numbers_are_means_over_sequences(trained):
    data, checkpoints = trained
    report = analyze_checkpoint(str(checkpoints["softmax"]), str(data), batches=1, batch_size=3)

    model, task = load_model(str(checkpoints["softmax"]), str(data))
    task.load_dataset("valid")
    (batch,) = spread_batches(task.dataset("valid"), 1, 3, model)
    layer = record_layers(model, batch)[1]
    assert layer.context.padding.any()
    P = layer.attention.attention_matrix(layer.q, layer.k, layer.context)
    entropies = []
    query_distances = []
    residuals = []
    for row, length in enumerate((~layer.context.padding).sum(dim=1).tolist()):
        entropies.append(entropy(P[row, :, :length, :length]))
        query_distances.append(normality(layer.q[row, :, :length]).ks)
        residuals.append(relative_residual(layer.after[row, :length]).item())
    torch.testing.assert_close(report.layers[1]["entropy"], torch.stack(entropies).double().mean(dim=0))
    torch.testing.assert_close(report.layers[1]["q_ks"], torch.stack(query_distances).mean(dim=0))
    assert report.by_depth["residual"]["model"][2] == pytest.approx(sum(residuals) / 3)


def test_table_explains_what_is_measured_of_long_sequences(trained, monkeypatch, capsys):
    data, checkpoints = trained
    monkeypatch.setattr(measure, "MAX_TOKENS", 40)
    code, table, _ = run_analyze(capsys, checkpoints["softmax"], data)
    assert code == 0
    assert "More than 40 tokens" in table
    assert "  -  " in table


def test_analyze_takes_a_fine_tuned_model(tmp_path, monkeypatch, capsys):
    data = make_classification(tmp_path / "data")
    train(monkeypatch, tmp_path / "log", data, tmp_path / "run", *CLASSIFICATION, *LLN, "--max-update", 1)
    code, table, _ = run_analyze(capsys, tmp_path / "run" / "checkpoint_last.pt", data, "--split", "train")
    assert code == 0
    assert f"split 'train' of {data}: 16 sequences" in table


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--batches", 0, "must be at least 1"),
        ("--json", "no/folder.json", "no such directory: .*no"),
        ("--png", ".", "is a directory"),
    ],
)
def test_wrong_option_is_rejected(option, value, message, trained, tmp_path, monkeypatch, capsys):
    data, checkpoints = trained
    monkeypatch.chdir(tmp_path)
    code, _, stderr = run_analyze(capsys, checkpoints["softmax"], data, option, value)
    assert code == 1
    assert stderr.count("\n") == 1
    assert re.search(f"^error: .*{message}", stderr), stderr


def test_sequence_longer_than_the_model_is_rejected(trained):
    data, checkpoints = trained
    model, _ = load_model(str(checkpoints["softmax"]), str(data))
    batch = {"src_tokens": torch.full((1, 70), 5), "src_lengths": torch.tensor([70])}
    with pytest.raises(ValueError, match="a sequence of 70 tokens, but the model takes at most 64"):
        measure_model(model, [batch])
