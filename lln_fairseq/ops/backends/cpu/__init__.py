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
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lln_fairseq.ops.backends import HybridSpec
from lln_fairseq.ops.backends.cpu.compile import CannotCompile, load_library
from lln_fairseq.ops.backends.pytorch import draw_seed
from lln_fairseq.ops.exchange import Exchange
from lln_fairseq.ops.layout import fresh_result
from lln_fairseq.ops.moment_matching import calibration_table
from lln_fairseq.ops.scratch import reused_buffers

SOURCE = Path(__file__).with_name("csrc") / "attention.c"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEAD_DIMS = range(16, 257, 16)
MAX_BLOCK_SIZE = 256
TILE_SIZE = 64  # tokens per tile for a call without blocks; otherwise a tile is a block

logger = logging.getLogger(__name__)

__all__ = ["backward", "draw_seed", "empty_results", "empty_saved", "forward", "is_supported", "match_moments"]


VIEWS = ("q", "k", "v", "out", "grad_q", "grad_k", "grad_v")
POINTERS = ("padding", "alpha", "beta", "states", "grad_alpha", "grad_beta", "offset", "grad_offset", "exchanged")
# The fields of the struct `problem` in csrc/problem.h, in the same order: (format in Python's module struct, name). All
# fields are packed at once, because Python takes a tenth of the time of a call for 512 tokens.
FIELDS = [
    *(("q", name) for name in ("batches", "heads", "tokens", "tile_size", "threads")),
    *(("q", name) for name in ("state_rows", "keep_threshold", "joint", "max_global")),
    ("Q", "seed"),
    ("d", "lln_weight"),
    ("d", "diag_weight"),
    *(("P", name) for name in POINTERS),
    ("P", "global_tokens"),
    ("P", "scratch"),
    ("P", "calibration.x"),
    ("P", "calibration.y"),
    ("q", "calibration.points"),
]
for _view in VIEWS:
    FIELDS += [("P", f"{_view}.data"), ("q", f"{_view}.batch"), ("q", f"{_view}.head"), ("q", f"{_view}.token")]
_PROBLEM = struct.Struct("".join(kind for kind, _ in FIELDS))


def is_supported(q: Tensor, block_size: int | None = None, max_global_tokens: int = 0) -> str | None:
    """Return None if the kernels can run on tensors like q, otherwise a sentence; see `Backend.is_supported`.

    The first call for a head dimension compiles the kernels, or loads them from the cache directory.
    """
    if q.device.type != "cpu" or q.dtype not in DTYPES:
        return f"The CPU kernels support float32, bfloat16 and float16 on a CPU, not {q.dtype} on {q.device.type}."
    if q.shape[-1] not in HEAD_DIMS:
        return f"The CPU kernels support head dims that are multiples of 16 up to 256, not {q.shape[-1]}."
    if block_size is not None and block_size > MAX_BLOCK_SIZE:
        return f"The CPU kernels support blocks of up to {MAX_BLOCK_SIZE} tokens, not {block_size}."
    library = _load_kernels(q.shape[-1])
    return library if isinstance(library, str) else None


@functools.cache
def _load_kernels(dim: int) -> ctypes.CDLL | str:
    """Return the library of the kernels for a head dimension, or a sentence that says why it cannot be compiled.

    The result is cached, so that a failure is logged only once, as a warning.
    """
    try:
        library = load_library(SOURCE, D=dim)
    except CannotCompile as error:
        logger.warning("attention on this CPU runs in PyTorch, at about half the speed: %s", error)
        return f"They could not be compiled: {error}."
    library.scratch_floats.argtypes = [ctypes.c_int64, ctypes.c_int64]
    library.scratch_floats.restype = ctypes.c_int64
    return library


@functools.cache
def _scratch_floats(dim: int, tile_size: int, max_global: int) -> int:
    """Return the number of floats of scratch memory that one thread needs.

    Args:
        dim: D.
        tile_size: tokens per tile.
        max_global: an upper bound of the number of global tokens of a sequence.
    """
    library = _load_kernels(dim)
    assert isinstance(library, ctypes.CDLL)  # the caller has checked is_supported
    return library.scratch_floats(tile_size, max_global)


