"""Scratch memory: heads are taken in groups that fit the cache, and the buffers of one group serve the next.

A fresh 50 MB tensor costs about 18 ms of page faults on a CPU, more than most operations on it, and every one of them
adds to the peak. One set of small buffers avoids both; on a CPU a thread keeps it from call to call.
"""

import threading
from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from lln_fairseq.ops.dtypes import compute_dtype

# Bytes of one scratch tensor of a group: a few of them share a CPU's last-level cache; other devices want few launches.
GROUP_BYTES = {"cpu": 4 << 20}
GROUP_BYTES_ELSEWHERE = 256 << 20


def head_groups(heads: int, elements_per_head: int, like: Tensor) -> Iterator[slice]:
    """Slices of range(heads) so that one scratch tensor of a group has about GROUP_BYTES."""
    budget = GROUP_BYTES.get(like.device.type, GROUP_BYTES_ELSEWHERE)
    size = max(1, budget // max(1, elements_per_head * compute_dtype(like.dtype).itemsize))
    for start in range(0, heads, size):
        yield slice(start, min(start + size, heads))


_THREAD = threading.local()


def reused_buffers(dtype: torch.dtype) -> dict[str, Tensor]:
    """This thread's CPU buffers of a dtype by name: a handful, of about GROUP_BYTES each at the most."""
    return vars(_THREAD).setdefault(str(dtype), {})


def forget_scratch() -> None:
    """Gives this thread's buffers back."""
    vars(_THREAD).clear()


class Scratch:
    """Named buffers in the compute dtype. Asking for a name again gives the same memory, whatever the shape.

    Tensors of a group are (G, N, D); in scratch their N is rounded up to `length`, a whole number of blocks.
    """

    def __init__(self, like: Tensor, length: int) -> None:
        self.dtype, self.device, self.length = compute_dtype(like.dtype), like.device, length
        # Other devices have an allocator that keeps memory itself.
        self._buffers: dict[str, Tensor] = reused_buffers(self.dtype) if like.device.type == "cpu" else {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        numel = prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < numel:
            with torch.inference_mode(False):  # what is kept must be usable outside it too
                buffer = self._buffers[name] = torch.empty(numel, dtype=self.dtype, device=self.device)
        return buffer[:numel].view(shape)

    def load(self, name: str, x: Tensor) -> Tensor:
        """x itself where it can be used as it is, else a copy in the buffer `name`, zero beyond N."""
        if self._usable(x):
            return x
        copy = self._like(name, x)
        copy[:, : x.shape[1]] = x
        copy[:, x.shape[1] :] = 0
        return copy

    def target(self, name: str, x: Tensor) -> Tensor:
        """Where to compute what belongs into x: x itself if possible, else the buffer `name`; then call `store`."""
        return x if self._usable(x) else self._like(name, x)

    @staticmethod
    def store(result: Tensor, x: Tensor) -> None:
        """Copies a result that was computed in `target` into x, unless it is there already."""
        if result.data_ptr() != x.data_ptr():
            x.copy_(result[:, : x.shape[1]])

    def _like(self, name: str, x: Tensor) -> Tensor:
        return self(name, x.shape[0], self.length, x.shape[2])

    def _usable(self, x: Tensor) -> bool:
        return x.dtype == self.dtype and x.is_contiguous() and x.shape[1] == self.length
