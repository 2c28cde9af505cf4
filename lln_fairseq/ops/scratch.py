"""Scratch memory for computing heads in groups that fit in the cache. All groups use the same buffers.

On a CPU, a new tensor of 50 MB costs about 18 ms of page faults, more than most operations on it. Every new tensor also
adds to the peak memory. One set of small buffers avoids both. On a CPU, each thread keeps its buffers between calls.
"""

import threading
from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from lln_fairseq.ops.dtypes import compute_dtype

# The maximum size of one scratch tensor of a group, in bytes. A few such tensors must fit together in the last-level
# cache of a CPU. On other devices, large groups are faster because they need fewer launches.
GROUP_BYTES = {"cpu": 4 << 20}
GROUP_BYTES_ELSEWHERE = 256 << 20


def head_groups(heads: int, elements_per_head: int, like: Tensor) -> Iterator[slice]:
    """Divide the heads into groups, and yield a slice of range(heads) for each group.

    A group is as large as possible if a scratch tensor of the group may have at most GROUP_BYTES (GROUP_BYTES_ELSEWHERE
    if the device is not a CPU). It has at least one head, even if that head needs more memory.

    Args:
        heads: the number of heads.
        elements_per_head: the elements per head of the largest scratch tensor.
        like: a tensor with the device and dtype of the inputs. Scratch tensors have the compute dtype of this dtype.
    """
    budget = GROUP_BYTES.get(like.device.type, GROUP_BYTES_ELSEWHERE)
    size = max(1, budget // max(1, elements_per_head * compute_dtype(like.dtype).itemsize))
    for start in range(0, heads, size):
        yield slice(start, min(start + size, heads))


THREAD = threading.local()  # its attributes are the buffers of the calling thread


def reused_buffers(dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the CPU buffers of this thread for a dtype, as a dict from names to vectors.

    The caller may add and replace buffers in the dict, which is kept for later calls. It usually holds a handful of
    vectors of about GROUP_BYTES each.
    """
    return vars(THREAD).setdefault(str(dtype), {})


def forget_scratch() -> None:
    """Free this thread's buffers of all dtypes."""
    vars(THREAD).clear()


class Scratch:
    """Named buffers for computing one group of G heads after another.

    A name refers to the same memory for all shapes, so a second use of a name overwrites what the first use wrote.

    Args:
        like: a tensor with the device and dtype of the inputs. The buffers are on this device, in the compute dtype.
        length: the number of tokens in a buffer, N or more: N rounded up to a multiple of the block size.
    """

    def __init__(self, like: Tensor, length: int) -> None:
        self.dtype = compute_dtype(like.dtype)
        self.device = like.device
        self.length = length
        self._buffers: dict[str, Tensor] = {}
        if like.device.type == "cpu":  # on other devices, torch's allocator keeps the memory
            self._buffers = reused_buffers(self.dtype)

    def __call__(self, name: str, *shape: int) -> Tensor:
        """Return the memory of the buffer `name` as a contiguous tensor of this shape.

        Its contents are undefined. The buffer is created or enlarged if necessary.
        """
        numel = prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < numel:
            with torch.inference_mode(False):  # a buffer made in inference mode could not be used outside it
                buffer = torch.empty(numel, dtype=self.dtype, device=self.device)
            self._buffers[name] = buffer
        return buffer[:numel].view(shape)

    def load(self, name: str, x: Tensor) -> Tensor:
        """Return x (G, N, D) as a contiguous tensor (G, length, D) in the compute dtype.

        If x already is such a tensor, x itself is returned. Otherwise x is copied to the buffer `name`, and the tokens
        beyond N are 0.
        """
        if self._is_usable(x):
            return x
        copy = self._buffer_for(name, x)
        copy[:, : x.shape[1]] = x
        copy[:, x.shape[1] :] = 0
        return copy

    def target(self, name: str, x: Tensor) -> Tensor:
        """Return a contiguous tensor (G, length, D) in the compute dtype, to which the values of x are to be written.

        This is x (G, N, D) itself if x already is such a tensor, otherwise the buffer `name`. After writing to it, call
        `store`, which copies the values to x if necessary.
        """
        if self._is_usable(x):
            return x
        return self._buffer_for(name, x)

    @staticmethod
    def store(result: Tensor, x: Tensor) -> None:
        """Copy `result` to x, without the tokens beyond N.

        `result` is the tensor that `target` returned for x. If it is x itself, nothing is copied.
        """
        if result.data_ptr() != x.data_ptr():
            x.copy_(result[:, : x.shape[1]])

    def _buffer_for(self, name: str, x: Tensor) -> Tensor:
        """Return the buffer `name` as a tensor (G, length, D), with G and D of x (G, N, D)."""
        return self(name, x.shape[0], self.length, x.shape[2])

    def _is_usable(self, x: Tensor) -> bool:
        """Return True if x is a contiguous tensor (G, length, D) in the compute dtype, so that it needs no buffer."""
        return x.dtype == self.dtype and x.is_contiguous() and x.shape[1] == self.length
