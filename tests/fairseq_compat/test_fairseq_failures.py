"""What fairseq alone gets wrong, and the same situation with ours: each test shows both.

These rows have their test elsewhere, also with the host's half:

    checkpoints of argparse-style models do not load      ../checkpoints/test_reading.py: test_without_our_list_...
    the last rows of a split are dropped                  ../tasks/test_tasks.py: test_no_row_is_dropped
    samples longer than tokens_per_sample                 ../tasks/test_tasks.py: test_the_host_makes_samples_...
    word labels have no F1                                ../training/test_runs.py: test_word_labels_have_an_f1_too
    a kill while checkpoint_last.pt is copied             ../training/test_runs.py: test_a_kill_while_a_...
    --fp16 forgets its float32 parameters                 ../training/test_runs.py: test_the_host_alone_forgets_...

These need none: the primary YAML belongs at the root of --config-dir, a key that the YAML lacks needs a "+", and a
group that is missing ends in a good message. That is how Hydra works; our YAML lists every key (test_configs.py), and
the messages are under test in models/test_lln_roberta.py.
"""

import io
import os
import pickle
import threading
from contextlib import suppress
from pathlib import Path

import fairseq_cli.hydra_train
import fairseq_cli.train
import fairseq_cli.validate
import pytest
import torch
from fairseq import checkpoint_utils, file_utils
from fairseq.data.iterators import BackgroundConsumer
from fairseq.distributed import utils as distributed_utils
from fairseq.models.roberta import RobertaModel
from fairseq.tasks import setup_task
from omegaconf import DictConfig, OmegaConf

from lln_fairseq.checkpoints import reading
from lln_fairseq.errors import InputError, TrainingError
from lln_fairseq.models.lln_roberta import LLNRobertaModel
from lln_fairseq.training import worker
from tests.fairseq_runs import (
    LLN,
    MASKED_LM,
    USER_DIR,
    hydra_train,
    make_corpus,
    train,
)

HOST = (*USER_DIR, "--arch", "roberta", "--task", "masked_lm", "--required-batch-size-multiple", 1)
FP16 = ("--fp16", "--memory-efficient-fp16", "--fp16-init-scale", 8, "--min-loss-scale", 0.5)


def switch_off(monkeypatch, owner, name):
    """The host's own function in the place of our patch of it."""
    monkeypatch.setattr(owner, name, getattr(owner, name).__wrapped__)


def optimizer_of(run):
    """Its name shows the precision; the parameters of a checkpoint are always float32."""
    return torch.load(run / "checkpoint_last.pt")["optimizer_history"][-1]["optimizer_name"]


def test_the_second_worker_cannot_load_what_the_first_sends(corpus, tmp_path, monkeypatch):
    train(monkeypatch, tmp_path / "log", corpus, tmp_path / "a", *MASKED_LM, *LLN, "--max-update", 1)
    state = checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "a" / "checkpoint_last.pt"))
    sent = io.BytesIO()  # as fairseq.distributed.utils.broadcast_object does it
    torch.save(distributed_utils._split_tensors_from_obj(state, []), sent)
    allowed = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        sent.seek(0)
        with pytest.raises(pickle.UnpicklingError, match=r"_TensorPlaceholder|DictConfig"):
            torch.load(sent)
        reading.allow_fairseq_checkpoints()
        sent.seek(0)
        assert isinstance(torch.load(sent)["cfg"], DictConfig)
    finally:
        torch.serialization.add_safe_globals(allowed)


def test_a_restore_file_that_does_not_exist_is_ignored(corpus, tmp_path, monkeypatch):
    missing = ("--restore-file", tmp_path / "nowhere.pt")
    with pytest.raises(InputError, match=r"nowhere\.pt: no such file"):
        train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *MASKED_LM, *LLN, *missing)
    switch_off(monkeypatch, checkpoint_utils, "load_checkpoint")
    log = train(monkeypatch, tmp_path / "b.log", corpus, tmp_path / "b", *MASKED_LM, *LLN, *missing)
    assert [row["num_updates"] for row in log["train"]][:3] == ["1", "2", "3"]  # from scratch, without a word


@pytest.mark.parametrize("precision", [(), FP16], ids=["gradients", "loss_scale"])
@pytest.mark.parametrize(
    ("model", "error"),
    [
        pytest.param(HOST, StopIteration, marks=pytest.mark.exhaustive, id="host"),
        pytest.param(LLN, TrainingError, id="ours"),
    ],
)
def test_nan_ends_in_a_bare_stop_iteration(precision, model, error, corpus, tmp_path, monkeypatch, half):
    linear = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *args: linear(*args) * torch.nan)
    with pytest.raises(error) as caught:
        train(monkeypatch, tmp_path / "log", corpus, tmp_path / "a", *MASKED_LM, *model, *precision)
    message = str(caught.value)
    assert message.startswith("update 1: ") == (error is TrainingError)
    assert ("NaN detected in output of encoder" in message) == (error is TrainingError)


def test_memory_efficient_fp16_alone_trains_in_float32(corpus, tmp_path, monkeypatch):
    """fairseq-train sets fp16 too, Hydra hands the option over as it is."""

    ours = distributed_utils.call_main

    def as_hydra_does(call_main):
        def call(cfg, main):
            cfg.common.memory_efficient_fp16 = True
            call_main(cfg, main)

        monkeypatch.setattr(distributed_utils, "call_main", call)

    as_hydra_does(ours)
    with pytest.raises(InputError, match="memory_efficient_fp16 without fp16 trains in float32"):
        train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *MASKED_LM, *LLN)
    as_hydra_does(ours.__wrapped__)
    train(monkeypatch, tmp_path / "b.log", corpus, tmp_path / "b", *MASKED_LM, *LLN)
    assert optimizer_of(tmp_path / "b") == "FairseqAdam"
    train(monkeypatch, tmp_path / "c.log", corpus, tmp_path / "c", *MASKED_LM, *LLN, "--fp16")
    assert optimizer_of(tmp_path / "c") == "MemoryEfficientFP16Optimizer"


