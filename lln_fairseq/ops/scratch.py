"""Scratch memory for computing heads in groups that fit the cache, with the same buffers for every group.

On a CPU, a new tensor of 50 MB costs about 18 ms of page faults, more than most operations on it, and every new tensor
adds to the peak memory. One set of small buffers avoids both. On a CPU, each thread keeps its buffers between calls.
"""

import threading
from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from lln_fairseq.ops.dtypes import compute_dtype

# The bytes of one scratch tensor of a group. A few of them must fit a CPU's last-level cache together; other devices
# want few launches.
GROUP_BYTES = {"cpu": 4 << 20}
GROUP_BYTES_ELSEWHERE = 256 << 20


def head_groups(heads: int, elements_per_head: int, like: Tensor) -> Iterator[slice]:
    """Yield consecutive slices of range(heads) such that one scratch tensor of a group has at most GROUP_BYTES.

    A group has at least one head, even if that head needs more. The dtype and device are those of `like`.
    """
    budget = GROUP_BYTES.get(like.device.type, GROUP_BYTES_ELSEWHERE)
    size = max(1, budget // max(1, elements_per_head * compute_dtype(like.dtype).itemsize))
    for start in range(0, heads, size):
        yield slice(start, min(start + size, heads))


_THREAD = threading.local()


def reused_buffers(dtype: torch.dtype) -> dict[str, Tensor]:
    """Return this thread's CPU buffers of a dtype, by name. The caller may add and replace buffers.

    They are kept for later calls: a handful of vectors, usually of about GROUP_BYTES each.
    """
    return vars(_THREAD).setdefault(str(dtype), {})


def forget_scratch() -> None:
    """Free this thread's buffers of all dtypes."""
    vars(_THREAD).clear()


class Scratch:
    """Named buffers in the compute dtype of `like`, on its device.

    A name refers to the same memory for all shapes, so reusing a name overwrites the earlier contents.
    Inputs and results of a group are (G, N, D), and their buffers (G, length, D).
    """

    def __init__(self, like: Tensor, length: int) -> None:
        """length: N rounded up to whole blocks."""
        self.dtype = compute_dtype(like.dtype)
        self.device = like.device
        self.length = length
        self._buffers: dict[str, Tensor] = {}
        if like.device.type == "cpu":  # on other devices, torch's allocator keeps the memory
            self._buffers = reused_buffers(self.dtype)

    def __call__(self, name: str, *shape: int) -> Tensor:
        """Return the buffer `name`, uninitialized, as a contiguous tensor of this shape. Enlarge it if necessary."""
        numel = prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < numel:
            with torch.inference_mode(False):  # a buffer made in inference mode could not be used outside it
                buffer = torch.empty(numel, dtype=self.dtype, device=self.device)
            self._buffers[name] = buffer
        return buffer[:numel].view(shape)

    def load(self, name: str, x: Tensor) -> Tensor:
        """Return x (G, N, D) as a contiguous (G, length, D) in the compute dtype.

        This is x itself if it is one already, otherwise a copy in the buffer `name`, 0 beyond N.
        """
        if self._is_usable(x):
            return x
        copy = self._buffer_for(name, x)
        copy[:, : x.shape[1]] = x
        copy[:, x.shape[1] :] = 0
        return copy

    def target(self, name: str, x: Tensor) -> Tensor:
        """Return the memory in which to compute the values of x (G, N, D): x itself, or the buffer `name`.

        It is contiguous, (G, length, D) in the compute dtype. Call `store` afterwards.
        """
        if self._is_usable(x):
            return x
        return self._buffer_for(name, x)

    @staticmethod
    def store(result: Tensor, x: Tensor) -> None:
        """Copy a result from the memory that `target` returned for x to x, unless that memory is x itself."""
        if result.data_ptr() != x.data_ptr():
            x.copy_(result[:, : x.shape[1]])

    def _buffer_for(self, name: str, x: Tensor) -> Tensor:
        """Return the buffer `name` as (G, length, D) for x (G, N, D)."""
        return self(name, x.shape[0], self.length, x.shape[2])

    def _is_usable(self, x: Tensor) -> bool:
        """Return True if x can be computed with in place."""
        return x.dtype == self.dtype and x.is_contiguous() and x.shape[1] == self.length
