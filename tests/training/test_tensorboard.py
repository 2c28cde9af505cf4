"""What a run leaves for TensorBoard."""

import json
import re
import time
import urllib.error
import urllib.request
from contextlib import suppress

import pytest
import torch
from fairseq.logging.progress_bar import _tensorboard_writers
from fairseq.optim.dynamic_loss_scaler import DynamicLossScaler
from tensorboard import program
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.custom_scalar.metadata import CONFIG_SUMMARY_TAG

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


def ask_tensorboard(logdir, path, question, wanted):
    """The answer of TensorBoard's own server, with so many results."""
    server = program.TensorBoard()
    server.configure(argv=[None, "--logdir", str(logdir), "--load_fast", "false", "--port", "0"])
    request = urllib.request.Request(
        f"{server.launch()}data/plugin/{path}", json.dumps(question).encode(), {"Content-Type": "application/json"}
    )
    for _ in range(100):
        with suppress(urllib.error.HTTPError):  # it has read no run yet
            with urllib.request.urlopen(request) as answer:
                found = json.load(answer)
            if found.get("totalSize") == wanted:
                return found
        time.sleep(0.2)
    pytest.fail("TensorBoard does not show the runs")


def test_runs_can_be_compared_by_their_settings(corpus, tmp_path, monkeypatch):
    for rate in (0.001, 0.002):
        (tmp_path / str(rate)).mkdir()
        curves = run(monkeypatch, corpus, tmp_path / str(rate), "--lr", rate)
    question = {
        "allowedStatuses": ["STATUS_UNKNOWN", "STATUS_RUNNING"],
        "colParams": [{"metric": {"group": "valid", "tag": "loss"}}],
        "sliceSize": 9,
    }
    groups = ask_tensorboard(tmp_path, "hparams/session_groups", question, 2)["sessionGroups"]
    assert [group["hparams"]["optimization.lr"] for group in groups] == [0.001, 0.002]
    assert groups[0]["hparams"]["model.attention"] == "lln_diag"
    assert groups[0]["hparams"]["common.seed"] == 3
    assert groups[0]["hparams"]["precision"] == "fp32"
    assert groups[0]["hparams"]["optimization.max_update"] == 6
    assert "task.mask_whole_words" not in groups[0]["hparams"]  # which is off
    metrics = {(value["name"]["group"], value["name"]["tag"]): value["value"] for value in groups[1]["metricValues"]}
    assert metrics["valid", "loss"] == pytest.approx(curves["valid/loss"].values[-1])
