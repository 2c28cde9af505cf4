"""What a run leaves for TensorBoard."""

import re

import pytest
import torch
from fairseq.logging.progress_bar import _tensorboard_writers
from fairseq.optim.dynamic_loss_scaler import DynamicLossScaler
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.custom_scalar.metadata import CONFIG_SUMMARY_TAG
from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG, parse_session_start_info_plugin_data

from lln_fairseq.analysis.events import read_curves
from lln_fairseq.analysis.layer_scalars import NAMES
from tests.fairseq_runs import LLN, MASKED_LM, train


def run(monkeypatch, corpus, folder, *options):
    _tensorboard_writers.clear()  # fairseq keeps one for the life of a process
    train(monkeypatch, folder / "log", corpus, folder, *MASKED_LM, *LLN, "--tensorboard-logdir", folder / "tb",
          "--max-update", 6, *options)  # fmt: skip
    return read_curves(folder / "tb")


@pytest.mark.parametrize(("attention", "names"), [("lln_diag", NAMES), ("softmax", NAMES[:3])])
def test_scalars_of_every_layer_at_the_log_interval(attention, names, corpus, tmp_path, monkeypatch):
    options = ("--attention", attention, "--log-interval", 2, "--update-freq", 2, "--dropout", 0, "--probe-interval", 6)
    curves = run(monkeypatch, corpus, tmp_path, *options)
    tags = {f"attention/{name}/layer_{layer:02d}" for name in names for layer in range(2)}
    assert {tag for tag in curves if tag.startswith("attention/")} == tags
    assert all(curves[tag].steps == [2, 4, 6] for tag in tags)
    assert curves["train_inner/loss"].steps == [2, 4, 6]
    (file,) = (tmp_path / "tb" / "attention").iterdir()
    (event,) = (value for event in EventFileLoader(str(file)).Load() for value in event.summary.value
                if value.tag == CONFIG_SUMMARY_TAG)  # fmt: skip
    layout = Layout.FromString(event.tensor.string_val[0])
    panels = {chart.title: list(chart.multiline.tag) for chart in layout.category[0].chart}
    everything = [tag.split("/", 1)[1] for tag in curves] + ["inverse_loss_scale"]
    for title, patterns in panels.items():
        found = [tag for tag in everything if any(re.match(pattern, tag) for pattern in patterns)]
        assert found or attention == "softmax", title


def test_overflows_show_in_the_inverse_loss_scale(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)  # what fairseq does at an overflow
    check, calls = DynamicLossScaler.check_overflow, []

    def overflow_twice(self, grad_norm):
        calls.append(1)
        check(self, torch.tensor(torch.inf) if len(calls) in (3, 4) else grad_norm)

    monkeypatch.setattr(DynamicLossScaler, "check_overflow", overflow_twice)
    curves = run(monkeypatch, corpus, tmp_path, "--fp16", "--memory-efficient-fp16", "--fp16-init-scale", 16)
    assert curves["train_inner/loss_scale"].values == [16, 16, 4, 4, 4, 4]
    assert curves["train_inner/inverse_loss_scale"].values == [1 / 16, 1 / 16, 1 / 4, 1 / 4, 1 / 4, 1 / 4]
    assert curves["train_inner/overflows"].values == [0, 0, 2, 2, 2, 2]
    last = torch.load(tmp_path / "checkpoint_last.pt")["extra_state"]["LLNMaskedLMTask"]
    assert last["overflows"] == 2


def test_the_settings_of_a_run_are_in_the_hparams_tab(corpus, tmp_path, monkeypatch):
    run(monkeypatch, corpus, tmp_path, "--lr", 0.002)
    found = []
    for file in (tmp_path / "tb").glob("events.out.tfevents.*"):
        for event in EventFileLoader(str(file)).Load():
            found += [value for value in event.summary.value if value.tag == SESSION_START_INFO_TAG]
    (value,) = found
    settings = parse_session_start_info_plugin_data(value.metadata.plugin_data.content).hparams
    assert settings["optimization.lr"].number_value == 0.002
    assert settings["optimization.max_update"].number_value == 6
    assert settings["common.seed"].number_value == 3
    assert settings["model.attention"].string_value == "lln_diag"
    assert settings["precision"].string_value == "fp32"
    assert "task.mask_whole_words" not in settings  # which is off
