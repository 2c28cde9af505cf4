"""Hybrid attention and moment matching on a CPU: the Python side of the C kernels in csrc/.

The kernels pass over the tokens two or three times, whereas PyTorch needs a dozen passes. They read tensors of any
layout with contiguous features. Tensors in half precision are converted to float32 before a call, and the results back
after it. The first use needs a C compiler. If the kernels cannot run, `choose_backend` selects the backend "torch"
instead.
"""

import ctypes
import functools
import logging
import os
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lln_fairseq.ops import formula
from lln_fairseq.ops.backends import keep_threshold
from lln_fairseq.ops.backends.cpu.compile import CannotCompile, load_library
from lln_fairseq.ops.dispatch import fresh_result
from lln_fairseq.ops.formula import DIAG, JOINT, LLN, WEIGHTS, Inputs, Spec
from lln_fairseq.ops.moment_matching import calibration_table

SOURCE = Path(__file__).with_name("csrc") / "attention.c"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEAD_DIMS = range(16, 257, 16)
CONSTANTS = {name: getattr(formula, name) for name in ("FLOOR", "PADDED_QUERY_LIMIT", "MIN_SIGMA", "LOG_SIGMA2_LIMIT")}
MAX_BLOCK_SIZE = 256
ROW_MULTIPLE = 16  # MULTIPLE in csrc/tiles.h
TILE_SIZE = 64  # tokens per tile for a call without blocks; otherwise a tile is a block
NUM_LOG_SUM_ROWS = 3  # of the states, after the D rows of S: L, and the maximum and the sum from which L is computed
# The rows of global tokens are computed in parts of PART_TOKENS keys, or of more, so that there are at most MAX_PARTS.
PART_TOKENS = 1024
MAX_PARTS = 64

THREAD = threading.local()  # its attribute `scratch` is the scratch memory of all calls from a Python thread

logger = logging.getLogger(__name__)

VIEWS = ("q", "k", "v", "out", "grad_q", "grad_k", "grad_v")
POINTERS = ("padding", "alpha", "beta", "states", "grad_alpha", "grad_beta", "offset", "grad_offset")
# The fields of the struct `problem` in csrc/problem.h, in the same order: (format in Python's module struct, name). All
# fields are packed at once, because Python takes a tenth of the time of a call for 512 tokens.
FIELDS = [
    *(("q", name) for name in ("batches", "heads", "tokens", "tile_size", "threads")),
    *(("q", name) for name in ("keep_threshold", "joint", "max_global", "reach", "band")),
    ("Q", "seed"),
    ("d", "lln_weight"),
    ("d", "diag_weight"),
    *(("P", name) for name in POINTERS),
    ("P", "global_tokens"),
    *(("q", name) for name in ("parts", "part_tokens")),
    *(("P", name) for name in ("rows", "row_stats", "row_parts")),
    ("P", "scratch"),
    ("P", "calibration.x"),
    ("P", "calibration.y"),
    ("q", "calibration.points"),
]
for _view in VIEWS:
    FIELDS += [("P", f"{_view}.data"), ("q", f"{_view}.batch"), ("q", f"{_view}.head"), ("q", f"{_view}.token")]
_PROBLEM = struct.Struct("".join(kind for kind, _ in FIELDS))


def reason_against(spec: Spec, q: Tensor) -> str | None:
    """See `Backend.reason_against`. The first call for a D compiles the kernels, or loads them from the cache."""
    if q.device.type != "cpu" or q.dtype not in DTYPES:
        return f"The CPU kernels support float32, bfloat16 and float16 on a CPU, not {q.dtype} on {q.device.type}."
    if q.shape[-1] not in HEAD_DIMS:
        return f"The CPU kernels support head dims that are multiples of 16 up to 256, not {q.shape[-1]}."
    if spec.form != LLN and spec.block_size > MAX_BLOCK_SIZE:
        return f"The CPU kernels support blocks of up to {MAX_BLOCK_SIZE} tokens, not {spec.block_size}."
    library = _load_kernels(q.shape[-1])
    return library if isinstance(library, str) else None


