"""Cut batches such that several workers hold one sequence together: which worker holds which tokens.

Groups of S neighbouring workers get the same batch. Each cuts its own consecutive tokens out of it, after the masking,
and counts its own tokens, masked tokens and sentences in the losses and scores, which fairseq adds up over all workers.
"""

from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

PATIENCE = timedelta(minutes=10)  # for a worker that does not answer; one that ends is noticed at once


class Shard(NamedTuple):
    """What a model must know about its tokens if they are only a part of their sequences."""

    group: dist.ProcessGroup  # the workers that hold the sequences together
    positions: Tensor  # (B, n), rows of the positional table
    has_first: bool  # whether it holds the first token of the sequences


def bounds(tokens: int, workers: int, multiple: int = 1) -> list[tuple[int, int]]:
    """Return the first token of each worker's part, and the one after its last.

    Parts are whole multiples, as evenly as they can be; what is left over goes to the last worker, as block-diagonal
    attention needs it. Parts may be empty.
    """
    whole = tokens // multiple
    starts = [multiple * -(-whole * rank // workers) for rank in range(workers)]
    return list(zip(starts, [*starts[1:], tokens], strict=True))


def neighbours(size: int) -> dist.ProcessGroup:
    """Return the group of `size` neighbouring workers that this one is in. All workers must call it.

    Raises: ValueError if the workers cannot be divided so.
    """
    workers = dist.get_world_size()
    if workers % size:
        raise ValueError(f"{workers} workers cannot share sequences in groups of {size}")
    groups = [dist.new_group(range(start, start + size), timeout=PATIENCE) for start in range(0, workers, size)]
    return groups[dist.get_rank() // size]


def cut_batch(sample: dict[str, Any], group: dist.ProcessGroup, multiple: int, padding: int) -> dict[str, Any]:
    """Return this worker's part of a fairseq batch, with a Shard in its `net_input`.

    src_tokens (B, N) and a target (B, N) are cut. A target of sentences, and the number of sentences, belong to the
    worker that holds the first token.
    """
    tokens = sample["net_input"]["src_tokens"]
    rank = dist.get_rank(group)
    parts = bounds(tokens.shape[1], dist.get_world_size(group), multiple)
    here = slice(*parts[rank])
    has_first = rank == next((owner for owner, (start, end) in enumerate(parts) if start < end), 0)
    real = tokens.ne(padding)
    positions = real.cumsum(dim=1) * real + padding  # as fairseq counts them
    shard = Shard(group, positions[:, here], has_first)
    cut = {
        **sample,
        "net_input": {**sample["net_input"], "src_tokens": tokens[:, here].contiguous(), "shard": shard},
        "ntokens": int(real[:, here].sum()),
        "nsentences": sample["nsentences"] if has_first else 0,
    }
    if "target" in sample:
        target = sample["target"]
        if target.shape == tokens.shape:
            cut["target"] = target[:, here].contiguous()
        elif not has_first:
            cut["target"] = target[:0]
    return cut
