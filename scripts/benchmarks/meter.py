"""What the benchmarks share: one call's time, interleaved repeats, peak memory, options."""

import argparse
import contextlib
import ctypes
import functools
import gc
import math
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lln_fairseq.training.malloc import disable_malloc_trim
from scripts.terminal import output_file

MAX_SECONDS = 20.0
MIN_REPEATS = 3  # of what takes longer
MEMORY_SHARE = 0.9  # of what is free: a process that takes more is out of memory
OUT_OF_MEMORY = ("DefaultCPUAllocator", "not enough memory", "can't allocate memory", "bad_alloc")
_STATUS, _CLEAR, _MACHINE = Path("/proc/self/status"), Path("/proc/self/clear_refs"), Path("/proc/meminfo")
_Key = TypeVar("_Key", bound=Hashable)


def add_device_options(parser: argparse.ArgumentParser, dtypes: Iterable[str]) -> None:
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=dtypes, help="default: %(default)s")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="skip the measurement of memory")
    parser.add_argument("--json", type=output_file, help="write the figures here")


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"CPU, {torch.get_num_threads()} threads"


class Spread(NamedTuple):
    """Median, fastest and slowest of several repeats."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))

    def text(self, digits: int = 2) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


def milliseconds(run: Callable[[], object], device: str) -> float:
    """Return the time of one call on "cpu" or "cuda", where the device's cache is overwritten before."""
    if device == "cpu":
        begin = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - begin)
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
    """Return 256 MB of GPU memory, more than any GPU's cache holds."""
    return torch.empty(2**28, dtype=torch.uint8, device="cuda")


def copy_bandwidth(device: str, size: int = 2**30) -> float:
    """Return how many bytes per second a copy of `size` bytes reads and writes."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = [milliseconds(lambda: target.copy_(source), device) for _ in range(10)]
    return 2 * size / (1e-3 * statistics.median(times))


def interleaved(runs: Mapping[_Key, Callable[[], object]], device: str, repeats: int) -> dict[_Key, list[float]]:
    """Times in ms of every run, taken in turn, repeat by repeat, so that a noisy machine slows all of them alike.

    A first round warms up. What has taken MAX_SECONDS is not repeated more than MIN_REPEATS times.
    """
    times: dict[_Key, list[float]] = {key: [] for key in runs}
    for repeat in range(repeats + 1):
        for key, run in runs.items():
            if repeat > MIN_REPEATS and sum(times[key]) > 1e3 * MAX_SECONDS:
                continue
            passed = milliseconds(run, device)
            if repeat:
                times[key].append(passed)
    return times


class OutOfMemory(Exception):
    """What was measured needs more memory than there is."""


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return function(*arguments), computed in a process of its own, whose memory nobody else has used.

    The process is forked from a server that has imported torch and done nothing else. Raises: OutOfMemory, also if the
    process was killed, as Linux does when there is no memory left; any other exception of the function.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "lln_fairseq.attention"])
    try:
        with ProcessPoolExecutor(1, context, disable_malloc_trim) as pool:
            return pool.submit(_with_limited_memory, function, arguments).result()
    except BrokenProcessPool:
        raise OutOfMemory from None
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or any(word in str(error) for word in OUT_OF_MEMORY):
            raise OutOfMemory from None
        raise


def _with_limited_memory(function: Callable[..., Any], arguments: tuple) -> Any:
    """Let this process fail with an exception, where Linux would kill it or another, when memory runs out."""
    if _MACHINE.exists():
        limit = 1024 * (_kibibytes("VmData") + int(MEMORY_SHARE * _kibibytes("MemAvailable", _MACHINE)))
        _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard_limit))
    return function(*arguments)


def resident_peak_of(run: Callable[[], object]) -> int:
    """Bytes by which the resident set of this process grew at its peak while it ran (Linux)."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)  # pages that the allocator kept would be used again and not counted
    _CLEAR.write_text("5")  # the peak starts again from here
    before = _kibibytes("VmRSS")
    run()
    return 1024 * (_kibibytes("VmHWM") - before)


def peak_memory(device: str, prepare: Callable[..., Callable[[], object]], *arguments: Any) -> int:
    """Return the bytes by which memory grows at its peak while the call that `prepare` returns runs.

    Args:
        device: "cuda", or "cpu", where a child process measures.
        prepare: returns the call that is measured; what it allocates itself is not counted.
        arguments: of `prepare`.

    Raises:
        OutOfMemory: if there is not enough memory.
    """
    if device == "cpu":
        return in_child(_prepared_resident_peak, prepare, *arguments)
    try:
        run = prepare(*arguments)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
    except torch.OutOfMemoryError:
        raise OutOfMemory from None
    return torch.cuda.max_memory_allocated() - before


def _prepared_resident_peak(prepare: Callable[..., Callable[[], object]], *arguments: Any) -> int:
    return resident_peak_of(prepare(*arguments))


def can_measure_resident_peak() -> bool:
    return _CLEAR.exists()


def _kibibytes(key: str, file: Path = _STATUS) -> int:
    return int(next(line for line in file.read_text().splitlines() if line.startswith(key)).split()[1])


def growth(points: Sequence[tuple[int, float]]) -> float | None:
    """Return the exponent p of time ~ length^p between the shortest and the longest of (length, time)."""
    (first, first_time), (last, last_time) = min(points), max(points)
    if first == last:
        return None
    return math.log(last_time / first_time) / math.log(last / first)


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    """√(mean (actual - expected)² / mean expected²) in float64."""
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).square().mean() / expected.square().mean()).sqrt().item()
