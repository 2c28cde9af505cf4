"""A training with --probe-interval: its measurements in TensorBoard, and that they do not change the training."""

import logging
import re

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lln_fairseq.analysis.events import read_curves
from lln_fairseq.errors import UserError
from tests.fairseq_runs import LLN, MASKED_LM, split_options, train


def run(monkeypatch, data, folder, *extra_options):
    """Train for four updates, and return the losses and the parameters."""
    folder.mkdir()
    log = train(monkeypatch, folder / "log", data, folder, *MASKED_LM, *LLN, "--max-update", 4, *extra_options)
    losses = [row["loss"] for row in log["train"]]
    return losses, torch.load(folder / "checkpoint_last.pt")["model"]


@pytest.mark.parametrize(
    "training_options",
    [
        split_options("--attention lln_diag --encoder-layerdrop 0.3 --update-freq 2"),
        split_options("--attention softmax --fp16 --memory-efficient-fp16 --fp16-init-scale 8"),
    ],
    ids=["lln_diag", "softmax-fp16"],
)
def test_probe_does_not_change_training(training_options, corpus, tmp_path, monkeypatch, half, caplog):
    caplog.set_level(logging.INFO)
    probe = ("--probe-interval", 2, "--probe-sequences", 3, "--tensorboard-logdir", tmp_path / "a" / "tb")
    losses, model = run(monkeypatch, corpus, tmp_path / "a", *training_options, *probe)
    expected_losses, expected_model = run(monkeypatch, corpus, tmp_path / "b", *training_options)

    assert losses == expected_losses
    for name, expected in expected_model.items():
        assert torch.equal(model[name], expected), name
    curves = read_curves(tmp_path / "a" / "tb")
    for name in ("entropy", "spectral_gap", "tau_sm", "log_ks", "residual"):
        for layer in range(2):
            assert curves[f"probe/{name}/layer_{layer:02d}"].steps == [0, 2, 4]
    messages = [
        record.getMessage() for record in caplog.records if record.name == "lln_fairseq.training.attention_probe"
    ]
    assert len(messages) == 1 + 3
    assert "3 sequences of split 'valid'" in messages[0]
    assert re.fullmatch(r"probe at update 4: \d+\.\d\d s", messages[-1])


def test_resumed_run_measures_the_same_batch(corpus, tmp_path, monkeypatch):
    whole = tmp_path / "whole"
    resumed = tmp_path / "resumed"
    probe = ("--probe-interval", 2, "--tensorboard-logdir")
    run(monkeypatch, corpus, whole, *probe, whole / "tb", "--max-update", 12)
    run(monkeypatch, corpus, resumed, *probe, resumed / "tb", "--max-update", 9)
    resume_options = (*MASKED_LM, *LLN, *probe, resumed / "tb", "--max-update", 12)
    train(monkeypatch, resumed / "log2", corpus, resumed, *resume_options)

    expected = read_curves(whole / "tb")
    curves = read_curves(resumed / "tb")
    for name in ("entropy", "spectral_gap", "residual"):
        tag = f"probe/{name}/layer_01"
        assert curves[tag].steps == [0, 2, 4, 6, 8, 10, 12]
        assert curves[tag].values == pytest.approx(expected[tag].values, rel=1e-6)


def test_probe_writes_histograms(corpus, tmp_path, monkeypatch):
    run(monkeypatch, corpus, tmp_path / "a", "--probe-interval", 4, "--tensorboard-logdir", tmp_path / "tb")
    (file,) = (tmp_path / "tb" / "probe").iterdir()
    events = EventAccumulator(str(file), size_guidance={"histograms": 0})
    events.Reload()

    tags = set()
    for layer in ("layer_00", "layer_01"):
        tags |= {f"ln_P/{layer}", f"entropy_by_head/{layer}", f"spectral_gap_by_head/{layer}"}
    assert set(events.Tags()["histograms"]) == tags
    first, last = events.Histograms("entropy_by_head/layer_00")
    assert (first.step, last.step) == (0, 4)
    assert last.histogram_value.num == 4 * 2  # sequences x heads


def test_probe_rejects_a_model_without_an_attention_of_this_package(corpus, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="no attention of this package"):
        run(monkeypatch, corpus, tmp_path / "a", "--probe-interval", 2, "--arch", "roberta")
