"""A run goes on with what it began with: other settings that change its result are named."""

import copy
import dataclasses
import os
import shutil

import pytest
import torch
from fairseq.tasks import FairseqTask
from omegaconf import OmegaConf

from lln_fairseq.attention import registry
from lln_fairseq.host.checkpoints import OUR_STATE, our_state, peek
from lln_fairseq.host.errors import InputError
from lln_fairseq.host.same_run import differences
from tests.fairseq_runs import LLN, MASKED_LM, binarize, make_corpus, sentences, train

COMMON = (*MASKED_LM, *LLN, "--max-update", 2)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A corpus, and the directory of a run of two updates."""
    folder = tmp_path_factory.mktemp("begun")
    corpus = make_corpus(folder / "corpus")
    with pytest.MonkeyPatch.context() as monkeypatch:
        train(monkeypatch, folder / "log", corpus, folder / "run", *COMMON)
    return corpus, folder / "run"


CHANGES = [
    (("--seed", 4), r"common\.seed = 3, here it is 4"),
    (("--lr", 0.01), r"optimization\.lr = \[0\.001\], here it is \[0\.01\]"),
    (("--attention", "lln"), r"model\.attention = lln_diag, here it is lln"),
    (("--lln-diag-block-size", 16, "--dropout", 0.3), r"model\.dropout = 0\.1, here it is 0\.3"),
    (("--lln-diag-alpha", 2.0, "--lln-diag-beta", 2.0), r"model\.lln_diag_alpha = None, here it is 2\.0"),
    (("--mask-prob", 0.3), r"task\.mask_prob = 0\.15, here it is 0\.3"),
    (("--adam-eps", 1e-6), r"optimizer\.adam_eps = 1e-08, here it is 1e-06"),
    (("--update-freq", 2), r"sequences an update = \[8\], here it is \[16\]"),
]


@pytest.mark.parametrize(("options", "message"), CHANGES, ids=[str(change[0][0]) for change in CHANGES])
def test_what_changes_the_result_is_named(options, message, begun, tmp_path, monkeypatch):
    corpus, run = begun[0], shutil.copytree(begun[1], tmp_path / "run")
    before = (run / "checkpoint_last.pt").read_bytes()
    with pytest.raises(InputError, match=f"holds another run: .*{message}.*or another --save-dir"):
        train(monkeypatch, tmp_path / "log", corpus, run, *COMMON, "--max-update", 4, *options)
    assert (run / "checkpoint_last.pt").read_bytes() == before


def test_settings_that_are_none_are_not_compared(begun):
    saved = torch.load(begun[1] / "checkpoint_last.pt")["cfg"]
    here = OmegaConf.create(copy.deepcopy(saved))
    for value in (torch.ones(2), {}, "x" * 50, 0.5, [1, "a"], [torch.ones(2)]):
        saved["optimization"]["update_freq"] = value
        assert not differences(saved, here)
    saved["common"]["seed"] = torch.ones(2)
    assert not differences(saved, here)
    written = {"data": torch.ones(2), "dictionary": 3, "labels": ["a", None]}
    assert our_state({"extra_state": {OUR_STATE: written | {"more": ["a"]}}}) == {"more": ["a"]}


def test_options_of_a_mechanism_that_is_registered_later(monkeypatch):
    @dataclasses.dataclass
    class WindowConfig:
        width: int | None = None

    monkeypatch.setattr(registry.MECHANISMS, "maps", [*registry.MECHANISMS.maps, late := {}])
    saved = {"model": {"attention": "window", "window_width": None}}
    here = OmegaConf.create({"model": {"attention": "window", "window_width": 3}})
    assert not differences(saved, here)  # a preset's, for all that is known
    registry.register_in(late, "window", WindowConfig)(torch.nn.Identity)
    assert differences(saved, here) == ["model.window_width = None, here it is 3"]


def test_a_run_of_fairseqs_own_roberta_is_one_of_softmax():
    stock = {"model": {"_name": "roberta_base", "dropout": 0.1}}
    ours = {"model": {"_name": "lln_roberta_base", "attention": "lln_diag", "dropout": 0.1}}
    assert differences(stock, OmegaConf.create(ours)) == ["model.attention = softmax, here it is lln_diag"]
    assert differences(ours, OmegaConf.create(stock)) == ["model.attention = lln_diag, here it is softmax"]
    ours["model"]["attention"] = "softmax"
    assert not differences(stock, OmegaConf.create(ours))


def test_other_data_of_the_same_dictionary(begun, tmp_path, monkeypatch):
    run, other = shutil.copytree(begun[1], tmp_path / "run"), shutil.copytree(begun[0], tmp_path / "other")
    binarize(sentences(60, seed=9), other / "dict.txt", other / "train")
    with pytest.raises(InputError, match="holds another run: other training data"):
        train(monkeypatch, tmp_path / "a.log", other, run, *COMMON, "--max-update", 4)
    moved = shutil.copytree(begun[0], tmp_path / "moved")  # the same data elsewhere
    log = train(monkeypatch, tmp_path / "b.log", moved, run, *COMMON, "--max-update", 3)
    assert next(row["num_updates"] for row in log["train"]) == "3"


def test_what_does_not_change_the_result_goes_on(begun, tmp_path, monkeypatch):
    corpus, run = begun[0], shutil.copytree(begun[1], tmp_path / "run")
    options = ("--max-update", 4, "--log-interval", 2, "--checkpoint-activations", "--num-workers", 1,
               "--batch-size", 4, "--update-freq", 2, "--reset-dataloader", "--tensorboard-logdir", tmp_path / "tb",
               "--linformer-projected-length", 7)  # fmt: skip
    log = train(monkeypatch, tmp_path / "log", corpus, run, *COMMON, *options)
    assert log["train"][-1]["num_updates"] == "4"


def test_a_reset_begins_something_new(begun, tmp_path, monkeypatch):
    corpus, run = begun[0], shutil.copytree(begun[1], tmp_path / "run")
    options = ("--max-update", 4, "--lr", 0.01, "--reset-optimizer")
    assert train(monkeypatch, tmp_path / "log", corpus, run, *COMMON, *options)["train"][-1]["lr"] == "0.01"


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


def spoil_optimizer(value):
    """A change of one value of the optimizer's state, `exp_avg` of a parameter; None takes it away."""

    def change(state):
        entry = state["last_optimizer_state"]["state"][0]
        entry.pop("exp_avg") if value is None else entry.update(exp_avg=value)

    return change


