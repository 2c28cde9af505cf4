"""An update or a validation in which nothing is masked would have the loss NaN: one token is masked instead."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.fairseq_runs import LLN, MASKED_LM, WORDS, assert_resumes_exactly, binarize, make_dictionary, split_options
from tests.tasks.test_tasks import PAD, load_batches, make_task

MASK = len(WORDS) + 4  # the id of <mask>, after those of <s>, <pad>, </s> and <unk>
RARE_MASKS = {"tokens_per_sample": 4, "sample_break_mode": "none", "mask_prob": 0.02}


@pytest.fixture(scope="module")
def short_rows(tmp_path_factory):
    """Lines of two words, of which a mask_prob of 0.02 masks a token in one of 12."""
    data = tmp_path_factory.mktemp("short")
    dictionary = make_dictionary(data / "dict.txt", WORDS)
    for split, rows in (("train", 40), ("valid", 3), ("test", 40)):
        binarize([f"w{row} w{row + 1}" for row in range(rows)], dictionary, data / split)
    return data


def targets_of(batches):
    """Return the tokens that the batches predict, with the tokens that the model sees in their places."""
    targets = []
    for batch in batches:
        is_target = batch["target"] != PAD
        tokens = batch["net_input"]["src_tokens"]
        targets += zip(batch["target"][is_target].tolist(), tokens[is_target].tolist(), strict=True)
    return targets


def test_validation_without_masks_masks_one_token(short_rows):
    assert targets_of(load_batches(make_task("masked_lm", short_rows, **RARE_MASKS), "valid")) == []

    ((target, visible),) = targets_of(load_batches(make_task("lln_masked_lm", short_rows, **RARE_MASKS), "valid"))

    assert (target != PAD, visible) == (True, MASK)
    again = targets_of(load_batches(make_task("lln_masked_lm", short_rows, **RARE_MASKS), "valid"))
    assert again == [(target, visible)]


def test_validation_with_masks_keeps_them(short_rows):
    stock, ours = (
        load_batches(make_task(name, short_rows, **RARE_MASKS), "test") for name in ("masked_lm", "lln_masked_lm")
    )

    assert 0 < len(targets_of(stock)) < 10
    assert targets_of(ours) == targets_of(stock)


def make_updates(task, split="train"):
    """Return the updates of a split, each with the samples of two batches of one row."""
    task.load_dataset(split)
    iterator = task.get_batch_iterator(task.dataset(split), max_sentences=1, max_positions=512)
    batches = list(iterator.next_epoch_itr(shuffle=False))
    return [batches[first : first + 2] for first in range(0, len(batches), 2)]


def test_update_without_masks_masks_one_token_and_others_keep_theirs(short_rows):
    task = make_task("lln_masked_lm", short_rows, **RARE_MASKS)
    updates = make_updates(task)
    before = [targets_of(update) for update in updates]
    assert [] in before
    assert any(before)

    for number, update in enumerate(updates):
        task.before_update(update, number, torch.device("cpu"))

    for targets, update in zip(before, updates, strict=True):
        if targets:
            assert targets_of(update) == targets
        else:
            ((target, visible),) = targets_of(update)
            assert (target != PAD, visible) == (True, MASK)


@pytest.mark.parametrize(("rank", "other_has_mask", "expected"), [(0, False, 1), (1, False, 0), (0, True, 0)])
def test_only_first_of_several_workers_without_masks_masks_a_token(
    rank, other_has_mask, expected, short_rows, monkeypatch
):
    def all_reduce(tensor, op):
        assert op == dist.ReduceOp.MAX
        tensor.clamp_(min=int(other_has_mask))

    task = make_task("lln_masked_lm", short_rows, **RARE_MASKS)
    update = next(update for update in make_updates(task) if not targets_of(update))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)

    task.before_update(update, 0, torch.device("cpu"))

    assert len(targets_of(update)) == expected


def test_run_on_short_rows_has_finite_losses_and_resumes_exactly(short_rows, tmp_path, monkeypatch):
    options = split_options("--sample-break-mode eos --batch-size 1 --mask-prob 0.02")

    whole = assert_resumes_exactly(monkeypatch, tmp_path, short_rows, *MASKED_LM, *LLN, *options, stop=3, updates=6)

    assert all(np.isfinite(float(loss)) and float(norm) > 0 for loss, norm in whole.values())
    assert (tmp_path / "whole" / "checkpoint_best.pt").is_file()
