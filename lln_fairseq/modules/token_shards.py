"""Split the sequences of a batch over several workers, each of which holds a range of consecutive tokens.

Groups of neighboring workers get the same batch. After masking, every worker cuts its own tokens out of it, and counts
only its own tokens, masked tokens and sentences. fairseq then sums losses and scores over all workers.
"""

from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

# How long to wait for a worker that does not answer. The end of a worker's process is noticed at once.
PATIENCE = timedelta(minutes=10)


class Shard(NamedTuple):
    """The part of a batch's sequences that this worker holds: a range of consecutive tokens."""

    group: dist.ProcessGroup  # the workers that share the sequences
    positions: Tensor  # (B, n): for every token of the shard, its row in the table of position embeddings
    has_first: bool  # the shard contains the first token of the sequences


def shard_bounds(tokens: int, workers: int, multiple: int = 1) -> list[tuple[int, int]]:
    """Divide `tokens` tokens among `workers` workers.

    Args:
        tokens: number of tokens of the sequences, padding included.
        workers: number of workers in the group.
        multiple: the shards of all workers but the last are multiples of this many tokens. Block-diagonal attention
            needs this so that no block lies on two workers.

    Returns:
        For every worker the first token of its shard and the token after its last one. Shards are as equal as the
        multiple allows, the last worker also gets the remainder, and shards may be empty.
    """
    whole = tokens // multiple
    starts = [multiple * -(-whole * rank // workers) for rank in range(workers)]
    ends = [*starts[1:], tokens]
    return list(zip(starts, ends, strict=True))


def create_neighbor_group(size: int) -> dist.ProcessGroup:
    """Divide all workers into groups of `size` consecutive ranks, and return the group of this worker.

    All workers of the run must call this, because it creates process groups. Raises ValueError if the number of workers
    is not a multiple of size.
    """
    workers = dist.get_world_size()
    if workers % size:
        raise ValueError(f"{workers} workers cannot share sequences in groups of {size}")
    groups = [dist.new_group(range(start, start + size), timeout=PATIENCE) for start in range(0, workers, size)]
    return groups[dist.get_rank() // size]


def cut_batch(sample: dict[str, Any], group: dist.ProcessGroup, multiple: int, padding: int) -> dict[str, Any]:
    """Return the shard of a fairseq batch that belongs to this worker.

    Args:
        sample: a batch with `net_input.src_tokens` (B, N), `nsentences` and an optional `target`. It is not modified.
        group: the workers that share the batch.
        multiple: see `shard_bounds`.
        padding: the id of the padding symbol.

    Returns:
        A batch with this worker's part of src_tokens, a `Shard` in `net_input`, and the number of its real tokens in
        `ntokens`. A target of shape (B, N) is cut like the tokens. A target of another shape belongs to sentences: the
        worker with the first token keeps it and `nsentences`; the remaining workers get 0 rows and nsentences = 0.
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
    """Return the number of the first shard that contains tokens, or 0 if there are no tokens at all."""
    for rank, (start, end) in enumerate(bounds):
        if start < end:
            return rank
    return 0
