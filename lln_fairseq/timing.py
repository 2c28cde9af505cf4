"""Measure the time of calls on a CPU or GPU, and the memory that they need."""

import contextlib
import ctypes
import functools
import gc
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

MAX_SECONDS = 20.0  # a call whose repeats took longer in total is not repeated more than MIN_REPEATS times
MIN_REPEATS = 3
PROCESS_STATUS = Path("/proc/self/status")
_RESET_PEAK = Path("/proc/self/clear_refs")
_Key = TypeVar("_Key", bound=Hashable)


class Spread(NamedTuple):
    """The median, the smallest and the largest of several measured values."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))

    def text(self, digits: int = 2) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


def milliseconds(run: Callable[[], object], device: str) -> float:
    """Return the time of one call in ms on the device "cpu" or "cuda".

    On a GPU, the cache of the GPU is overwritten before the call, and the call has ended when this function returns.
    """
    if device == "cpu":
        start_seconds = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start_seconds)
    cache_sized_buffer().zero_()
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


@functools.cache
def cache_sized_buffer() -> Tensor:
    """Return a buffer of 256 MB on the GPU, larger than the cache of any GPU. Every call returns the same buffer."""
    return torch.empty(2**28, dtype=torch.uint8, device="cuda")


def interleaved(runs: Mapping[_Key, Callable[[], object]], device: str, repeats: int) -> dict[_Key, list[float]]:
    """Return the times in ms of every function in `runs`, by its key.

    The functions are called in turn, repeat by repeat, so that a noisy machine slows all of them alike. A first round
    is not timed. After MIN_REPEATS repeats, a function is not called again if its calls have taken more than
    MAX_SECONDS in total. So its list can have fewer than `repeats` times.
    """
    times: dict[_Key, list[float]] = {key: [] for key in runs}
    for repeat in range(repeats + 1):
        for key, run in runs.items():
            if repeat > MIN_REPEATS and sum(times[key]) > 1e3 * MAX_SECONDS:
                continue
            passed = milliseconds(run, device)
            if repeat > 0:
                times[key].append(passed)
    return times


def resident_peak(prepare: Callable[..., Callable[[], object]], *arguments: Any) -> int:
    """Return how many bytes the resident set of this process grows at its peak during the call that `prepare` returns.

    This needs Linux.
    """
    run = prepare(*arguments)
    gc.collect()
    with contextlib.suppress(AttributeError):  # the C library is not glibc
        # Pages that the allocator kept would be used again, and would not be counted.
        ctypes.CDLL(None).malloc_trim(0)
    _RESET_PEAK.write_text("5")
    before = read_kibibytes("VmRSS")
    run()
    return 1024 * (read_kibibytes("VmHWM") - before)


def can_measure_resident_peak() -> bool:
    """Return True on Linux, which can reset the peak of the resident set."""
    return _RESET_PEAK.exists()


def read_kibibytes(key: str, file: Path = PROCESS_STATUS) -> int:
    """Return the number in the first line of a file in /proc that starts with the key."""
    for line in file.read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1])
    raise ValueError(f"{file} has no line that starts with {key}")
