"""--sequence-parallel-size: groups of neighbouring workers get the same batches, and each a part of their tokens."""

from typing import Any

import torch
import torch.distributed as dist

from lln_fairseq.attention import ATTENTION_REGISTRY, Attention, need_attention
from lln_fairseq.host.errors import InputError, input_errors
from lln_fairseq.modules.sequence_parallel import cut_batch, neighbours

SHARING = ("share a sequence over workers: leave out --sequence-parallel-size (task.sequence_parallel_size), or take "
           "another attention")  # fmt: skip
SEED_FACTOR = 1_000_003  # makes seeds that no other worker or update has


class SharedSequences:
    """Goes in front of a fairseq task, behind what observes its steps.

    What evaluates a checkpoint, on any number of workers, takes sequences as they are.
    """

    _group: Any = None  # the workers that this one shares its sequences with
    _multiple = 1

    def build_model(self, *args: Any, **kwargs: Any) -> Any:
        """Raises: InputError for a model that cannot share its sequences."""
        model = super().build_model(*args, **kwargs)
        size = self.cfg.sequence_parallel_size
        if size > 1 and dist.is_initialized() and not kwargs.get("from_checkpoint"):
            self._multiple = shard_multiple(model)
            with input_errors():
                self._group = neighbours(size)
        return model

    def get_batch_iterator(self, *args: Any, **kwargs: Any) -> Any:
        """The batches of the group as if it were one worker."""
        if self._group is not None and kwargs.get("num_shards", 1) > 1:
            for key in ("num_shards", "shard_id"):
                kwargs[key] //= self.cfg.sequence_parallel_size
        return super().get_batch_iterator(*args, **kwargs)

    def train_step(self, sample: Any, *args: Any, **kwargs: Any) -> tuple:
        if self._group is not None and (rank := dist.get_rank(self._group)):
            # fairseq gives all workers the same seed: dropout would be the same in every part of a sequence.
            torch.manual_seed((torch.initial_seed() * SEED_FACTOR + rank) % 2**63)
        return super().train_step(self._own(sample), *args, **kwargs)

    def valid_step(self, sample: Any, *args: Any, **kwargs: Any) -> tuple:
        return super().valid_step(self._own(sample), *args, **kwargs)

    def _own(self, sample: Any) -> Any:
        if self._group is None:
            return sample
        return cut_batch(sample, self._group, self._multiple, self.source_dictionary.pad())


def shard_multiple(model: Any) -> int:
    """The tokens that a worker's part must be a multiple of. Raises: InputError where there can be no parts."""
    with input_errors():
        need_attention(getattr(model.args, "attention", ""), f"cannot {SHARING}")
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    if not attentions:
        raise InputError("--sequence-parallel-size needs a model of this package (--arch lln_roberta_...)")
    if getattr(model.args, "encoder_layerdrop", 0):
        raise InputError("--sequence-parallel-size does not work with --encoder-layerdrop: workers would drop others")
    if getattr(model.args, "pooling", "first") != "first" or getattr(model.args, "two_towers", False):
        raise InputError("--sequence-parallel-size needs --pooling first, and one tower: the first token's worker has "
                         "what a classification sees")  # fmt: skip
    for module in attentions:
        if module.shard_multiple is None:
            name = next(name for name, entry in ATTENTION_REGISTRY.items() if type(module) is entry.cls)
            options = module.extra_repr()
            raise InputError(f"attention {name}{f' with {options}' if options else ''} cannot {SHARING}")
    return max(module.shard_multiple for module in attentions)
