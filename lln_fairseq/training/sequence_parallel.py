"""Sequence parallelism (--sequence-parallel-size): the workers of a group share every sequence of a batch."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lln_fairseq.attention import ATTENTION_REGISTRY, Attention, reject_layer_mechanism
from lln_fairseq.attention.context import BERT_PAIRS, ROBERTA_PAIRS
from lln_fairseq.errors import UserError, user_errors
from lln_fairseq.models.token_shards import create_neighbor_group, cut_batch

UNSUPPORTED = (
    "cannot split a sequence across workers: leave out --sequence-parallel-size (task.sequence_parallel_size), or "
    "choose another attention"
)
SEED_FACTOR = 1_000_003  # keeps the seeds of different ranks and updates apart


class SequenceParallelism:
    """Gives this worker its shard of every batch: consecutive tokens of each sequence.

    With --sequence-parallel-size 1, and in programs that only evaluate a checkpoint, there is no group of workers.
    Every method then leaves its input unchanged. `cfg` is the configuration of the task.
    """

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg
        self.group: Any = None  # a process group of torch.distributed
        self.multiple = 1  # the length of every shard but the last is a multiple of this

    def join_group(self, model: nn.Module) -> None:
        """Create the groups of workers, and join the group of this worker. All workers must call this.

        With --sequence-parallel-size 1 or a single worker, nothing happens. UserError is raised if the model cannot
        split its sequences across workers, or if the number of workers is not a multiple of --sequence-parallel-size.
        """
        size = self.cfg.sequence_parallel_size
        if size > 1 and dist.is_initialized():
            self.multiple = shard_multiple(model)
            with user_errors():
                self.group = create_neighbor_group(size)

    def merge_data_shards(self, options: dict[str, Any]) -> None:
        """Make all workers of a group load the same batches.

        `num_shards` and `shard_id` in `options`, the keyword arguments of fairseq's get_batch_iterator, are changed in
        place.
        """
        if self.group is not None and options.get("num_shards", 1) > 1:
            options["num_shards"] //= self.cfg.sequence_parallel_size
            options["shard_id"] //= self.cfg.sequence_parallel_size

    def seed_dropout(self) -> None:
        """Change this worker's random seed, so that dropout differs between the shards of a sequence.

        fairseq gives every worker the same seed. The first worker of a group keeps it.
        """
        if self.group is None:
            return
        rank = dist.get_rank(self.group)
        if rank > 0:
            torch.manual_seed((torch.initial_seed() * SEED_FACTOR + rank) % 2**63)

    def cut_shard(self, sample: Any, padding: int) -> Any:
        """Return a new batch with this worker's tokens, see `token_shards.cut_batch`; without a group, `sample` itself.

        `padding` is the id of the padding symbol.
        """
        if self.group is None:
            return sample
        return cut_batch(sample, self.group, self.multiple, padding)


def shard_multiple(model: Any) -> int:
    """Return the number of tokens of which the length of every shard but the last must be a multiple.

    This is the largest `shard_multiple` of the model's attentions. UserError is raised if the model cannot split its
    sequences across workers.
    """
    with user_errors():
        reject_layer_mechanism(getattr(model.args, "attention", ""), UNSUPPORTED)
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    if not attentions:
        raise UserError("--sequence-parallel-size needs a model of this package (--arch lln_roberta_...)")
    if getattr(model.args, "encoder_layerdrop", 0):
        raise UserError(
            "--sequence-parallel-size does not work with --encoder-layerdrop: the workers of a sequence would drop "
            "different layers"
        )
    if getattr(model.args, "softmax_layers", None):
        raise UserError(
            "--sequence-parallel-size does not work with --softmax-layers: softmax needs the whole sequence"
        )
    if getattr(model.args, "pooling", "first") != "first" or getattr(model.args, "two_towers", False):
        raise UserError(
            "--sequence-parallel-size needs --pooling first and no --two-towers: only the first token is classified, "
            "by the worker that holds it"
        )
    if getattr(model.args, "pair_form", ROBERTA_PAIRS) == BERT_PAIRS:
        raise UserError("--sequence-parallel-size does not work with --pair-form bert: a shard does not show the texts")
    multiples = []
    for attention in attentions:
        if attention.shard_multiple is None:
            raise UserError(f"attention {_describe_attention(attention)} {UNSUPPORTED}")
        multiples.append(attention.shard_multiple)
    return max(multiples)


def _describe_attention(attention: Attention) -> str:
    name = next(name for name, entry in ATTENTION_REGISTRY.items() if type(attention) is entry.cls)
    options = attention.extra_repr()
    if not options:
        return name
    return f"{name} with {options}"
