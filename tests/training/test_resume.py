"""A resumed run continues exactly, a complete run trains no further, and what cannot be resumed is an error."""

import logging

import pytest
import torch
from omegaconf import OmegaConf

from lln_fairseq.checkpoints.reading import load_checkpoint_lazily
from lln_fairseq.errors import UserError
from lln_fairseq.training.resume import batch_offset
from tests.fairseq_runs import CLASSIFICATION, LLN, MASKED_LM, split_options, train
from tests.helpers import with_representatives
from tests.training.conftest import RUN_OPTIONS

PRECISIONS = [
    (),
    ("--fp16", "--memory-efficient-fp16", "--fp16-init-scale", 8),
    ("--fp16", "--fp16-no-flatten-grads", "--fp16-init-scale", 8),
    ("--bf16",),
    ("--bf16", "--fp16-no-flatten-grads", "--optimizer", "nag"),
    ("--store-ema", "--ema-fp32", "--ema-update-freq", 2, "--ema-decay", 0.9),
]
# Validate and save after every update.
EVERY_UPDATE = ("--validate-interval-updates", 1, "--save-interval-updates", 1)


def assert_same_tensors(actual, expected):
    assert actual.keys() == expected.keys()
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


@pytest.mark.parametrize(
    "precision",
    with_representatives(PRECISIONS, (), *PRECISIONS[2:4], PRECISIONS[-1]),
    ids=lambda precision: " ".join(map(str, precision)),
)
def test_interrupted_run_resumes_exactly(precision, corpus, tmp_path, monkeypatch, half):
    run_options = (*MASKED_LM, *LLN, *precision, "--fp16-scale-window", 3)

    train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "whole", *run_options, "--max-update", 10)
    train(monkeypatch, tmp_path / "b.log", corpus, tmp_path / "resumed", *run_options, "--max-update", 5)
    train(monkeypatch, tmp_path / "c.log", corpus, tmp_path / "resumed", *run_options, "--max-update", 10)

    whole = torch.load(tmp_path / "whole" / "checkpoint_last.pt")
    resumed = torch.load(tmp_path / "resumed" / "checkpoint_last.pt")
    assert_same_tensors(resumed["model"], whole["model"])
    whole_average = whole["extra_state"].get("ema_fp32_params", {})
    resumed_average = resumed["extra_state"].get("ema_fp32_params", {})
    assert_same_tensors(resumed_average, whole_average)
    assert resumed["last_optimizer_state"].get("loss_scale") == whole["last_optimizer_state"].get("loss_scale")


@pytest.mark.exhaustive
def test_stock_fairseq_forgets_float32_parameters_of_fp16(corpus, tmp_path, monkeypatch, half):
    stock = split_options("--fp16 --fp16-no-flatten-grads --fp16-init-scale 8 --task masked_lm")
    run_options = (*MASKED_LM, *LLN, *stock, "--required-batch-size-multiple", 1)

    train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "whole", *run_options, "--max-update", 10)
    train(monkeypatch, tmp_path / "b.log", corpus, tmp_path / "resumed", *run_options, "--max-update", 5)
    train(monkeypatch, tmp_path / "c.log", corpus, tmp_path / "resumed", *run_options, "--max-update", 10)

    whole = torch.load(tmp_path / "whole" / "checkpoint_last.pt")["model"]
    resumed = torch.load(tmp_path / "resumed" / "checkpoint_last.pt")["model"]
    assert any(not torch.equal(resumed[name], whole[name]) for name in whole)


def test_patience_survives_interruption(corpus, tmp_path, monkeypatch):
    run_options = (*MASKED_LM, *LLN, "--lr", 0, "--patience", 3, *EVERY_UPDATE)

    train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *run_options, "--max-update", 2)
    log = train(monkeypatch, tmp_path / "b.log", corpus, tmp_path / "a", *run_options, "--max-update", 9)

    assert sorted({row["num_updates"] for row in log["train"]}) == ["3", "4"]


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        (
            ("--lr", 0, "--patience", 2, *EVERY_UPDATE),
            "stopped early at update 3, without a better score in 2 validations",
        ),
        (("--max-epoch", 1), "3 updates in 1 epochs"),
        (("--stop-time-hours", 1e-7), "1 updates in 1e-07 hours"),
    ],
    ids=["patience", "epochs", "time"],
)
def test_complete_run_trains_no_further(limit, reason, corpus, tmp_path, monkeypatch, caplog):
    run_options = (*MASKED_LM, *LLN, "--max-update", 9, *limit)
    log = train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *run_options)
    if "--patience" in limit:
        assert len(log["train"]) == 3  # the first score, and two that are no better
    checkpoint = tmp_path / "a" / "checkpoint_last.pt"
    before = checkpoint.read_bytes()

    with caplog.at_level(logging.INFO):
        second_log = train(monkeypatch, tmp_path / "b.log", corpus, tmp_path / "a", *run_options)

    assert second_log["train"] == []
    assert f"a is complete: {reason}" in caplog.text
    assert checkpoint.read_bytes() == before