_threads_started = False  # True once a kernel has used several threads, in this process or the one it was forked from


def _num_threads() -> int:
    """Return torch's number of threads, which the next kernel uses. If it is above 1, set `_threads_started`."""
    global _threads_started
    threads = torch.get_num_threads()
    _threads_started |= threads > 1
    return threads


def _use_one_thread_after_fork() -> None:
    """Set torch's number of threads to 1 in a forked child process if kernels of the parent have started threads.

    The threads of OpenMP do not survive a fork. A kernel or an operation of torch that waited for them would hang.
    """
    if _threads_started:
        torch.set_num_threads(1)


os.register_at_fork(after_in_child=_use_one_thread_after_fork)


def _scratch(floats: int) -> Tensor:
    """Return a float32 vector with at least this number of elements and undefined contents.

    All calls from the same Python thread get the same memory.
    """
    buffers = reused_buffers(torch.float32)
    if "cpu kernels" not in buffers or buffers["cpu kernels"].numel() < floats:
        buffers["cpu kernels"] = torch.empty(floats, dtype=torch.float32, device="cpu")
    return buffers["cpu kernels"]


def _call_kernel(
    function: str,
    spec: HybridSpec,
    views: Sequence[Tensor],
    pointers: Sequence[Tensor | None],
    table: Sequence[Tensor] | None = None,
) -> None:
    """Call a function of csrc/attention.c. It writes its results into tensors among `views` and `pointers`.

    Args:
        function: the name of the function, such as "forward".
        spec: the settings of the call.
        views: tensors (B, H, N, D) with contiguous features, in the order of VIEWS. Trailing tensors may be missing.
        pointers: contiguous tensors or None, in the order of POINTERS. Trailing tensors may be missing.
        table: the calibration table with which the kernel computes α and β, or None if α and β are inputs.
    """
    batch, heads, tokens, dim = views[0].shape
    tile_size = TILE_SIZE
    if spec.diag_weight:
        tile_size = max(1, min(spec.block_size, tokens))
    threads = _num_threads()
    scratch = _scratch(threads * _scratch_floats(dim, tile_size, spec.max_global_tokens))
    values: list[float] = [batch, heads, tokens, tile_size, threads, _state_rows(dim, spec)]
    values += [spec.keep_threshold if spec.dropout_p else 0, spec.joint, spec.max_global_tokens, int(spec.seed or 0)]
    values += [spec.lln_weight, spec.diag_weight]
    values += [0 if x is None else x.data_ptr() for x in pointers]
    values += [0] * (len(POINTERS) - len(pointers))
    values.append(0 if spec.global_tokens is None else spec.global_tokens.data_ptr())
    values.append(scratch.data_ptr())
    if table is None:
        values += [0, 0, 0]
    else:
        values += [table[0].data_ptr(), table[1].data_ptr(), len(table[0])]
    for x in views:
        values += [x.data_ptr(), *x.stride()[:3]]
    values += [0] * (4 * (len(VIEWS) - len(views)))
    getattr(_load_kernels(dim), function)(_PROBLEM.pack(*values))


def _state_rows(dim: int, spec: HybridSpec) -> int:
    """Return the number of rows of D numbers that `forward` saves for each head.

    These are S (D rows) and L (1 row). For the joint form or with an exchange, two more rows follow: the maximum and
    the sum from which L is computed.
    """
    if spec.joint or spec.exchange:
        return dim + 3
    return dim + 1


