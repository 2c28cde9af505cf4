"""Exchanges between the workers that share sequences.

Each worker holds consecutive tokens of every sequence, in the order of the workers' ranks. LLN attention needs only
sums over the tokens of the other workers. For G = B H heads of dimension D, a worker sends

    moments    (2, 3, B, H)      all-gather    the number of tokens, the mean and the variance, for q and for k; only
                                               if α and β are computed by moment matching
    forward    (G, D + 2, D)     all-gather    the sums over its keys: the maximum max_j β k_j of each feature,
                                               Σ_j e^(β k_j - maximum), and the state S = Wᵀ v
    backward   (G, D + 1, D)     all-reduce    the sums over its queries: dS = Aᵀ do, the gradient of the state, and
                                               g = -dL, the negated gradient of L (backends/torch.py)

The sizes do not depend on the number of tokens. LASP-2 (arXiv 2502.07563) exchanges its states in the same way, but has
no normalizer. Everything is sent in float32, or in float64 for float64 inputs.
Block-diagonal attention needs no exchange, because a block never lies on two workers.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class WorkerLost(dist.DistNetworkError):
    """An exchange failed because another worker has ended, or did not answer within the timeout."""


class Exchange:
    """Combines the sums of this worker with the sums of the other workers in its process group.

    Every method waits for the other workers: all workers of the group must make the same calls in the same order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.workers = dist.get_world_size(group)

    def sum(self, *tensors: Tensor) -> list[Tensor]:
        """Return the sum of each tensor over the workers, in the order of the arguments.

        The tensors must have the same dtype, and the same shapes on all workers. They are not changed.

        Raises: WorkerLost if another worker has ended or does not answer.
        """
        packed = torch.cat([x.flatten() for x in tensors])
        self._call(dist.all_reduce, packed)
        parts = packed.split([x.numel() for x in tensors])
        return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]

    def gather(self, x: Tensor) -> Tensor:
        """Return x of all workers, (workers, ...). It is contiguous and has the same shape on all workers."""
        gathered = x.new_empty(self.workers, *x.shape)
        self._call(dist.all_gather, list(gathered), x)
        return gathered

    def merge_states(self, maximum: Tensor, total: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Merge the sums over this worker's keys with the sums over the keys of the other workers.

        Padding keys do not count. The arguments are not changed.

        Args:
            maximum: the maximum of β k_j over the keys of this worker, (..., D). It is ignored where `total` is 0.
            total: Σ_j e^(β k_j - maximum), (..., D). It is 0 if all keys of this worker are padding.
            state: the state Wᵀ v of this worker, normalized by `total`, (..., D, D). It must be finite even if all keys
                are padding.

        Returns: the maximum, the total and the state over the keys of all workers, in the shapes of the arguments. All
            three are 0 if all keys of all workers are padding.
        Raises: WorkerLost if another worker has ended or does not answer.
        """
        packed = torch.cat([maximum[..., None, :], total[..., None, :], state], dim=-2).contiguous()
        gathered = self.gather(packed)
        totals = gathered[..., 1, :]
        states = gathered[..., 2:, :]
        maxima = gathered[..., 0, :].masked_fill(totals == 0, -math.inf)
        maximum = maxima.amax(dim=0).nan_to_num(neginf=0.0)
        weights = totals * (maxima - maximum).exp()
        total = weights.sum(dim=0)
        weights = weights / total.masked_fill(total == 0, 1.0)
        return maximum, total, (weights[..., None] * states).sum(dim=0)

    def _call(self, collective: Callable, *tensors: Any) -> None:
        """Call a collective operation of torch.distributed in this group. Raise WorkerLost if it fails.

        The tensors are the arguments of the operation, including those that it writes to.
        """
        try:
            collective(*tensors, group=self.group)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise WorkerLost(
                "the exchange with the workers that hold the same sequences failed. "
                f"Look at their logs: one of them may have ended. {reason}"
            ) from error


def create_exchange(group: dist.ProcessGroup | None, q: Tensor, block_size: int = 1) -> Exchange | None:
    """Return the exchange between this worker and the others of its group, or None if no exchange is needed.

    Args:
        group: the workers that share the sequences, or None.
        q: (B, H, N, D), the queries of this worker's tokens.
        block_size: tokens in a block; 1 if the call has no blocks.

    Returns: None if there is no group, if the group has only one worker, or if B or H is 0.
    Raises: ValueError if `group` is not a process group that includes this worker. ValueError on every worker but the
        last if its number of tokens is not a multiple of block_size, because a block would then lie on two workers.
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