def test_restore_file_does_not_overwrite_existing_run(corpus, task_data, tmp_path, monkeypatch):
    train(monkeypatch, tmp_path / "p.log", corpus, tmp_path / "p", *MASKED_LM, *LLN, "--max-positions", 64)
    resets = split_options("--reset-optimizer --reset-dataloader --reset-meters --reset-lr-scheduler")
    run_options = (*CLASSIFICATION, *LLN, "--restore-file", tmp_path / "p" / "checkpoint_last.pt", *resets)
    train(monkeypatch, tmp_path / "a.log", task_data, tmp_path / "a", *run_options)

    with pytest.raises(UserError, match="would overwrite it: use --finetune-from-model"):
        train(monkeypatch, tmp_path / "b.log", task_data, tmp_path / "a", *run_options)


@pytest.mark.parametrize("precision", [(), ("--bf16",)], ids=["float32", "bf16"])
def test_more_positions_need_a_new_optimizer_state(precision, corpus, tmp_path, monkeypatch):
    options = (*RUN_OPTIONS, *precision)
    train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *options)
    longer = (*options, "--restore-file", tmp_path / "a" / "checkpoint_last.pt", "--max-positions", 128)
    longer = (*longer, "--max-update", 4)
    with pytest.raises(UserError, match=r"is for parameters of other shapes: .* --reset-optimizer"):
        train(monkeypatch, tmp_path / "b.log", corpus, tmp_path / "b", *longer)

    log = train(monkeypatch, tmp_path / "c.log", corpus, tmp_path / "c", *longer, "--reset-optimizer")

    assert log["train"]


def test_damaged_last_checkpoint_names_an_intact_one(run_copy, tmp_path, monkeypatch):
    (run_copy.save_dir / "checkpoint_1_1.pt").write_bytes(b"damaged too")
    run_copy.checkpoint.write_bytes(run_copy.checkpoint.read_bytes()[:-5000])

    with pytest.raises(UserError, match=r"damaged .*checkpoint_best\.pt .* copy it to checkpoint_last") as caught:
        train(monkeypatch, tmp_path / "log", run_copy.corpus, run_copy.save_dir, *RUN_OPTIONS, "--max-update", 4)

    assert "weights_only" not in str(caught.value)


def test_missing_last_checkpoint_does_not_restart_the_run(run_copy, tmp_path, monkeypatch):
    run_copy.checkpoint.unlink()
    before = {path.name: path.read_bytes() for path in run_copy.save_dir.glob("*.pt")}

    with pytest.raises(UserError, match=r"has checkpoints but no checkpoint_last.pt, .* copy checkpoint_.*\.pt to"):
        train(monkeypatch, tmp_path / "log", run_copy.corpus, run_copy.save_dir, *RUN_OPTIONS, "--max-update", 4)

    assert {path.name: path.read_bytes() for path in run_copy.save_dir.glob("*.pt")} == before


OTHER_BATCHES = ("--batch-size", 4, "--update-freq", 2)


def test_other_batches_in_middle_of_epoch_are_rejected(run_copy, tmp_path, monkeypatch):
    run_options = (*RUN_OPTIONS, "--max-update", 4, *OTHER_BATCHES)
    with pytest.raises(UserError, match=r"middle of an epoch with dataset\.batch_size = 8, .* has 4: keep .* until"):
        train(monkeypatch, tmp_path / "log", run_copy.corpus, run_copy.save_dir, *run_options)


def test_complete_run_accepts_other_batches(run_copy, tmp_path, monkeypatch):
    log = train(monkeypatch, tmp_path / "log", run_copy.corpus, run_copy.save_dir, *RUN_OPTIONS, *OTHER_BATCHES)
    assert log["train"] == []


def test_other_batches_at_start_of_epoch_are_accepted(run_copy, tmp_path, monkeypatch):
    corpus, run = run_copy
    train(monkeypatch, tmp_path / "a.log", corpus, run, *RUN_OPTIONS, "--max-epoch", 1, "--max-update", 99)
    state = load_checkpoint_lazily(str(run_copy.checkpoint))
    next_update = state["optimizer_history"][-1]["num_updates"] + 1

    log = train(monkeypatch, tmp_path / "b.log", corpus, run, *RUN_OPTIONS, "--max-update", next_update, *OTHER_BATCHES)

    assert log["train"][0]["num_updates"] == str(next_update)


def configuration(workers):
    return {
        "dataset": {"batch_size": 8, "max_tokens": None, "grouped_shuffling": False},
        "task": {},
        "distributed_training": {"distributed_world_size": workers},
    }


@pytest.mark.parametrize(
    ("done", "saved_workers", "workers", "expected"),
    [
        (16, 1, 8, 2),
        (3, 8, 2, 12),
        (0, 1, 8, 0),
    ],
)
def test_batch_offset_with_other_workers(done, saved_workers, workers, expected):
    assert (
        batch_offset("a.pt", configuration(saved_workers), done, OmegaConf.create(configuration(workers))) == expected
    )


def test_batch_offset_rejects_indivisible_batches():
    with pytest.raises(UserError, match=r"with 1 workers, .* divided among 8 workers: keep their number until"):
        batch_offset("a.pt", configuration(1), 10, OmegaConf.create(configuration(8)))
