"""The choice of the way in which a CPU computes linear layers.

No way is the fastest on every processor. Without VNNI instructions, for example, a product of whole numbers can take
a hundred times as long as one of float32, and with them a quarter. So every way is tried and timed once on the
processor at hand. What the user asks for, the precision, decides the error. The times decide between the ways of this
precision, and whether it is used at all.

The times are stored next to the compiled kernels, so that all runs on a machine make the same choice and give the same
bits. The environment variable LLN_LINEAR names the ways to use instead, such as "onednn,qlinear".
"""

import hashlib
import json
import logging
import math
import os
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lln_fairseq.models.packed_linear.precisions import FLOAT32, WAYS, Shape, Way
from lln_fairseq.ops.backends.cpu.compile import cpu_description, library_cache, reason_to_distrust

# The relative error of sentence vectors that docs/prediction.md reports for all-MiniLM-L6-v2.
ERRORS = {FLOAT32: 0.0, "bfloat16": 0.005, "int8": 0.05}
AUTO = "auto"
LARGEST_AUTO_ERROR = 0.02  # "auto" chooses among the precisions whose error is below this
PRECISIONS = (*ERRORS, AUTO)

ROWS = (16, 128)  # tokens of the products that are timed: a short text, and a long text or a batch
REPEATS = 5
SLOWEST = 4.0  # a way that takes this many times as long as the fastest for ROWS[0] is not timed further
MOST_COPIES = 16  # of a weight. They are multiplied in turn, as the layers of a model: its weights leave the cache
COPIED_NUMBERS = 1 << 24  # in all copies of a large weight: 64 MB of float32
TOLERANCE = 0.05  # relative error of a product; a way with a larger one does not work on this processor
INSTRUCTION_LIMITS = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY")
MARGIN = 1.03  # a precision may be this much slower than float32 for ROWS[0]

logger = logging.getLogger(__name__)


class Plan(NamedTuple):
    """The ways in which the linear layers of a model are computed.

    Attributes:
        precision: the precision of the ways, which is float32 if the requested one is not faster here.
        ways: the way of each shape of a weight.
    """

    precision: str
    ways: dict[Shape, type[Way]]


