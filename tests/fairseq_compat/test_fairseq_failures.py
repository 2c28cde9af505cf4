"""What fails in fairseq, next to the same situation with this package: each test shows both.

These failures of fairseq are shown in other files:

    checkpoints of argparse-style models do not load      ../checkpoints/test_reading.py
    the last rows of a split are dropped                  ../tasks/test_tasks.py: test_only_stock_fairseq_drops_rows
    samples longer than tokens_per_sample                 ../tasks/test_tasks.py: test_only_stock_fairseq_makes_...
    word labels have no F1                                ../training/test_runs.py: test_word_labels_have_an_f1
    a kill while checkpoint_last.pt is copied             ../training/test_runs.py: test_kill_during_copy_...
    --fp16 forgets its float32 parameters                 ../training/test_resume.py: test_stock_fairseq_forgets_...

No test shows the following, because Hydra is meant to work like this: the primary YAML belongs at the root of
--config-dir, a key that the YAML lacks needs a "+", and a missing group ends in a good message. The YAML of this
package lists every key (test_configs.py), and the messages are tested in models/test_lln_roberta.py.
"""

import copy
import copyreg
import io
import os
import pickle
import threading
from pathlib import Path

import fairseq_cli.hydra_train
import fairseq_cli.train
import fairseq_cli.validate
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data.iterators import BackgroundConsumer
from fairseq.dataclass.constants import StrEnumMeta
from fairseq.distributed import utils as distributed_utils
from fairseq.tasks import setup_task
from fairseq.tasks.fairseq_task import StatefulContainer
from omegaconf import DictConfig, OmegaConf

from lln_fairseq.checkpoints import reading
from lln_fairseq.errors import TrainingError, UserError
from lln_fairseq.training import worker
from tests.fairseq_runs import LLN, MASKED_LM, USER_DIR, hydra_train, make_corpus, split_options, train

STOCK = (*USER_DIR, *split_options("--arch roberta --task masked_lm --required-batch-size-multiple 1"))
FP16 = split_options("--fp16 --memory-efficient-fp16 --fp16-init-scale 8 --min-loss-scale 0.5")


def remove_patch(monkeypatch, owner, name):
    """Put fairseq's own function back in the place of our patch."""
    monkeypatch.setattr(owner, name, getattr(owner, name).__wrapped__)


def optimizer_name(run):
    """Return the name of a checkpoint's optimizer, which shows the precision. Saved parameters are always float32."""
    return torch.load(run / "checkpoint_last.pt")["optimizer_history"][-1]["optimizer_name"]


@pytest.fixture
def restored_safe_globals():
    """The classes that torch.load accepts are the same after a test as before."""
    allowed = torch.serialization.get_safe_globals()
    yield
    torch.serialization.add_safe_globals(allowed)


def test_second_worker_can_load_what_the_first_sends(corpus, tmp_path, monkeypatch, restored_safe_globals):
    train(monkeypatch, tmp_path / "log", corpus, tmp_path / "a", *MASKED_LM, *LLN, "--max-update", 1)
    state = checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "a" / "checkpoint_last.pt"))
    message = io.BytesIO()  # what fairseq.distributed.utils.broadcast_object sends
    torch.save(distributed_utils._split_tensors_from_obj(state, []), message)

    torch.serialization.clear_safe_globals()
    message.seek(0)
    with pytest.raises(pickle.UnpicklingError, match=r"_TensorPlaceholder|DictConfig"):
        torch.load(message)
    reading.allow_fairseq_checkpoints()
    message.seek(0)
    assert isinstance(torch.load(message)["cfg"], DictConfig)


def test_missing_restore_file_is_rejected(corpus, tmp_path, monkeypatch):
    run_options = (*MASKED_LM, *LLN, "--restore-file", tmp_path / "nowhere.pt")
    with pytest.raises(UserError, match=r"nowhere\.pt: no such file"):
        train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *run_options)

    remove_patch(monkeypatch, checkpoint_utils, "load_checkpoint")
    log = train(monkeypatch, tmp_path / "b.log", corpus, tmp_path / "b", *run_options)
    updates = [row["num_updates"] for row in log["train"]]
    assert updates[:3] == ["1", "2", "3"]  # from scratch, without a message