@pytest.mark.parametrize("updates", [3, 5])  # the end of an epoch, and not
def test_a_complete_run_makes_one_more_update(updates, corpus, tmp_path, monkeypatch):
    options = (corpus, tmp_path / "a", *MASKED_LM, *LLN, "--max-update", updates)
    train(monkeypatch, tmp_path / "a.log", *options)
    before = (tmp_path / "a" / "checkpoint_last.pt").read_bytes()
    assert train(monkeypatch, tmp_path / "b.log", *options) == {"train": [], "valid": []}
    assert (tmp_path / "a" / "checkpoint_last.pt").read_bytes() == before
    switch_off(monkeypatch, checkpoint_utils, "load_checkpoint")
    more = train(monkeypatch, tmp_path / "c.log", *options)["train"]
    assert {row["num_updates"] for row in more} == {str(updates + 1)}


@pytest.mark.parametrize(
    ("model", "same"),
    [pytest.param(HOST, False, marks=pytest.mark.exhaustive, id="host"), pytest.param(LLN, True, id="ours")],
)
def test_loader_processes_mask_the_same_tokens_in_every_epoch(model, same, corpus, tmp_path, monkeypatch):
    options = (*MASKED_LM, *model, "--dropout", 0, "--attention-dropout", 0, "--max-update", 6, "--no-save")
    logs = [train(monkeypatch, tmp_path / f"{workers}.log", corpus, tmp_path / "a", *options, "--num-workers", workers)
            for workers in (0, 1)]  # fmt: skip
    alone, others = ({row["num_updates"]: row["loss"] for row in log["train"]} for log in logs)
    assert list(alone) == list("123456")
    assert (alone == others) == same


def test_a_thread_that_makes_batches_outlives_the_training(tmp_path, monkeypatch):
    """Python's end meets it in torch's C++ code: "terminate called without an active exception", exit code 134."""

    def prefetching():
        return [thread for thread in threading.enumerate() if isinstance(thread, BackgroundConsumer)]

    corpus = make_corpus(tmp_path / "corpus", sizes=(("train", 3000), ("valid", 11)))
    train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *MASKED_LM, *LLN, "--max-update", 1)
    assert not prefetching()
    switch_off(monkeypatch, distributed_utils, "call_main")
    train(monkeypatch, tmp_path / "b.log", corpus, tmp_path / "b", *MASKED_LM, *LLN, "--max-update", 1)
    assert prefetching()
    worker._end_prefetching()


def test_bf16_on_the_command_line_means_a_tpu(corpus, tmp_path, monkeypatch):
    log = train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *MASKED_LM, *LLN, "--bf16")
    assert len(log["train"]) == 3
    assert optimizer_of(tmp_path / "a") == "FP16Optimizer"  # the host's, with bfloat16 in it
    switch_off(monkeypatch, distributed_utils, "call_main")
    with pytest.raises(AttributeError, match="xla_device"):
        train(monkeypatch, tmp_path / "b.log", corpus, tmp_path / "b", *MASKED_LM, *LLN, "--bf16")


@pytest.mark.parametrize("chdir", ["null", "false"])
def test_hydra_changes_the_directory(chdir, corpus, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(fairseq_cli.hydra_train, "pre_main", lambda cfg: seen.append((Path.cwd(), cfg)))
    monkeypatch.chdir(tmp_path)
    ours = ["hydra.job.chdir=null"] if chdir == "null" else []  # null: Hydra's own default
    hydra_train(monkeypatch, "run=cpu", "model=tiny", "corpus=demo", *ours)
    ((directory, cfg),) = seen
    assert (directory == tmp_path) == (chdir == "false")
    assert not os.path.isabs(cfg.task.data)  # which is then another directory
    assert not os.path.isabs(cfg.checkpoint.save_dir)


def test_whole_word_masking_is_broken(corpus):
    options = {"data": str(corpus), "seed": 1, "mask_whole_words": True}
    task = setup_task(OmegaConf.create({"_name": "masked_lm", **options}))
    with pytest.raises(AttributeError, match="no attribute 'args'"):
        task.load_dataset("valid")
    with pytest.raises(InputError, match="mask_whole_words does not work in fairseq's masked_lm: leave it out"):
        setup_task(OmegaConf.create({"_name": "lln_masked_lm", **options}))


@pytest.mark.parametrize("model", [RobertaModel, LLNRobertaModel])
def test_a_model_asks_for_a_download_when_it_is_loaded(model, corpus, tmp_path, monkeypatch):
    """The default of fairseq's from_pretrained is GPT-2's BPE from its host; ours reads what is on the disk."""
    arch = ("--arch", "lln_roberta_tiny" if model is LLNRobertaModel else "roberta")
    train(monkeypatch, tmp_path / "log", corpus, tmp_path / "a", *MASKED_LM, *USER_DIR, *arch, "--max-update", 1)
    cached_path, asked = file_utils.cached_path, []

    def no_network(path, **kwargs):
        if path.startswith("http"):
            asked.append(path)
            raise ConnectionError(path)
        return cached_path(path, **kwargs)

    monkeypatch.setattr(file_utils, "cached_path", no_network)
    with suppress(ConnectionError):
        hub = model.from_pretrained(str(tmp_path / "a"), "checkpoint_last.pt", str(corpus))
    assert bool(asked) == (model is RobertaModel)
    if model is LLNRobertaModel:
        assert hub.extract_features(torch.tensor([0, 5, 6, 2])).shape == (1, 4, 32)
