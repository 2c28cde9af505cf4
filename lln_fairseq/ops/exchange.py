"""Exchanges between workers that share sequences: each holds consecutive tokens of them, in the order of ranks.

LLN attention needs the other workers' tokens only as sums over the tokens. For G = B H heads of dimension D, a worker
sends

    moments    (2, 3, B, H)      all-reduce    Σ 1, Σ x, Σ x² of q and of k, if α and β are matched to them
    forward    (G, D + 2, D)     all-gather    max_j β k_j, Σ_j e^(β k_j - max), and the state S = Wᵀ v of its keys
    backward   (G, D + 1, D)     all-reduce    dS = Aᵀ do and g (see backends/pytorch/lln.py) of its queries

The size does not depend on the number of tokens (as in LASP-2, arXiv 2502.07563, whose states have no normalizer).
The moments are float64, the rest is float32 (float64 for float64 inputs). Block-diagonal attention needs no exchange
as long as no block lies on two workers.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class WorkerLost(dist.DistNetworkError):
    """An exchange failed: another worker has ended, or does not answer within the timeout."""


class Exchange:
    """Combines this worker's sums with those of its process group, whose workers must all make the same calls."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.workers = dist.get_world_size(group)

    def sum(self, *tensors: Tensor) -> list[Tensor]:
        """Return each tensor summed over the workers.

        The tensors have one dtype and any shapes, the same on all workers. They are not changed.
        """
        packed = torch.cat([x.flatten() for x in tensors])
        self._call(dist.all_reduce, packed)
        parts = packed.split([x.numel() for x in tensors])
        return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]

    def merge_states(self, maximum: Tensor, total: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Merge the sums over this worker's keys with those of the other workers' keys.

        Args:
            maximum: t = max_j β k_j over the worker's real keys, (..., D).
            total: Σ_j e^(β k_j - t), (..., D). If it is 0, the worker has no real key, and `maximum` is ignored.
            state: Wᵀ v, normalized by the worker's own total, (..., D, D); finite also for a worker without a key.

        Returns: maximum, total and state over the keys of all workers; 0 if no worker has a real key.
        """
        packed = torch.cat([maximum[..., None, :], total[..., None, :], state], dim=-2).contiguous()
        gathered = packed.new_empty(self.workers, *packed.shape)
        self._call(dist.all_gather, list(gathered), packed)
        totals = gathered[..., 1, :]
        states = gathered[..., 2:, :]
        maxima = gathered[..., 0, :].masked_fill(totals == 0, -math.inf)
        maximum = maxima.amax(dim=0).nan_to_num(neginf=0.0)
        weights = totals * (maxima - maximum).exp()
        total = weights.sum(dim=0)
        weights = weights / total.masked_fill(total == 0, 1.0)
        return maximum, total, (weights[..., None] * states).sum(dim=0)

    def _call(self, collective: Callable, *tensors: Any) -> None:
        """Call a collective of torch.distributed, which may fill the tensors; raise WorkerLost if it fails."""
        try:
            collective(*tensors, group=self.group)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise WorkerLost(
                "the exchange with the workers that hold the same sequences failed. "
                f"Look at their logs: one of them may have ended. {reason}"
            ) from error


def create_exchange(group: dist.ProcessGroup | None, q: Tensor, block_size: int = 1) -> Exchange | None:
    """Return the exchange for this worker's tokens.

    Returns None without a group, for a group of one worker, and for a batch without sequences or heads.

    Args:
        group: the workers that share the sequences, or None.
        q: (B, H, N, D), the queries of this worker's tokens.
        block_size: tokens in a block.

    Raises: ValueError if this worker is not in the group, or if it is not the last one and its number of tokens is not
        a multiple of block_size, so that a block would lie on two workers.
    """
    if group is None:
        return None
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"group must be a process group of torch.distributed that includes this worker, got {type(group).__name__}"
        )
    exchange = Exchange(group)
    tokens = q.shape[2]
    is_last = exchange.rank == exchange.workers - 1
    if not is_last and tokens % block_size:
        raise ValueError(
            f"worker {exchange.rank} of {exchange.workers} holds {tokens} tokens: every worker but the last must hold "
            f"a multiple of block_size = {block_size}, because a block cannot lie on two workers"
        )
    if exchange.workers == 1 or q.shape[0] * q.shape[1] == 0:
        return None
    return exchange
