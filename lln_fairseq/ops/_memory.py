"""Memory for results and scratch; in PyTorch heads are taken in groups that fit the cache, and scratch is reused.

A fresh 50 MB tensor costs about 18 ms of page faults on a CPU, more than most operations on it, and every one of them
adds to the peak. One set of small buffers avoids both; on a CPU a thread keeps it from call to call.
"""

import ctypes
import functools
import os
import sys
import threading
from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from lln_fairseq.ops.dtypes import compute_dtype

# Bytes of one scratch tensor of a group: a few of them share a CPU's last-level cache; other devices want few launches.
GROUP_BYTES = {"cpu": 4 << 20}
GROUP_BYTES_ELSEWHERE = 256 << 20

GLIBC_KEEPS = 32 << 20  # bytes; glibc gives larger blocks back to the system as soon as they are freed
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h


def head_groups(heads: int, elements_per_head: int, like: Tensor) -> Iterator[slice]:
    """Slices of range(heads) so that one scratch tensor of a group has about GROUP_BYTES."""
    budget = GROUP_BYTES.get(like.device.type, GROUP_BYTES_ELSEWHERE)
    size = max(1, budget // max(1, elements_per_head * compute_dtype(like.dtype).itemsize))
    for start in range(0, heads, size):
        yield slice(start, min(start + size, heads))


def fresh_result(x: Tensor) -> Tensor:
    """A tensor like x, in x's own layout if features are dense in it and batch and heads one dimension, as in fairseq's
    (T, B, C)."""
    if x.device.type == "cpu" and x.nbytes > GLIBC_KEEPS:
        _keep_freed_memory()
    result = torch.empty_like(x)
    one_dimension = x.shape[0] == 1 or result.stride(0) == x.shape[1] * result.stride(1)
    if one_dimension and result.stride(-1) == 1:
        return result
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@functools.cache
def _keep_freed_memory() -> None:
    """Lets this process keep what it frees, as on a GPU: new pages under large tensors are a sixth of a training step.

    The price is memory: 3 % more at the peak where lengths stay, 17 % where they vary, and none of it is given back.
    Does nothing where the C library is not glibc, or where the environment tunes it by MALLOC_... or GLIBC_TUNABLES.
    """
    if sys.platform.startswith("linux") and not any(name.startswith(("MALLOC_", "GLIBC_T")) for name in os.environ):
        mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda option, value: 0)
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)


_THREAD = threading.local()


def kept_buffers(dtype: torch.dtype) -> dict[str, Tensor]:
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
        self._buffers: dict[str, Tensor] = kept_buffers(self.dtype) if like.device.type == "cpu" else {}

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
