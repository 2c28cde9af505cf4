"""Where in an epoch a run goes on. fairseq counts the batches that each worker has had: with batches of another size
that number means other sequences, some of which would come twice or not at all."""

from collections.abc import Mapping
from typing import Any

from lln_fairseq.host.checkpoints import peek
from lln_fairseq.host.errors import InputError

SIZES = ("batch_size", "max_tokens")  # of dataset
ADVICE = "until the epoch ends, or --reset-dataloader (checkpoint.reset_dataloader=true), which begins with epoch 1"


def position(path: str, done: int, here: Any) -> int:
    """The batches of the epoch that each worker of this training has behind it, where it goes on from a checkpoint of
    workers that had `done` each.

    The same batches on another number of workers are as many together. Raises: InputError in the middle of an epoch
    where the batches are others, or cannot be divided among the workers.
    """
    saved = peek(path).get("cfg")
    if not done or not isinstance(saved, Mapping):
        return done
    before, now = ({f"dataset.{key}": cfg["dataset"].get(key) for key in SIZES} for cfg in (saved, here))
    for key, value in before.items():
        if value != now[key]:
            raise InputError(
                f"{path} is of the middle of an epoch, with {key} = {value}, here it is {now[key]}: keep it {ADVICE}"
            )
    shards, wanted = _shards(saved), _shards(here)
    if shards != wanted and (done * shards % wanted or here.dataset.grouped_shuffling):
        raise InputError(
            f"{path} is of the middle of an epoch, and {wanted} workers cannot share what {shards} have left of it: "
            f"keep their number {ADVICE}"
        )
    return done * shards // wanted


def _shards(cfg: Any) -> int:
    """The parts that an epoch is divided into: workers that share sequences get the same."""
    return cfg["distributed_training"]["distributed_world_size"] // (cfg["task"].get("sequence_parallel_size") or 1)