@pytest.mark.parametrize("precision", [(), FP16], ids=["gradients", "loss_scale"])
@pytest.mark.parametrize(
    ("model", "error"),
    [
        pytest.param(STOCK, StopIteration, marks=pytest.mark.exhaustive, id="stock"),
        pytest.param(LLN, TrainingError, id="ours"),
    ],
)
def test_nan_is_explained(precision, model, error, corpus, tmp_path, monkeypatch, half):
    linear = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *args: linear(*args) * torch.nan)
    with pytest.raises(error) as caught:
        train(monkeypatch, tmp_path / "log", corpus, tmp_path / "a", *MASKED_LM, *model, *precision)
    is_explained = error is TrainingError
    message = str(caught.value)
    assert message.startswith("update 1: ") == is_explained
    assert ("NaN detected in output of encoder" in message) == is_explained


def set_memory_efficient_fp16(monkeypatch, call_main):
    """Set the option before call_main, like Hydra. On the command line, fairseq-train would set fp16 too."""

    def set_and_call(cfg, main):
        cfg.common.memory_efficient_fp16 = True
        call_main(cfg, main)

    monkeypatch.setattr(distributed_utils, "call_main", set_and_call)


def test_memory_efficient_fp16_needs_fp16(corpus, tmp_path, monkeypatch):
    patched = distributed_utils.call_main
    run_options = (*MASKED_LM, *LLN)
    set_memory_efficient_fp16(monkeypatch, patched)
    with pytest.raises(UserError, match="memory_efficient_fp16 without fp16 trains in float32"):
        train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *run_options)

    set_memory_efficient_fp16(monkeypatch, patched.__wrapped__)
    train(monkeypatch, tmp_path / "b.log", corpus, tmp_path / "b", *run_options)
    assert optimizer_name(tmp_path / "b") == "FairseqAdam"
    train(monkeypatch, tmp_path / "c.log", corpus, tmp_path / "c", *run_options, "--fp16")
    assert optimizer_name(tmp_path / "c") == "MemoryEfficientFP16Optimizer"


@pytest.mark.parametrize("updates", [3, 5])  # the end of an epoch, and the middle of the next one
def test_complete_run_makes_no_more_updates(updates, corpus, tmp_path, monkeypatch):
    arguments = (corpus, tmp_path / "a", *MASKED_LM, *LLN, "--max-update", updates)
    train(monkeypatch, tmp_path / "a.log", *arguments)
    checkpoint = tmp_path / "a" / "checkpoint_last.pt"
    before = checkpoint.read_bytes()
    assert train(monkeypatch, tmp_path / "b.log", *arguments) == {"train": [], "valid": []}
    assert checkpoint.read_bytes() == before

    remove_patch(monkeypatch, checkpoint_utils, "load_checkpoint")
    log = train(monkeypatch, tmp_path / "c.log", *arguments)
    assert {row["num_updates"] for row in log["train"]} == {str(updates + 1)}


@pytest.mark.parametrize(
    ("model", "is_same"),
    [pytest.param(STOCK, False, marks=pytest.mark.exhaustive, id="stock"), pytest.param(LLN, True, id="ours")],
)
def test_loader_processes_mask_every_epoch_anew(model, is_same, corpus, tmp_path, monkeypatch):
    """A loader process masks the same tokens as a training without loader processes, in the second epoch too."""
    fixed = split_options("--dropout 0 --attention-dropout 0 --max-update 6 --no-save")
    losses = []
    for workers in (0, 1):
        run_options = (*MASKED_LM, *model, *fixed, "--num-workers", workers)
        log = train(monkeypatch, tmp_path / f"{workers}.log", corpus, tmp_path / "a", *run_options)
        losses.append({row["num_updates"]: row["loss"] for row in log["train"]})
    without_loader, with_loader = losses
    assert list(without_loader) == ["1", "2", "3", "4", "5", "6"]
    assert (without_loader == with_loader) == is_same


