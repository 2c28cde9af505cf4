"""Where in an epoch a run goes on. fairseq counts the batches that each worker has had: with batches of another size
that number means other sequences, some of which would come twice or not at all."""

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from lln_fairseq.checkpoints.reading import peek
from lln_fairseq.errors import InputError
from lln_fairseq.training.run_identity import as_dict

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
    now = OmegaConf.to_container(here, resolve=True, enum_to_str=True)
    old_sizes, sizes = as_dict(saved.get("dataset")), as_dict(now["dataset"])
    for key in SIZES:
        if old_sizes.get(key) != sizes[key]:
            raise InputError(
                f"{path} is of the middle of an epoch, with dataset.{key} = {old_sizes.get(key)}, here it is "
                f"{sizes[key]}: keep it {ADVICE}"
            )
    shards = _shards(now)
    before = _shards(saved) or shards
    if before != shards and (done * before % shards or sizes["grouped_shuffling"]):
        raise InputError(
            f"{path} is of the middle of an epoch, and {shards} workers cannot share what {before} have left of it: "
            f"keep their number {ADVICE}"
        )
    return done * before // shards


def _shards(config: Mapping[str, Any]) -> int:
    """The parts that an epoch is divided into: workers that share sequences get the same. 0 where that is not known."""
    workers = as_dict(config.get("distributed_training")).get("distributed_world_size")
    shared = as_dict(config.get("task")).get("sequence_parallel_size")
    return workers // max(shared or 1, 1) if isinstance(workers, int) and isinstance(shared, int | None) else 0