def without_task(state):
    """An optimizer's state that cannot be used, and none of the task."""
    spoil_optimizer([1])(state)
    del state["extra_state"]["LLNMaskedLMTask"]


STATES = {
    "no task": (without_task, "optimizer's state does not fit .*'list'"),
    "missing": (spoil_optimizer(None), r"optimizer's state does not fit \('exp_avg'\); --reset-optimizer"),
    "list": (spoil_optimizer([1]), "optimizer's state does not fit .*'list'"),
    "shape": (spoil_optimizer(torch.ones(3)), "optimizer's state does not fit .*size of tensor"),
    "step": (
        lambda s: s["last_optimizer_state"]["state"][0].update(step=torch.ones(2)),
        "optimizer's state does not fit",
    ),
    "task": (lambda s: s["extra_state"].update(LLNMaskedLMTask=[1]), "its LLNMaskedLMTask holds no state"),
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
    def __init__(self, function=print):
        self.function = function

    def __reduce__(self):
        return self.function, ("this must not run",)


@pytest.mark.parametrize(("function", "name"), [(print, "print"), (os.system, "posix.system")])
def test_what_a_file_wants_to_call_is_named(function, name, tmp_path):
    torch.save({"model": Payload(function)}, tmp_path / "a.pt")
    with pytest.raises(InputError, match=rf"it wants to call {name}, which no checkpoint may"):
        peek(str(tmp_path / "a.pt"))


def test_what_torch_thinks_of_a_pickle_is_not_shown(tmp_path, recwarn):
    torch.save({"model": {"a": torch.ones(2)}}, tmp_path / "a.pt", pickle_protocol=3)  # of which torch warns
    peek(str(tmp_path / "a.pt"))
    assert not recwarn.list


def test_the_reason_is_ours_and_not_torchs_advice(tmp_path, begun, monkeypatch):
    corpus, run = begun[0], shutil.copytree(begun[1], tmp_path / "run")
    torch.save({"model": Payload()}, run / "checkpoint_last.pt")
    with pytest.raises(InputError, match="it wants to call print, which no checkpoint may") as e:
        train(monkeypatch, tmp_path / "log", corpus, run, *COMMON)
    assert "weights_only" not in str(e.value)
