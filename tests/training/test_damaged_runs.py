"""Resuming from a checkpoint that is damaged, or that would execute code, ends with the reason in one line."""

import pytest
import torch
from fairseq.tasks import FairseqTask

from lln_fairseq.errors import InputError
from tests.fairseq_runs import train
from tests.training.conftest import RUN_OPTIONS

RESUME = (*RUN_OPTIONS, "--max-update", 4)


def test_damaged_last_checkpoint_names_an_intact_one(run_copy, tmp_path, monkeypatch):
    (run_copy.save_dir / "checkpoint_1_1.pt").write_bytes(b"damaged too")
    run_copy.checkpoint.write_bytes(run_copy.checkpoint.read_bytes()[:-5000])

    with pytest.raises(InputError, match=r"damaged .*checkpoint_best\.pt .* copy it to checkpoint_last") as caught:
        train(monkeypatch, tmp_path / "log", run_copy.corpus, run_copy.save_dir, *RESUME)

    assert "weights_only" not in str(caught.value)


def remove_first_moment(state):
    del state["last_optimizer_state"]["state"][0]["exp_avg"]


def resize_first_moment(state):
    state["last_optimizer_state"]["state"][0]["exp_avg"] = torch.ones(3)


def replace_task_state(state):
    state["extra_state"]["LLNMaskedLMTask"] = torch.ones(2)


def replace_overflows(state):
    state["extra_state"]["LLNMaskedLMTask"]["overflows"] = "x"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_first_moment, r"optimizer does not fit \('exp_avg'\); .* --reset-optimizer"),
        (resize_first_moment, "optimizer does not fit .*size of tensor"),
        (replace_task_state, "its entry LLNMaskedLMTask is not the state of a task"),
        (replace_overflows, "its entry LLNMaskedLMTask is not the state of a task"),
    ],
)
def test_damaged_training_state_is_rejected(damage, message, run_copy, tmp_path, monkeypatch):
    state = torch.load(run_copy.checkpoint)
    damage(state)
    torch.save(state, run_copy.checkpoint)
    with pytest.raises(InputError, match=f"the checkpoint is damaged: .*{message}"):
        train(monkeypatch, tmp_path / "log", run_copy.corpus, run_copy.save_dir, *RESUME)


def test_device_failure_in_first_update_does_not_blame_checkpoint(run_copy, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise torch.AcceleratorError("unspecified launch failure")

    monkeypatch.setattr(FairseqTask, "optimizer_step", fail)
    with pytest.raises(torch.AcceleratorError, match="unspecified launch failure"):
        train(monkeypatch, tmp_path / "log", run_copy.corpus, run_copy.save_dir, *RESUME)