def prefetching_threads():
    return [thread for thread in threading.enumerate() if isinstance(thread, BackgroundConsumer)]


def test_prefetching_threads_end_with_training(tmp_path, monkeypatch):
    """Otherwise they abort the process at its end: "terminate called without an active exception", exit code 134."""
    corpus = make_corpus(tmp_path / "corpus", sizes=(("train", 3000), ("valid", 11)))
    run_options = (*MASKED_LM, *LLN, "--max-update", 1)
    train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *run_options)
    assert not prefetching_threads()

    remove_patch(monkeypatch, distributed_utils, "call_main")
    train(monkeypatch, tmp_path / "b.log", corpus, tmp_path / "b", *run_options)
    assert prefetching_threads()
    worker.end_prefetching()


def test_bf16_on_command_line_needs_no_tpu(corpus, tmp_path, monkeypatch):
    run_options = (*MASKED_LM, *LLN, "--bf16")
    log = train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *run_options)
    assert len(log["train"]) == 3
    assert optimizer_name(tmp_path / "a") == "FP16Optimizer"  # fairseq's optimizer for fp16 and bf16

    remove_patch(monkeypatch, distributed_utils, "call_main")
    with pytest.raises(AttributeError, match="xla_device"):
        train(monkeypatch, tmp_path / "b.log", corpus, tmp_path / "b", *run_options)


@pytest.mark.parametrize(
    ("overrides", "changes_directory"),
    [(["hydra.job.chdir=null"], True), ([], False)],
    ids=["hydra's default", "our recipe"],
)
def test_recipe_keeps_working_directory(overrides, changes_directory, tmp_path, monkeypatch):
    calls = []

    def main(cfg):
        calls.append((Path.cwd(), cfg))

    monkeypatch.setattr(fairseq_cli.hydra_train, "pre_main", main)
    monkeypatch.chdir(tmp_path)
    hydra_train(monkeypatch, "run=cpu", "model=tiny", "corpus=demo", *overrides)

    ((directory, cfg),) = calls
    assert (directory != tmp_path) == changes_directory
    # In another working directory, these relative paths would name other directories.
    assert not os.path.isabs(cfg.task.data)
    assert not os.path.isabs(cfg.checkpoint.save_dir)


def test_mask_whole_words_is_rejected(corpus):
    task_options = {"data": str(corpus), "seed": 1, "mask_whole_words": True}
    task = setup_task(OmegaConf.create({"_name": "masked_lm", **task_options}))
    with pytest.raises(AttributeError, match="no attribute 'args'"):
        task.load_dataset("valid")
    with pytest.raises(UserError, match="mask_whole_words does not work in fairseq's masked_lm"):
        setup_task(OmegaConf.create({"_name": "lln_masked_lm", **task_options}))


def test_task_is_copied_and_pickled(corpus, monkeypatch):
    task = setup_task(OmegaConf.create({"_name": "lln_masked_lm", "data": str(corpus)}))
    task.state.add_factory("answer", lambda: 42)
    assert task.state.answer == 42
    with pytest.raises(AttributeError, match="no factory for attribute question"):
        task.state.question  # noqa: B018
    task.state._factories.clear()  # pickle does not take lambdas
    for twin in (copy.deepcopy(task), pickle.loads(pickle.dumps(task))):
        assert twin.state.answer == 42
        assert twin.cfg == task.cfg
        assert twin.source_dictionary == task.source_dictionary

    monkeypatch.delitem(copyreg.dispatch_table, StrEnumMeta)
    with pytest.raises(pickle.PicklingError, match="Choices"):
        pickle.dumps(task)
    remove_patch(monkeypatch, StatefulContainer, "__getattr__")
    with pytest.raises(RecursionError):
        copy.deepcopy(task)