@functools.cache
def _load_kernels(dim: int) -> ctypes.CDLL | str:
    """Return the library of the kernels for a head dimension, or a sentence that says why it cannot be compiled.

    The result is cached, so that a failure is logged only once, as a warning.
    """
    try:
        library = load_library(SOURCE, D=dim, **CONSTANTS)
    except CannotCompile as error:
        logger.warning("attention on this CPU runs in PyTorch, at about half the speed: %s", error)
        return f"They could not be compiled: {error}."
    library.scratch_floats.argtypes = [ctypes.c_int64] * 3
    library.scratch_floats.restype = ctypes.c_int64
    return library


@functools.cache
def _scratch_floats(dim: int, tile_size: int, reach: int, max_global: int) -> int:
    """Return the number of floats of scratch memory that one thread needs."""
    library = _load_kernels(dim)
    assert isinstance(library, ctypes.CDLL)  # reason_against has been asked before
    return library.scratch_floats(tile_size, reach, max_global)


_threads_started = False  # True once a kernel has used several threads, in this process or the one it was forked from


def _use_one_thread_after_fork() -> None:
    """Set torch's number of threads to 1 in a forked child process if kernels of the parent have started threads.

    The threads of OpenMP do not survive a fork. A kernel or an operation of torch that waited for them would hang.
    """
    if _threads_started:
        torch.set_num_threads(1)


os.register_at_fork(after_in_child=_use_one_thread_after_fork)


