"""--warmup-fraction sets the learning rate schedule from the number of updates."""

import logging
import math
from types import SimpleNamespace

import pytest

from lln_fairseq.errors import UserError
from lln_fairseq.training.schedule import total_updates
from tests.fairseq_runs import LLN, MASKED_LM, split_options, train

POLYNOMIAL = split_options("--lr-scheduler polynomial_decay --total-num-update 1 --max-update 0")


def learning_rates(log):
    return {int(row["num_updates"]): float(row["lr"]) for row in log["train"]}


def test_learning_rate_rises_and_falls_over_all_epochs(corpus, tmp_path, monkeypatch):
    schedule = (*POLYNOMIAL, "--warmup-fraction", 0.5, "--batch-size", 16, "--max-epoch", 2)
    log = train(monkeypatch, tmp_path / "log", corpus, tmp_path / "run", *MASKED_LM, *LLN, *schedule)
    assert learning_rates(log) == {1: 0.0005, 2: 0.001, 3: 0.0005, 4: 0.0}


def test_finished_run_with_more_updates_says_with_which_learning_rate_it_goes_on(corpus, tmp_path, monkeypatch, caplog):
    run_options = (*MASKED_LM, *LLN, *POLYNOMIAL, "--warmup-fraction", 0, "--max-update")
    train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "run", *run_options, 3)

    with caplog.at_level(logging.INFO):
        log = train(monkeypatch, tmp_path / "b.log", corpus, tmp_path / "run", *run_options, 6)

    assert "resumes    after update 3, with the learning rate 0.0005\n" in caplog.text
    assert learning_rates(log)[6] == 0


@pytest.mark.parametrize(
    ("last", "warmup", "warning"),
    [
        (2, 0, "the learning rate is 0 after update 2 of 3"),
        (3, 3, "the run ends after 3 updates, in its warm-up of 3"),
        (3, 2, None),
    ],
)
def test_schedule_that_does_not_fit_the_run_has_a_warning(last, warmup, warning, corpus, tmp_path, monkeypatch, caplog):
    schedule = (*POLYNOMIAL, "--total-num-update", last, "--warmup-updates", warmup, "--max-update", 3)
    with caplog.at_level(logging.WARNING):
        train(monkeypatch, tmp_path / "log", corpus, tmp_path / "run", *MASKED_LM, *LLN, *schedule)
    warnings = [message for message in caplog.messages if "task.warmup_fraction" in message]
    if warning is None:
        assert warnings == []
    else:
        assert len(warnings) == 1
        assert warnings[0].startswith(warning)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("--max-epoch", 0), "needs --max-epoch or --max-update"),
        (("--max-epoch", 1, "--warmup-fraction", 1.5), "must be at least 0 and less than 1, got 1.5"),
        (("--max-epoch", 1, "--lr-scheduler", "inverse_sqrt"), "needs --lr-scheduler polynomial_decay"),
    ],
)
def test_impossible_fraction_is_rejected(changes, message, corpus, tmp_path, monkeypatch):
    run_options = (*MASKED_LM, *LLN, *POLYNOMIAL, "--warmup-fraction", 0.1, *changes)
    if "inverse_sqrt" in changes:
        run_options = (*MASKED_LM, *LLN, "--warmup-updates", 2, "--warmup-fraction", 0.1, *changes)
    with pytest.raises(UserError, match=message):
        train(monkeypatch, tmp_path / "log", corpus, tmp_path / "run", *run_options)


@pytest.mark.parametrize(
    ("max_update", "max_epoch", "update_freq", "updates"),
    [
        (0, 0, [1], math.inf),
        (100, 0, [1], 100),
        (100, 3, [1], 30),
        (20, 3, [1], 20),
        (0, 3, [4], 9),
        (0, 3, [1, 5], 14),
    ],
)
def test_number_of_updates(max_update, max_epoch, update_freq, updates):
    limits = SimpleNamespace(
        max_update=max_update, max_epoch=max_epoch, update_freq=update_freq, skip_remainder_batch=False
    )
    assert total_updates(SimpleNamespace(optimization=limits), batches=10) == updates
