"""What workers that hold a sequence together tell each other: each has consecutive tokens of it, in the order of ranks.

LLN attention sees the other tokens through two sums over them. For G = B H heads of dimension D, a worker sends

    moments    (2, 3, B, H)      all-reduce    Σ 1, Σ x, Σ x² of q and of k, where α and β are matched to them
    forward    (G, D + 2, D)     all-gather    max_j β k_j, Σ_j e^(β k_j - max), and the state S = Wᵀ v of its keys
    backward   (G, D + 1, D)     all-reduce    dS and g (backends/pytorch/lln.py) of its queries

whatever the number of tokens (LASP-2, arXiv 2502.07563, does so for states without a normaliser). The moments are
float64, the others float32 (float64 for float64 inputs). Blocks need nothing where no block lies on two workers.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class WorkerLost(dist.DistNetworkError):
    """An exchange failed: another worker has ended, or does not answer in time."""


class Exchange:
    """The exchanges of a worker with the others of its group; every worker of the group must call them alike."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.workers = group, dist.get_rank(group), dist.get_world_size(group)

    def sum(self, *tensors: Tensor) -> list[Tensor]:
        """Tensors of one dtype, each summed over the workers."""
        packed = torch.cat([x.flatten() for x in tensors])
        self._call(dist.all_reduce, packed)
        parts = packed.split([x.numel() for x in tensors])
        return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]

    def merge_states(self, top: Tensor, total: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The three of all keys from those of this worker's keys, each normalised by its own total.

        top, total (..., D), state (..., D, D). A total of 0 says that there is no real key; the result has top 0 then.
        """
        packed = torch.cat([top[..., None, :], total[..., None, :], state], dim=-2).contiguous()
        gathered = packed.new_empty(self.workers, *packed.shape)
        self._call(dist.all_gather, list(gathered), packed)
        tops, totals, states = gathered[..., 0, :], gathered[..., 1, :], gathered[..., 2:, :]
        tops = tops.masked_fill(totals == 0, -math.inf)
        top = tops.amax(dim=0).nan_to_num(neginf=0.0)
        shares = totals * (tops - top).exp()
        total = shares.sum(dim=0)
        shares = shares / total.masked_fill(total == 0, 1.0)
        return top, total, (shares[..., None] * states).sum(dim=0)

    def _call(self, collective: Callable, *tensors: Any) -> None:
        try:
            collective(*tensors, group=self.group)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise WorkerLost(
                f"no exchange with the workers that share this one's sequences, has one of them ended? {reason}"
            ) from error


def create_exchange(group: dist.ProcessGroup | None, q: Tensor, block_size: int = 1) -> Exchange | None:
    """For the tokens of this worker, q (B, H, N, D); None where nobody has anything to exchange.

    Raises: ValueError for a worker that is not in the group, or where a block would lie on two workers.
    """
    if group is None:
        return None
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"group must be a process group of torch.distributed that this worker is in, got {type(group).__name__}"
        )
    exchange, tokens = Exchange(group), q.shape[2]
    rank, workers = exchange.rank, exchange.workers
    if rank < workers - 1 and tokens % block_size:
        raise ValueError(
            f"worker {rank} of {workers} holds {tokens} tokens: all but the last must hold a multiple of block_size = "
            f"{block_size}, since a block cannot lie on two workers"
        )
    return exchange if workers > 1 and q.shape[0] * q.shape[1] > 0 else None
