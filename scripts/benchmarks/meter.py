"""What the benchmarks share: one call's time, interleaved repeats, memory in a child process, figures on log axes."""

import argparse
import contextlib
import ctypes
import functools
import gc
import multiprocessing
import resource
import signal
import statistics
import textwrap
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lln_fairseq.training.malloc import disable_malloc_trim

MIN_REPEATS = 3  # of what takes longer than the limit
MEMORY_SHARE = 0.9  # of what is free: a process that takes more is out of memory
_STATUS, _CLEAR, _MACHINE = Path("/proc/self/status"), Path("/proc/self/clear_refs"), Path("/proc/meminfo")
_Key = TypeVar("_Key", bound=Hashable)


def check_outputs(parser: argparse.ArgumentParser, *paths: Path | None) -> None:
    """Ends with a message if a file cannot be put where it is wanted: better before measuring than after."""
    for path in paths:
        if path and not path.parent.is_dir():
            parser.error(f"no such directory: {path.parent}")


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


def interleaved(runs: Mapping[_Key, Callable[[], object]], device: str, repeats: int,
                seconds: float) -> dict[_Key, list[float]]:  # fmt: skip
    """Times in ms of every run, taken in turn, repeat by repeat, so that a noisy machine slows all of them alike.

    A first round warms up. What has taken `seconds` is not repeated more than MIN_REPEATS times.
    """
    times: dict[_Key, list[float]] = {key: [] for key in runs}
    for repeat in range(repeats + 1):
        for key, run in runs.items():
            if repeat > MIN_REPEATS and sum(times[key]) > 1e3 * seconds:
                continue
            passed = milliseconds(run, device)
            if repeat:
                times[key].append(passed)
    return times


class OutOfMemory(Exception):
    """What was measured needs more memory than there is."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that torch, on either device, or Python could not get memory."""
    words = ("DefaultCPUAllocator", "not enough memory", "can't allocate memory", "bad_alloc")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(word in str(error) for word in words)


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments) in a process of its own, whose memory nobody else has used.

    The process is forked from a server that has imported torch and fairseq and done nothing else: it starts in an
    instant. Raises: OutOfMemory; RuntimeError for any other exception of the function, with its message.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "lln_fairseq.attention"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        result, problem = receiver.recv()
    except EOFError:
        process.join()
        killed = process.exitcode == -signal.SIGKILL  # as Linux does when there is no memory left
        result, problem = None, OutOfMemory() if killed else RuntimeError(f"exit code {process.exitcode}")
    process.join()
    if problem is not None:
        raise problem
    return result


def _child(sender: Connection, function: Callable[..., Any], arguments: tuple) -> None:
    disable_malloc_trim()
    try:
        with limited_memory():
            sender.send((function(*arguments), None))
    except BaseException as error:
        failed = f"{function.__name__} failed: {type(error).__name__}: {error}"
        sender.send((None, OutOfMemory() if is_out_of_memory(error) else RuntimeError(failed)))


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """Lets this process fail with an exception, where Linux would kill it or another, when memory runs out."""
    if not _MACHINE.exists():
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit = 1024 * (_kibibytes("VmData") + int(MEMORY_SHARE * _kibibytes("MemAvailable", _MACHINE)))
    resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def resident_peak_of(run: Callable[[], object]) -> int:
    """Bytes by which the resident set of this process grew at its peak while it ran (Linux)."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)  # pages that the allocator kept would be used again and not counted
    _CLEAR.write_text("5")  # the peak starts again from here
    before = _kibibytes("VmRSS")
    run()
    return 1024 * (_kibibytes("VmHWM") - before)


def can_measure_resident_peak() -> bool:
    return _CLEAR.exists()


def _kibibytes(key: str, file: Path = _STATUS) -> int:
    return int(next(line for line in file.read_text().splitlines() if line.startswith(key)).split()[1])


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    """√(mean (actual - expected)² / mean expected²) in float64."""
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).square().mean() / expected.square().mean()).sqrt().item()


def draw_by_length(
    path: Path,
    title: str,
    panels: Sequence[str],
    names: Sequence[str],
    points: Callable[[str, str], list[tuple[int, float]]],
    bold: Sequence[str] = (),
) -> None:
    """Draw a panel for each axis label with a line for each name; `points(name, panel)` returns (length, value)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (5 * len(panels) + 1.5, 4.8)
    figure, axes = plt.subplots(1, len(panels), figsize=size, constrained_layout=True, squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        lengths: set[int] = set()
        for number, name in enumerate(names):
            if line := points(name, panel):
                lengths.update(length for length, _ in line)
                axis.loglog(*zip(*line, strict=True), label=name, **_style(number, name in bold))
        axis.set(xlabel="sequence length N [tokens]", ylabel=panel)
        axis.set_xticks(sorted(lengths), list(map(str, sorted(lengths))))
        axis.set_xticks([], minor=True)
        axis.grid(True, which="major", alpha=0.3)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), fontsize=8, loc="outside right center")
    figure.suptitle(textwrap.fill(title, 30 * len(panels) + 10), fontsize=10)
    figure.savefig(path, format="png", dpi=120)
    plt.close(figure)


def _style(number: int, bold: bool) -> dict[str, Any]:
    """Ten colours, then the same with other lines and markers."""
    turn, width = number // 10 % 3, 3.0 if bold else 1.2
    lines = {"marker": "os^"[turn], "linestyle": ("-", "--", ":")[turn], "markersize": 4, "linewidth": width}
    return {"color": f"C{number % 10}", **lines}
