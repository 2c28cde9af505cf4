"""The curves and settings that a run writes to TensorBoard."""

import re
import shutil

import pytest
import torch
from fairseq.logging.progress_bar import _tensorboard_writers
from fairseq.optim.dynamic_loss_scaler import DynamicLossScaler
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.custom_scalar.metadata import CONFIG_SUMMARY_TAG
from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG, parse_session_start_info_plugin_data
from tensorboard.summary.writer import event_file_writer

from lln_fairseq.analysis.events import read_curves
from lln_fairseq.analysis.layer_scalars import NAMES
from lln_fairseq.training.tensorboard import COUNT, SCALARS, LayerScalars
from tests.fairseq_runs import LLN, MASKED_LM, split_options, train


def run(monkeypatch, corpus, folder, *extra_options):
    """Train for six updates, and return the curves in TensorBoard."""
    _tensorboard_writers.clear()  # fairseq keeps them for the life of a process
    run_options = (*MASKED_LM, *LLN, "--tensorboard-logdir", folder / "tb", "--max-update", 6, *extra_options)
    train(monkeypatch, folder / "log", corpus, folder, *run_options)
    return read_curves(folder / "tb")


def read_summaries(files, tag):
    """Return the values with a tag in some event files."""
    values = []
    for file in files:
        for event in EventFileLoader(str(file)).Load():
            values += [value for value in event.summary.value if value.tag == tag]
    return values


@pytest.mark.parametrize(("attention", "names"), [("lln_diag", NAMES), ("softmax", NAMES[:3])])
def test_layer_scalars_are_written_at_log_interval(attention, names, corpus, tmp_path, monkeypatch):
    intervals = split_options("--log-interval 2 --update-freq 2 --dropout 0 --probe-interval 6")
    curves = run(monkeypatch, corpus, tmp_path, "--attention", attention, *intervals)

    expected_tags = {f"attention/{name}/layer_{layer:02d}" for layer in (0, 1) for name in names}
    assert {tag for tag in curves if tag.startswith("attention/")} == expected_tags
    for tag in expected_tags:
        assert curves[tag].steps == [2, 4, 6], tag
    assert curves["train_inner/loss"].steps == [2, 4, 6]

    if attention == "lln_diag":
        written_tags = [tag.split("/", 1)[1] for tag in curves]
        check_panels((tmp_path / "tb").glob("events.*"), [*written_tags, "inverse_loss_scale"])


@pytest.mark.parametrize("options", ["--checkpoint-activations", "--encoder-layerdrop 0.5 --update-freq 2"])
def test_layers_keep_their_numbers(options, corpus, tmp_path, monkeypatch):
    options = (*split_options(options), "--attention", "lln", "--log-interval", 1)
    curves = run(monkeypatch, corpus, tmp_path, *options)

    sigmas = {tag for tag in curves if tag.startswith("attention/sigma_q/")}
    assert sigmas == {"attention/sigma_q/layer_00", "attention/sigma_q/layer_01"}
    plain = run(monkeypatch, corpus, tmp_path / "plain", "--attention", "lln", "--log-interval", 1)
    if "--checkpoint-activations" in options:
        assert all(curves[tag].values == pytest.approx(plain[tag].values) for tag in sigmas)


def test_every_layer_is_averaged_over_its_own_calls():
    two_calls = [torch.full((6,), 1.0), torch.full((6,), 3.0)]
    log = LayerScalars(cfg=None).add_to({"loss": 2.0}, [[], two_calls])

    assert log["loss"] == 2.0
    assert log[COUNT].tolist() == [[0], [2]]
    assert log[SCALARS].tolist() == [[0.0] * 6, [4.0] * 6]


def check_panels(files, tags):
    """Check that every panel of the paper's layout shows at least one of the tags."""
    (value,) = read_summaries(files, CONFIG_SUMMARY_TAG)
    layout = Layout.FromString(value.tensor.string_val[0])
    assert layout.category[0].chart
    for chart in layout.category[0].chart:
        pattern = "|".join(chart.multiline.tag)
        assert any(re.match(pattern, tag) for tag in tags), chart.title


def test_resumed_run_shows_no_update_twice(corpus, tmp_path, monkeypatch):
    # TensorBoard reads files in the order of their names, which end in this number if they are of the same second.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(100))
    options = split_options("--save-interval-updates 2 --validate-interval-updates 2 --probe-interval 3")
    run(monkeypatch, corpus, tmp_path, *options)
    shutil.copy(tmp_path / "checkpoint_2_4.pt", tmp_path / "checkpoint_last.pt")  # as if killed after update 6
    run(monkeypatch, corpus, tmp_path, *options)
    assert_no_update_twice(tmp_path / "tb")

    for checkpoint in tmp_path.glob("*.pt"):  # as if killed before the first checkpoint
        checkpoint.unlink()
    run(monkeypatch, corpus, tmp_path, *options)
    assert_no_update_twice(tmp_path / "tb")


def assert_no_update_twice(logdir):
    for directory in ("train_inner", "train", "valid", "attention", "probe"):
        events = EventAccumulator(str(logdir / directory))
        events.Reload()
        for tag in events.Tags()["scalars"]:
            steps = [event.step for event in events.Scalars(tag)]
            assert len(set(steps)) == len(steps), (directory, tag, steps)
            assert steps[-1] == 6


def test_overflows_show_in_inverse_loss_scale(corpus, tmp_path, monkeypatch, half):
    check_overflow = DynamicLossScaler.check_overflow
    calls = []

    def overflow_in_third_and_fourth_call(self, grad_norm):
        calls.append(1)
        if len(calls) in (3, 4):
            grad_norm = torch.tensor(torch.inf)
        check_overflow(self, grad_norm)

    monkeypatch.setattr(DynamicLossScaler, "check_overflow", overflow_in_third_and_fourth_call)
    fp16 = split_options("--fp16 --memory-efficient-fp16 --fp16-init-scale 16")
    curves = run(monkeypatch, corpus, tmp_path, *fp16)

    assert curves["train_inner/loss_scale"].values == [16, 16, 4, 4, 4, 4]
    assert curves["train_inner/inverse_loss_scale"].values == [1 / 16, 1 / 16, 1 / 4, 1 / 4, 1 / 4, 1 / 4]
    assert curves["train_inner/overflows"].values == [0, 0, 2, 2, 2, 2]
    task_state = torch.load(tmp_path / "checkpoint_last.pt")["extra_state"]["LLNMaskedLMTask"]
    assert task_state["overflows"] == 2


def test_settings_are_written_for_hparams_tab(corpus, tmp_path, monkeypatch):
    run(monkeypatch, corpus, tmp_path, "--lr", 0.002, "--autocast")

    files = (tmp_path / "tb").glob("events.out.tfevents.*")
    (value,) = read_summaries(files, SESSION_START_INFO_TAG)
    settings = parse_session_start_info_plugin_data(value.metadata.plugin_data.content).hparams
    assert settings["optimization.lr"].number_value == 0.002
    assert settings["optimization.max_update"].number_value == 6
    assert settings["common.seed"].number_value == 3
    assert settings["model.attention"].string_value == "lln_diag"
    assert settings["precision"].string_value == "fp32 with autocast to bf16"
    assert "task.mask_whole_words" not in settings  # it is off
