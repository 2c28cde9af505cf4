"""--sequence-parallel-size: groups of neighbouring workers get the same batches, and each a part of their tokens."""

from typing import Any

import torch
import torch.distributed as dist

from lln_fairseq.attention import ATTENTION_REGISTRY, Attention, require_attention
from lln_fairseq.errors import InputError, input_errors
from lln_fairseq.modules.token_shards import create_neighbor_group, cut_batch

SHARING = (
    "share a sequence over workers: leave out --sequence-parallel-size (task.sequence_parallel_size), or take "
    "another attention"
)
SEED_FACTOR = 1_000_003  # makes seeds that no other worker or update has


class SequenceSharing:
    """Give this worker its part of every batch that its group shares.

    Programs that evaluate a checkpoint, on any number of workers, take sequences as they are.
    """

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg
        self.group: Any = None  # the workers that this one shares its sequences with
        self.multiple = 1  # the tokens of a part are a multiple of it

    def join_group(self, model: Any) -> None:
        """Join this worker's group, if there are groups. Raise InputError if the model cannot share its sequences."""
        size = self.cfg.sequence_parallel_size
        if size > 1 and dist.is_initialized():
            self.multiple = shard_multiple(model)
            with input_errors():
                self.group = create_neighbor_group(size)

    def merge_data_shards(self, options: dict[str, Any]) -> None:
        """Change the options of fairseq's get_batch_iterator such that a group gets the batches of one worker."""
        if self.group is not None and options.get("num_shards", 1) > 1:
            options["num_shards"] //= self.cfg.sequence_parallel_size
            options["shard_id"] //= self.cfg.sequence_parallel_size

    def seed_dropout(self) -> None:
        """Seed every worker of a group differently.

        fairseq gives all workers the same seed, so that dropout would be the same in every part of a sequence.
        """
        if self.group is None:
            return
        rank = dist.get_rank(self.group)
        if rank > 0:
            torch.manual_seed((torch.initial_seed() * SEED_FACTOR + rank) % 2**63)

    def own_part(self, sample: Any, padding: int) -> Any:
        """Return this worker's part of a batch: all of it without a group."""
        if self.group is None:
            return sample
        return cut_batch(sample, self.group, self.multiple, padding)


def shard_multiple(model: Any) -> int:
    """Return the number of tokens that a worker's part must be a multiple of.

    Raises: InputError if the model cannot share its sequences.
    """
    with input_errors():
        require_attention(getattr(model.args, "attention", ""), f"cannot {SHARING}")
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    if not attentions:
        raise InputError("--sequence-parallel-size needs a model of this package (--arch lln_roberta_...)")
    if getattr(model.args, "encoder_layerdrop", 0):
        raise InputError("--sequence-parallel-size does not work with --encoder-layerdrop: workers would drop others")
    if getattr(model.args, "pooling", "first") != "first" or getattr(model.args, "two_towers", False):
        raise InputError(
            "--sequence-parallel-size needs --pooling first, and one tower: the first token's worker has "
            "what a classification sees"
        )
    multiples = []
    for module in attentions:
        if module.shard_multiple is None:
            name = next(name for name, entry in ATTENTION_REGISTRY.items() if type(module) is entry.cls)
            options = module.extra_repr()
            raise InputError(f"attention {name}{f' with {options}' if options else ''} cannot {SHARING}")
        multiples.append(module.shard_multiple)
    return max(multiples)