def _call_kernel(
    function: str,
    spec: Spec,
    views: Sequence[Tensor],
    pointers: Sequence[Tensor | None],
    inputs: Inputs,
    saved_rows: Sequence[Tensor] = (),
    table: Sequence[Tensor] | None = None,
) -> None:
    """Call a function of csrc/attention.c. It writes its results into tensors among `views` and `pointers`.

    Args:
        function: the name of the function, such as "forward".
        spec: the settings of the call.
        views: tensors (B, H, N, D) with contiguous features, in the order of VIEWS. Trailing tensors may be missing.
        pointers: tensors or None, in the order of POINTERS. Trailing tensors may be missing. The kernel reads
            contiguous copies of tensors that are not contiguous.
        inputs: the inputs of the call, for the number of global tokens and the seed.
        saved_rows: the result of `_empty_rows`, if there are global tokens.
        table: the calibration table with which the kernel computes α and β, or None if α and β are inputs.
    """
    global _threads_started
    batch, heads, tokens, dim = views[0].shape
    tile_size = TILE_SIZE if spec.form == LLN else max(1, min(spec.block_size, tokens))
    reach = spec.neighbors * tile_size
    band = -1
    if spec.band is not None:
        band = min(spec.band, tokens)
        reach = band
    threads = torch.get_num_threads()
    _threads_started |= threads > 1
    floats = threads * _scratch_floats(dim, tile_size, reach, spec.max_global)
    scratch = getattr(THREAD, "scratch", None)
    if scratch is None or scratch.numel() < floats:
        scratch = torch.empty(floats, dtype=torch.float32, device="cpu")
        THREAD.scratch = scratch
    threshold = 0
    seed = 0
    if spec.dropout:
        threshold = keep_threshold(spec.dropout)
        seed = int(inputs.seed)  # type: ignore[arg-type]
    values: list[float] = [batch, heads, tokens, tile_size, threads]
    values += [threshold, spec.form == JOINT, spec.max_global, reach, band, seed, *WEIGHTS[spec.form]]
    copies = []  # stay alive until the call ends
    for x in pointers:
        if x is None:
            values.append(0)
        else:
            x = x.contiguous()
            copies.append(x)
            values.append(x.data_ptr())
    values += [0] * (len(POINTERS) - len(pointers))
    if inputs.global_counts is None:
        values += 6 * [0]
    else:
        part_tokens = max(PART_TOKENS, -(-tokens // MAX_PARTS))
        parts = -(-tokens // part_tokens)
        rows = -(-spec.max_global // ROW_MULTIPLE) * ROW_MULTIPLE
        row_parts = torch.empty(batch * heads * parts * rows * (dim + 2), dtype=torch.float32, device="cpu")
        values += [inputs.global_counts.data_ptr(), parts, part_tokens]
        values += [x.data_ptr() for x in (*saved_rows, row_parts)]
    values.append(scratch.data_ptr())
    if table is None:
        values += [0, 0, 0]
    else:
        values += [table[0].data_ptr(), table[1].data_ptr(), len(table[0])]
    for x in views:
        values += [x.data_ptr(), *x.stride()[:3]]
    values += [0] * (4 * (len(VIEWS) - len(views)))
    getattr(_load_kernels(dim), function)(_PROBLEM.pack(*values))


def _with_contiguous_features(x: Tensor) -> Tensor:
    """Return x if its last dimension has stride 1, otherwise a contiguous copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _readable(x: Tensor) -> Tensor:
    """Return x in float32 and with contiguous features, as the kernels read it; x itself if it is so already."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    return x.float()


def allocate(spec: Spec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """See `Backend.allocate`."""
    results = [fresh_result(_with_contiguous_features(x)) for x in (q, k, v)]
    rows = _empty_rows(spec, q) if spec.max_global else ()
    return results, (*_empty_states(spec, q), *rows)


def _empty_states(spec: Spec, q: Tensor) -> Sequence[Tensor]:
    """Return an uninitialized tensor for the states of all heads, (B, H, D + 3, D); none without LLN.

    The rows are S (D rows), L, and the maximum and the sum from which L is computed.
    """
    if spec.form == DIAG:
        return ()
    batch, heads, _, dim = q.shape
    return (q.new_empty(batch, heads, dim + NUM_LOG_SUM_ROWS, dim, dtype=torch.float32),)


def _empty_rows(spec: Spec, q: Tensor) -> Sequence[Tensor]:
    """Return uninitialized tensors for what is saved of the rows of global tokens.

    They are the rows of the output, (B, H, max_global, D), and the two statistics of their softmax,
    (B, H, 2, max_global).
    """
    batch, heads, _, dim = q.shape
    rows = q.new_empty(batch, heads, spec.max_global, dim, dtype=torch.float32)
    return rows, q.new_empty(batch, heads, 2, spec.max_global, dtype=torch.float32)


def forward(spec: Spec, inputs: Inputs) -> tuple[Tensor, Tensor | None, Tensor | None, Sequence[Tensor]]:
    """See `Backend.forward`. The kernel matches the moments of each head right before its attention."""
    q = _readable(inputs.q)
    k = _readable(inputs.k)
    v = _readable(inputs.v)
    alpha = inputs.alpha
    beta = inputs.beta
    table = None
    if spec.form != DIAG and inputs.alpha is None:
        alpha = q.new_empty(q.shape[:2])
        beta = q.new_empty(q.shape[:2])
        table = calibration_table(q.shape[3])
    out = fresh_result(q)
    states = _empty_states(spec, q)
    rows = _empty_rows(spec, q) if spec.max_global else ()
    views = (q, k, v, out)
    pointers = (inputs.padding, alpha, beta, states[0] if states else None, None, None, inputs.offset)
    _call_kernel("forward", spec, views, pointers, inputs, rows, table)
    return out.to(inputs.q.dtype), alpha, beta, (*states, *rows)


def backward(
    spec: Spec,
    inputs: Inputs,
    saved: Sequence[Tensor],
    grad: Tensor,
    needed: Sequence[bool],
) -> Sequence[Tensor | None]:
    """See `Backend.backward`."""
    dtype = inputs.q.dtype
    views = [_readable(x) for x in (inputs.q, inputs.k, inputs.v, grad)]
    grads = [fresh_result(x) for x in views[:3]]
    grad_scalars = [views[0].new_empty(views[0].shape[:2]) if is_needed else None for is_needed in needed]
    grad_alpha, grad_beta, grad_offset = grad_scalars
    states = None
    if spec.form != DIAG:
        states, *saved = saved
    pointers = [inputs.padding, inputs.alpha, inputs.beta, states, grad_alpha, grad_beta, inputs.offset, grad_offset]
    _call_kernel("backward", spec, [*views, *grads], pointers, inputs, saved)
    return *(x.to(dtype) for x in grads), *grad_scalars


def match_moments(q: Tensor, k: Tensor, padding: Tensor | None, table: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """See `Backend.match_moments`."""
    views = (_readable(q), _readable(k))
    alpha = views[0].new_empty(*q.shape[:2])
    beta = views[0].new_empty(*q.shape[:2])
    inputs = Inputs(q, k, k)
    _call_kernel("match_moments", Spec(LLN), views, (padding, alpha, beta), inputs, table=table)
    return alpha, beta
