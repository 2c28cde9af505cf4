"""A run goes on where it was in its epoch, or says why it cannot."""

import shutil

import pytest
from fairseq.data import ListDataset
from fairseq.data.iterators import EpochBatchIterator
from omegaconf import OmegaConf

from lln_fairseq.checkpoints.reading import load_checkpoint_lazily
from lln_fairseq.errors import InputError
from lln_fairseq.training.resume import batch_offset
from tests.fairseq_runs import train
from tests.training.conftest import COMMON


def test_other_batches_in_the_middle_of_an_epoch(begun, tmp_path, monkeypatch):
    """They are taken at its begin, and by a run that is complete."""
    corpus, run = begun[0], shutil.copytree(begun[1], tmp_path / "run")
    options = ("--batch-size", 4, "--update-freq", 2)
    with pytest.raises(
        InputError, match=r"middle of an epoch, with dataset\.batch_size = 8, here it is 4: keep it until"
    ):
        train(monkeypatch, tmp_path / "a.log", corpus, run, *COMMON, "--max-update", 4, *options)
    train(monkeypatch, tmp_path / "b.log", corpus, run, *COMMON, "--max-update", 2, *options)  # is complete
    train(monkeypatch, tmp_path / "c.log", corpus, run, *COMMON, "--max-epoch", 1, "--max-update", 99)
    updates = load_checkpoint_lazily(str(run / "checkpoint_last.pt"))["optimizer_history"][-1]["num_updates"]
    log = train(monkeypatch, tmp_path / "d.log", corpus, run, *COMMON, "--max-update", updates + 1, *options)
    assert [row["num_updates"] for row in log["train"]][:1] == [str(updates + 1)]


POSITIONS = [  # batches that each of the workers has had, workers, workers from now on -> batches of each of these
    ((16, 1, 8), 2),
    ((3, 8, 2), 12),
    ((0, 1, 8), 0),
    ((10, 1, 8), None),
]


@pytest.mark.parametrize(("given", "expected"), POSITIONS)
def test_the_position_in_an_epoch_on_other_workers(given, expected):
    def configuration(workers):
        return {"dataset": {"batch_size": 8, "max_tokens": None, "grouped_shuffling": False}, "task": {},
                "distributed_training": {"distributed_world_size": workers}}  # fmt: skip

    done, before, now = given
    saved, here = configuration(before), OmegaConf.create(configuration(now))
    if expected is None:
        with pytest.raises(InputError, match=r"8 workers cannot share what 1 have left of it: keep their number until"):
            batch_offset("a.pt", saved, done, here)
    else:
        assert batch_offset("a.pt", saved, done, here) == expected


def batches_behind(shards, done, total=24):
    """Of a fairseq iterator on several workers that goes on `done` batches after the begin of epoch 2."""
    data, batches, left = ListDataset(range(total)), [[row] for row in range(total)], []
    for shard in range(shards):
        sharing = {"num_shards": shards, "shard_id": shard, "persistent_workers": False}
        iterator = EpochBatchIterator(data, list, batches, seed=5, epoch=2, **sharing)
        iterator.load_state_dict({"epoch": 2, "iterations_in_epoch": done, "shuffle": True, "version": 2})
        left += [batch[0] for batch in iterator.next_epoch_itr()]
    return set(range(total)) - set(left)


def test_as_many_batches_on_other_workers_are_the_same():
    assert batches_behind(8, 2) == batches_behind(2, 8) == batches_behind(1, 16)
    assert batches_behind(8, 2) != batches_behind(2, 2)  # what fairseq took