def plan_linear_layers(precision: str, shapes: Counter[Shape]) -> Plan:
    """Choose the ways in which the linear layers of a model are computed on this processor, which can take seconds.

    The requested precision, one of PRECISIONS, is used if it is faster than float32 for ROWS[1] tokens and takes at
    most MARGIN times as long for ROWS[0]. Otherwise a warning says so, and the plan has float32. "auto" stands for the
    fastest precision whose entry in ERRORS is below LARGEST_AUTO_ERROR, without a warning. If LLN_LINEAR is set,
    nothing is timed: its first way of the precision is used. `shapes` has the number of layers of each shape.

    ValueError is raised if the precision is unknown, or LLN_LINEAR names no way of it or an unknown way.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    pinned = _pinned_ways()
    if pinned:
        return _pinned_plan(precision, shapes, pinned)
    times = measured_times(list(shapes))
    totals = {name: _total_times(name, shapes, times) for name in ERRORS}
    if precision == AUTO:
        allowed = [name for name, error in ERRORS.items() if error < LARGEST_AUTO_ERROR]
        candidates = [name for name in allowed if _is_worthwhile(totals[name], totals[FLOAT32])]
        precision = min(candidates, key=lambda name: totals[name][1], default=FLOAT32)
    elif precision != FLOAT32 and not _is_worthwhile(totals[precision], totals[FLOAT32]):
        reason = "is slow or does not work" if math.inf in totals[precision] else "is not faster"
        logger.warning("%s %s on this processor: the model computes in float32", precision, reason)
        precision = FLOAT32
    ways = {shape: WAYS[_fastest_way(precision, times[shape])] for shape in shapes}
    return Plan(precision, ways)


def _pinned_ways() -> list[str]:
    """Return the names of ways in LLN_LINEAR, or an empty list. Raise ValueError for unknown names."""
    names = [name.strip() for name in os.environ.get("LLN_LINEAR", "").split(",") if name.strip()]
    for name in names:
        if name not in WAYS:
            raise ValueError(f"LLN_LINEAR must be a list of {', '.join(WAYS)}, got {name!r}")
    return names


def _pinned_plan(precision: str, shapes: Counter[Shape], names: list[str]) -> Plan:
    """Return the plan with the first named way of the precision; "auto" takes the precision of the first name."""
    if precision == AUTO:
        precision = WAYS[names[0]].precision
    for name in names:
        if WAYS[name].precision == precision:
            return Plan(precision, dict.fromkeys(shapes, WAYS[name]))
    ways = ", ".join(name for name, way in WAYS.items() if way.precision == precision)
    raise ValueError(f"LLN_LINEAR={','.join(names)} has no way of computing in {precision}: add one of {ways}")


def _is_worthwhile(times: list[float], float_times: list[float]) -> bool:
    """Return True if a precision whose products take `times` for ROWS should be used in place of float32."""
    return times[0] <= MARGIN * float_times[0] and times[1] < float_times[1]


def _total_times(precision: str, shapes: Counter[Shape], times: dict[Shape, dict[str, list[float]]]) -> list[float]:
    """Return the seconds that all linear layers take in a precision, for each number of tokens in ROWS."""
    totals = [0.0] * len(ROWS)
    for shape, count in shapes.items():
        name = _fastest_way(precision, times[shape])
        for index in range(len(ROWS)):
            totals[index] += count * times[shape][name][index]
    return totals


def _fastest_way(precision: str, times: dict[str, list[float]]) -> str:
    """Return the way of a precision whose times have the smallest product, so that both numbers of tokens count."""
    names = [name for name in times if WAYS[name].precision == precision]
    return min(names, key=lambda name: math.prod(times[name]))


def measured_times(shapes: list[Shape]) -> dict[Shape, dict[str, list[float]]]:
    """Return the seconds that each way takes for a product, for each number of tokens in ROWS.

    Shapes that have been timed before on this processor, with the same torch and number of threads, are read from the
    cache directory; the times of other shapes are measured and stored there. A way that does not work here has infinite
    times.
    """
    file = _times_file()
    stored = _read_times(file)
    missing = [shape for shape in shapes if _shape_key(shape) not in stored]
    for shape in missing:
        stored[_shape_key(shape)] = time_ways(shape)
    if missing:
        _write_times(file, stored)
    return {shape: stored[_shape_key(shape)] for shape in shapes}


def _shape_key(shape: Shape) -> str:
    out_features, in_features = shape
    return f"{in_features} to {out_features}"


def _times_file() -> Path | None:
    """Return the file of the times for the current settings, or None if there is no safe cache directory."""
    folder = library_cache()
    if folder is None or reason_to_distrust(folder):
        return None
    limits = [os.environ.get(name) for name in INSTRUCTION_LIMITS]
    settings = (cpu_description(), torch.__version__, torch.get_num_threads(), torch.backends.mkldnn.enabled, limits)
    digest = hashlib.sha256(repr((settings, ROWS, MOST_COPIES, list(WAYS))).encode()).hexdigest()[:16]
    return folder / f"linear-{digest}.json"


def _read_times(file: Path | None) -> dict[str, dict[str, list[float]]]:
    """Return the stored times of all shapes; empty if there are none or the file is damaged."""
    try:
        content = json.loads(file.read_text()) if file else {}
        for times in content.values():
            if set(times) != set(WAYS) or any(len(values) != len(ROWS) for values in times.values()):
                return {}
        return content
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _write_times(file: Path | None, times: dict[str, dict[str, list[float]]]) -> None:
    """Store the times. Without a usable directory, they are measured again in the next process."""
    if file is None:
        return
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = file.with_name(f"{file.name}.{os.getpid()}")
        temporary.write_text(json.dumps(times, indent=1) + "\n")
        temporary.replace(file)
    except OSError as error:
        logger.info("the times of linear layers are not stored: %s", error)


@torch.no_grad()
def time_ways(shape: Shape) -> dict[str, list[float]]:
    """Time a product in every way, interleaved, and return the shortest times in seconds for each number in ROWS.

    They are the means over several copies of the weight. A way that fails, or whose results are wrong, has infinite
    times. A way that is much too slow for ROWS[0], see SLOWEST, has an infinite time for ROWS[1].
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator)
    bias = torch.randn(shape[0], generator=generator)
    copies = min(MOST_COPIES, max(2, COPIED_NUMBERS // weight.numel()))
    times = {name: [math.inf] * len(ROWS) for name in WAYS}
    remaining = {}
    for name, way_class in WAYS.items():
        if working_way(way_class, weight, bias) is not None:
            remaining[name] = [way_class(weight.clone(), bias) for _ in range(copies)]
    for index, rows in enumerate(ROWS):
        x = torch.randn(rows, shape[1], generator=generator)
        for _ in range(REPEATS):
            for name, ways in remaining.items():
                start = time.perf_counter()
                for way in ways:
                    way(x)
                times[name][index] = min(times[name][index], (time.perf_counter() - start) / copies)
            fastest = min(times[name][index] for name in remaining)
            remaining = {name: ways for name, ways in remaining.items() if times[name][index] <= SLOWEST * fastest}
    return times


def working_way(way_class: type[Way], weight: Tensor, bias: Tensor) -> Way | None:
    """Return the way with this weight, or None if it raises an exception or its result is wrong."""
    x = torch.randn(ROWS[0], weight.shape[1], generator=torch.Generator().manual_seed(1))
    expected = F.linear(x, weight, bias)
    try:
        way = way_class(weight, bias)
        error = (way(x) - expected).norm() / expected.norm()
    except (RuntimeError, AttributeError, NotImplementedError) as reason:
        logger.debug("%s does not work here: %s", way_class.__name__, reason)
        return None
    return way if error < TOLERANCE else None
