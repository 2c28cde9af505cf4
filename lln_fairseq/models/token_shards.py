"""Split the sequences of a batch over several workers. Each worker holds a range of consecutive tokens, its shard.

The workers of a group get the same batch. After masking, every worker cuts its shard out of the batch, and counts only
its own tokens, masked tokens and sentences. fairseq then sums losses and scores over all workers.
"""

from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

# How long to wait for a worker that does not answer. The end of a worker's process is noticed at once.
PATIENCE = timedelta(minutes=10)


class Shard(NamedTuple):
    """The shard of this worker: its tokens of the sequences of a batch, which several workers share."""

    group: dist.ProcessGroup  # the workers that share the sequences
    positions: Tensor  # int64 (B, n): the row of each of the shard's n tokens in the table of position embeddings
    has_first: bool  # True if the shard contains the first token of the sequences


def shard_bounds(tokens: int, workers: int, multiple: int = 1) -> list[tuple[int, int]]:
    """Divide `tokens` tokens among `workers` workers.

    Args:
        tokens: the length of the sequences, padding included.
        workers: the number of workers in the group.
        multiple: the length of every shard is a multiple of this, except for the last shard. Block-diagonal attention
            needs this so that no block lies on two workers.

    Returns:
        A pair (start, end) for each worker, in order of rank. Its shard has the tokens from `start` to `end` - 1. The
        shards are as equal as the multiple allows, and the last shard also has the remainder. Shards may be empty.
    """
    whole = tokens // multiple
    starts = [multiple * -(-whole * rank // workers) for rank in range(workers)]
    ends = [*starts[1:], tokens]
    return list(zip(starts, ends, strict=True))


def create_neighbor_group(size: int) -> dist.ProcessGroup:
    """Divide all workers into groups of `size` consecutive ranks, and return the group of this worker.

    All workers of the run must call this, because it creates process groups. ValueError is raised if their number is
    not a multiple of `size`.
    """
    workers = dist.get_world_size()
    if workers % size:
        raise ValueError(f"{workers} workers cannot share sequences in groups of {size}")
    groups = [dist.new_group(range(start, start + size), timeout=PATIENCE) for start in range(0, workers, size)]
    return groups[dist.get_rank() // size]


def cut_batch(sample: dict[str, Any], group: dist.ProcessGroup, multiple: int, padding: int) -> dict[str, Any]:
    """Cut this worker's shard out of a batch in fairseq's form.

    Args:
        sample: a batch with `net_input.src_tokens` (B, N), `nsentences` and an optional `target`. It is not modified.
        group: the workers that share the batch.
        multiple: the length of every shard is a multiple of this many tokens, except for the last shard.
        padding: the id of the padding symbol.

    Returns:
        A new batch. `net_input` has the n tokens of the shard in src_tokens (B, n), and a `Shard` as its entry "shard".
        `ntokens` is the number of these tokens that are not padding. A target of shape (B, N) is cut like the tokens. A
        target of another shape has one row per sentence: the worker with the first token keeps it, and the remaining
        workers get an empty target. `nsentences` is 0 for these remaining workers.
    """
    tokens = sample["net_input"]["src_tokens"]
    rank = dist.get_rank(group)
    bounds = shard_bounds(tokens.shape[1], dist.get_world_size(group), multiple)
    local = slice(*bounds[rank])
    has_first = rank == _first_nonempty(bounds)
    is_real = tokens.ne(padding)
    positions = is_real.cumsum(dim=1) * is_real + padding  # fairseq's way of counting positions
    shard = Shard(group, positions[:, local], has_first)
    cut = {
        **sample,
        "net_input": {**sample["net_input"], "src_tokens": tokens[:, local].contiguous(), "shard": shard},
        "ntokens": int(is_real[:, local].sum()),
        "nsentences": sample["nsentences"] if has_first else 0,
    }
    if "target" in sample:
        target = sample["target"]
        if target.shape == tokens.shape:
            cut["target"] = target[:, local].contiguous()
        elif not has_first:
            cut["target"] = target[:0]
    return cut


def _first_nonempty(bounds: list[tuple[int, int]]) -> int:
    """Return the rank of the first worker whose shard is not empty, or 0 if all shards are empty."""
    for rank, (start, end) in enumerate(bounds):
        if start < end:
            return rank
    return 0