def _with_contiguous_features(x: Tensor) -> Tensor:
    """Return x if its last dimension has stride 1, otherwise a contiguous copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _readable(x: Tensor) -> Tensor:
    """Return x in float32 and with contiguous features, as the kernels read it; x itself if it is so already."""
    return _with_contiguous_features(x).float()


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def forward(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor | None, beta: Tensor | None, mask: Tensor | None, spec: HybridSpec
) -> tuple[Tensor, Tensor, Tensor, Sequence[Tensor]]:
    """Compute hybrid attention; see `Backend.forward`.

    If alpha or beta is None, the kernel computes both by moment matching, for each head right before its attention.
    """
    dtype = q.dtype
    q, k, v = (_readable(x) for x in (q, k, v))
    batch, heads, _, dim = q.shape
    out = fresh_result(q)
    (states,) = empty_saved(q, spec)
    table = None
    if alpha is None or beta is None:
        alpha = q.new_empty(batch, heads)
        beta = q.new_empty(batch, heads)
        table = calibration_table(dim)
    views = (q, k, v, out)
    offset = _contiguous(spec.offset)
    pointers = (_contiguous(mask), alpha.contiguous(), beta.contiguous(), states, None, None, offset)
    if spec.exchange is None:
        _call_kernel("forward", spec, views, pointers, table)
    else:
        _call_kernel("forward_keys", spec, views, pointers)
        _merge_states(states, spec.exchange)
        _call_kernel("forward_queries", spec, views, pointers)
    return out.to(dtype), alpha, beta, (states,)


def _merge_states(states: Tensor, exchange: Exchange) -> None:
    """Replace S and L in `states` by their values for the keys of all workers, in place.

    Args:
        states: the state of this worker's keys, (B, H, D + 3, D), with rows as in `_state_rows`. The last two rows, the
            maximum and the sum, keep the values of this worker.
    """
    dim = states.shape[-1]
    state, log_sum, key_max, key_sum = states.split((dim, 1, 1, 1), dim=2)
    merged_max, merged_sum, merged_state = exchange.merge_states(key_max[:, :, 0], key_sum[:, :, 0], state)
    state.copy_(merged_state)
    # The sum is at least its largest term, 1. Only a sequence that is all padding needs the clamp.
    log_sum[:, :, 0] = merged_max + merged_sum.clamp_min(1.0).log()


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor,
    mask: Tensor | None,
    spec: HybridSpec,
    saved: Sequence[Tensor],
    grad: Tensor,
    needed: Sequence[bool],
) -> Sequence[Tensor | None]:
    """Compute the gradients of q, k, v, α, β and the offset; see `Backend.backward`."""
    dtype = q.dtype
    views = [_readable(x) for x in (q, k, v, grad)]
    grads = [fresh_result(x) for x in views[:3]]
    alpha = alpha.contiguous()
    beta = beta.contiguous()
    grad_alpha, grad_beta, grad_offset = (torch.empty_like(alpha) if is_needed else None for is_needed in needed)
    batch, heads, _, dim = q.shape
    pointers = [_contiguous(mask), alpha, beta, *saved, grad_alpha, grad_beta, _contiguous(spec.offset), grad_offset]
    if spec.exchange is None:
        _call_kernel("backward", spec, [*views, *grads], pointers)
    else:
        exchanged = views[0].new_empty(batch, heads, dim + 1, dim)  # dS and g
        pointers.append(exchanged)
        _call_kernel("backward_queries", spec, [*views, *grads], pointers)
        parts = exchanged.split((dim, 1), dim=2)
        for part, total in zip(parts, spec.exchange.sum(*parts), strict=True):
            part.copy_(total)
        _call_kernel("backward_keys", spec, [*views, *grads], pointers)
    return *(x.to(dtype) for x in grads), grad_alpha, grad_beta, grad_offset


def empty_results(q: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
    """Return uninitialized tensors for the gradients of q, k and v; see `Backend.empty_results`."""
    return [fresh_result(_with_contiguous_features(x)) for x in (q, k, v)]


def empty_saved(q: Tensor, spec: HybridSpec) -> Sequence[Tensor]:
    """Return one uninitialized tensor for the states of all heads, (B, H, rows, D), with rows as in `_state_rows`."""
    batch, heads, _, dim = q.shape
    return (q.new_empty(batch, heads, _state_rows(dim, spec), dim, dtype=torch.float32),)


def match_moments(q: Tensor, k: Tensor, mask: Tensor | None, table: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Compute α and β (B, H) by moment matching; see `Backend.match_moments`."""
    views = (_readable(q), _readable(k))
    alpha = views[0].new_empty(*q.shape[:2])
    beta = views[0].new_empty(*q.shape[:2])
    lln_only = HybridSpec(lln_weight=1.0, diag_weight=0.0)
    _call_kernel("match_moments", lln_only, views, (_contiguous(mask), alpha, beta), table)
    return alpha, beta
