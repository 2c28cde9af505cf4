"""A run whose last checkpoint is damaged, or wants to call something, ends with the reason in one line."""

import os
import shutil

import pytest
import torch
from fairseq.tasks import FairseqTask

from lln_fairseq.checkpoints.reading import load_checkpoint_lazily
from lln_fairseq.errors import InputError
from tests.fairseq_runs import train
from tests.training.conftest import COMMON


def test_a_damaged_last_checkpoint_names_a_whole_one(begun, tmp_path, monkeypatch):
    corpus, run = begun[0], shutil.copytree(begun[1], tmp_path / "run")
    last = run / "checkpoint_last.pt"
    (run / "checkpoint_1_1.pt").write_bytes(b"damaged too")
    last.write_bytes(last.read_bytes()[:-5000])
    with pytest.raises(
        InputError, match=r"damaged .*\. .*checkpoint_best\.pt is whole: copy it to checkpoint_last"
    ) as e:
        train(monkeypatch, tmp_path / "log", corpus, run, *COMMON, "--max-update", 4)
    assert "weights_only" not in str(e.value)


def first_moments(state):
    return state["last_optimizer_state"]["state"][0]


STATES = {
    "missing": (lambda s: first_moments(s).pop("exp_avg"), r"state does not fit \('exp_avg'\); --reset-optimizer"),
    "shape": (lambda s: first_moments(s).update(exp_avg=torch.ones(3)), "state does not fit .*size of tensor"),
    "tensor": (lambda s: s["extra_state"].update(LLNMaskedLMTask=torch.ones(2)), "its LLNMaskedLMTask holds no state"),
    "overflows": (lambda s: s["extra_state"]["LLNMaskedLMTask"].update(overflows="x"), "holds no state of a task"),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_of_the_training_that_cannot_be_used(name, begun, tmp_path, monkeypatch):
    corpus, run = begun[0], shutil.copytree(begun[1], tmp_path / "run")
    change, message = STATES[name]
    state = torch.load(run / "checkpoint_last.pt")
    change(state)
    torch.save(state, run / "checkpoint_last.pt")
    with pytest.raises(InputError, match=f"the checkpoint is damaged: .*{message}"):
        train(monkeypatch, tmp_path / "log", corpus, run, *COMMON, "--max-update", 4)


def test_a_device_that_fails_is_no_damage(begun, tmp_path, monkeypatch):
    """At the first update of a run that goes on, where an optimizer's error is the checkpoint's."""
    corpus, run = begun[0], shutil.copytree(begun[1], tmp_path / "run")

    def fail(*_, **__):
        raise torch.AcceleratorError("unspecified launch failure")

    monkeypatch.setattr(FairseqTask, "optimizer_step", fail)
    with pytest.raises(torch.AcceleratorError, match="unspecified launch failure"):
        train(monkeypatch, tmp_path / "log", corpus, run, *COMMON, "--max-update", 4)


class Payload:
    def __reduce__(self):
        return os.system, ("this must not run",)


def test_what_a_file_wants_to_call_is_named(tmp_path):
    torch.save({"model": Payload()}, tmp_path / "a.pt")
    with pytest.raises(InputError, match=r"it wants to call posix\.system, which no checkpoint may"):
        load_checkpoint_lazily(str(tmp_path / "a.pt"))
