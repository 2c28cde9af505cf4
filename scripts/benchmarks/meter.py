"""Measure the GPU's and the host's time of calls and their peak memory, and define the options of the benchmarks."""

import argparse
import gc
import math
import multiprocessing
import re
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch

from lln_fairseq.attention.layers import check_attention_spec
from lln_fairseq.attention.registry import parse_attention_spec
from lln_fairseq.errors import first_line
from lln_fairseq.timing import milliseconds, read_kibibytes, resident_peak
from lln_fairseq.training.malloc import disable_malloc_trim
from lln_fairseq.training.recipes import layout_names, layout_options

HOST_CALLS = 50
WARM_UPS = 3  # calls before a capture, which compile kernels and fill caches
MEMORY_LIMIT = 0.9  # of the free memory; a child process that needs more is out of memory
OUT_OF_MEMORY_MESSAGES = ("DefaultCPUAllocator", "not enough memory", "can't allocate memory", "bad_alloc")
_MACHINE_MEMORY = Path("/proc/meminfo")


def add_device_options(parser: argparse.ArgumentParser, dtypes: Iterable[str]) -> None:
    """Add the options --device, --dtype, --no-memory and --json to a parser.

    args.dtype is None by default. args.memory is True by default, and --no-memory sets it to False.
    """
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=dtypes, help="default: %(default)s")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="do not measure the peak memory")
    parser.add_argument("--json", type=output_file, help="write the results to this file")


def output_file(text: str) -> Path:
    """Return the path of a file to write, as a `type` of argparse.

    A missing directory is reported before a long measurement, not after it.
    """
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"no such directory: {path.parent}")
    return path


def attention_argument(text: str) -> str:
    """Return the spec of a mechanism that can be built, as a `type` of argparse."""
    try:
        check_attention_spec(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def model_argument(text: str) -> str:
    """Return the name of a layout, or what attention_argument returns."""
    return text if text in layout_names() else attention_argument(text)


def split_specs(text: str) -> list[str]:
    """Return the attention specs of an argument, without repetitions and unchecked."""
    # A comma before OPTION= separates the options of an attention; any other comma separates attentions.
    return list(dict.fromkeys(re.split(r",(?!\w+=)", text)))


def attention_options(name: str) -> dict[str, Any]:
    """Return RoBERTa's options for a layout or an attention spec, which may have `dropout` as one more option."""
    if name in layout_names():
        return layout_options(name)
    attention, options = parse_attention_spec(name)
    named = {"attention": attention}
    if "dropout" in options:
        named["attention_dropout"] = options.pop("dropout")
    return named | {f"{attention}_{key}": value for key, value in options.items()}


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' * (threads > 1)}"


def captured(run: Callable[[], object]) -> Callable[[], object] | None:
    """Return a function that repeats what the GPU does in `run`, without Python and launches: a replayed CUDA graph.

    Its time is the GPU's own share of a call. The result is None if `run` cannot be captured, for example because it
    reads a value back.
    """
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        for _ in range(WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError as error:
        print(f"not captured: {first_line(error)}", file=sys.stderr)
        return None
    return graph.replay


def host_milliseconds(run: Callable[[], object], calls: int = HOST_CALLS) -> float:
    """Return the host's share of one call in ms: of `calls` calls in a row that do not wait for the GPU.

    The inputs must be so small that the GPU is done before the host. The first call is not timed.
    """
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    passed = time.perf_counter() - start
    torch.cuda.synchronize()
    return 1e3 * passed / calls


def copy_bandwidth(device: str, size: int = 2**30) -> float:
    """Return the bytes per second that a copy reads and writes in total, the median of ten copies."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = [milliseconds(lambda: target.copy_(source), device) for _ in range(10)]
    return 2 * size / (1e-3 * statistics.median(times))


class OutOfMemory(Exception):
    """A measured call needs more memory than is available."""


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """Compute function(*arguments) in a new process, whose memory nothing else has used, and return the result.

    The process is forked from a server that has only imported torch and the attentions. The function, its arguments and
    its result must be picklable. The function's exceptions are raised here. OutOfMemory is raised if memory runs out,
    or if the process is killed: Linux kills a process when no memory is left.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "lln_fairseq.attention"])
    try:
        with ProcessPoolExecutor(1, context, disable_malloc_trim) as pool:
            return pool.submit(_with_limited_memory, function, arguments).result()
    except BrokenProcessPool:
        raise OutOfMemory from None
    except MemoryError:
        raise OutOfMemory from None
    except RuntimeError as error:
        if any(message in str(error) for message in OUT_OF_MEMORY_MESSAGES):
            raise OutOfMemory from None
        raise


def _with_limited_memory(function: Callable[..., Any], arguments: tuple) -> Any:
    """Return function(*arguments). On Linux, first limit the memory of this process for the rest of its life.

    An allocation beyond the limit raises an exception. Without the limit, Linux would kill this or another process.
    """
    if _MACHINE_MEMORY.exists():
        available = read_kibibytes("MemAvailable", _MACHINE_MEMORY)
        limit = 1024 * (read_kibibytes("VmData") + int(MEMORY_LIMIT * available))
        _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard_limit))
    return function(*arguments)


def peak_memory(device: str, prepare: Callable[..., Callable[[], object]], *arguments: Any) -> int:
    """Return by how many bytes the memory of a device grows at its peak during the call that `prepare` returns.

    What `prepare` itself allocates is not counted. On "cpu", both run in a child process, and the arguments must be
    picklable. Raises OutOfMemory.
    """
    if device == "cpu":
        return in_child(resident_peak, prepare, *arguments)
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


def growth(points: Sequence[tuple[int, float]]) -> float | None:
    """Return the exponent p of time ~ length^p between the shortest and the longest of (length, time), None for one."""
    first, first_time = min(points)
    last, last_time = max(points)
    if first == last:
        return None
    return math.log(last_time / first_time) / math.log(last / first)
