"""A training with --probe-interval: what it leaves for TensorBoard, and that it is the same training."""

import logging
import re
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lln_fairseq.analysis.events import read_curves
from lln_fairseq.errors import InputError
from lln_fairseq.training.settings import check_probe
from tests.fairseq_runs import MASKED_LM, train

LLN = ("--user-dir", Path(__file__).parents[2] / "lln_fairseq", "--arch", "lln_roberta_tiny")
FP16 = ("--fp16", "--memory-efficient-fp16", "--fp16-init-scale", 8)


def run(monkeypatch, data, folder, *options):
    folder.mkdir()
    log = train(monkeypatch, folder / "log", data, folder, *LLN, "--max-update", 4, *options)
    return [row["loss"] for row in log["train"]], torch.load(folder / "checkpoint_last.pt")["model"]


@pytest.mark.parametrize("options", [("--attention", "lln_diag", "--encoder-layerdrop", 0.3, "--update-freq", 2),
                                     ("--attention", "softmax", *FP16)], ids=["lln_diag", "softmax-fp16"])  # fmt: skip
def test_the_training_is_the_same_with_and_without_it(options, corpus, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)  # what fp16 does at an overflow
    probe = ("--probe-interval", 2, "--probe-sequences", 3, "--tensorboard-logdir", tmp_path / "a" / "tb")
    losses, model = run(monkeypatch, corpus, tmp_path / "a", *MASKED_LM, *options, *probe)
    others, without = run(monkeypatch, corpus, tmp_path / "b", *MASKED_LM, *options)
    assert losses == others
    assert all(torch.equal(model[key], without[key]) for key in without)
    curves = read_curves(tmp_path / "a" / "tb")
    for name in ("entropy", "spectral_gap", "tau_sm", "log_ks", "residual"):
        for layer in range(2):
            assert curves[f"probe/{name}/layer_{layer:02d}"].steps == [0, 2, 4]
    batch, *said = (record.getMessage() for record in caplog.records if record.name == "lln_fairseq.training.probe")
    assert "3 sequences of split 'valid'" in batch
    assert len(said) == 3
    assert re.fullmatch(r"probe at update 4: \d+\.\d\d s; probes took \d+\.\d% of the training so far", said[-1])


def test_the_batch_is_the_same_in_a_run_that_goes_on(corpus, tmp_path, monkeypatch):
    """Another split of the run gives the same points: also those after the interruption."""
    probe = ("--probe-interval", 2, "--tensorboard-logdir")
    whole = tmp_path / "whole"
    run(monkeypatch, corpus, whole, *MASKED_LM, *probe, whole / "tb", "--max-update", 12)
    parts = tmp_path / "parts"
    run(monkeypatch, corpus, parts, *MASKED_LM, *probe, parts / "tb", "--max-update", 9)
    train(monkeypatch, parts / "log2", corpus, parts, *LLN, *MASKED_LM, *probe, parts / "tb", "--max-update", 12)
    expected, found = (read_curves(folder / "tb") for folder in (whole, parts))
    for tag in (f"probe/{name}/layer_01" for name in ("entropy", "spectral_gap", "residual")):
        assert found[tag].steps == [0, 2, 4, 6, 8, 10, 12]
        assert found[tag].values == pytest.approx(expected[tag].values, rel=1e-6)


def test_histograms(corpus, tmp_path, monkeypatch):
    run(monkeypatch, corpus, tmp_path / "a", *MASKED_LM, "--probe-interval", 4, "--tensorboard-logdir", tmp_path / "tb")
    (file,) = (tmp_path / "tb" / "probe").iterdir()
    events = EventAccumulator(str(file), size_guidance={"histograms": 0})
    events.Reload()
    tags = {f"{name}/layer_{n:02d}" for name in ("ln_P", "entropy_by_head", "spectral_gap_by_head") for n in range(2)}
    assert set(events.Tags()["histograms"]) == tags
    (first, last) = events.Histograms("entropy_by_head/layer_00")
    assert (first.step, last.step) == (0, 4)
    assert last.histogram_value.num == 4 * 2  # sequences x heads


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--probe-interval", 2), "give --tensorboard-logdir"),
        (("--probe-interval", -2), "0 .never. or more"),
        (("--probe-interval", 2, "--tensorboard-logdir", "tb", "--arch", "roberta"), "no attention of this package"),
    ],
)
def test_settings_that_cannot_work(options, message, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        run(monkeypatch, corpus, tmp_path / "a", *MASKED_LM, *options)


def test_a_split_model_is_refused():
    cfg = {"task": {"probe_interval": 1, "probe_sequences": 4}, "common": {"tensorboard_logdir": "tb"},
           "distributed_training": {"ddp_backend": "fully_sharded"}}  # fmt: skip
    with pytest.raises(InputError, match="does not work with --ddp-backend fully_sharded"):
        check_probe(OmegaConf.create(cfg))
