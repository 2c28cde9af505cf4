"""LLN and block-diagonal attention and moment matching on a CPU: Python's side of the C kernels in csrc/.

They do in two or three passes over the tokens what takes PyTorch a dozen, read any layout with dense features and need
a C compiler when they are first used. Where they cannot run, the backend pytorch does the same.
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
HEAD_DIMS = range(16, 257, 16)
MAX_BLOCK_SIZE = 256
TILE = 64  # tokens, without blocks

logger = logging.getLogger(__name__)

__all__ = ["backward", "draw_seed", "empty_results", "empty_saved", "forward", "is_supported", "match_moments"]


VIEWS = ("q", "k", "v", "out", "dq", "dk", "dv")
# `problem` of csrc/problem.h, as the module struct writes it. Packed in one go, because Python's share of a call counts
# where sequences are short: a tenth at 512 tokens.
FIELDS = (
    ("q", ("batches", "heads", "tokens", "tile", "threads", "rows", "kept", "joint")),
    ("Q", ("seed",)),
    ("d", ("lln", "diag")),
    ("P", ("padding", "alpha", "beta", "states", "dalpha", "dbeta", "parameter", "dparameter", "shared",
           "scratch")),
    ("P", ("calibration.x", "calibration.y")),
    ("q", ("calibration.points",)),
    *((kind, (f"{view}.{name}",)) for view in VIEWS
      for kind, name in (("P", "data"), ("q", "batch"), ("q", "head"), ("q", "token"))),
)  # fmt: skip
_PROBLEM = struct.Struct("".join(kind * len(names) for kind, names in FIELDS))
_NO_VIEW = (0, 0, 0, 0)


def is_supported(q: Tensor, block_size: int | None = None) -> str | None:
    """None where the kernels can run on tensors like q, (B, H, N, D); otherwise the reason in one sentence."""
    if q.device.type != "cpu" or q.dtype != torch.float32:
        return f"The CPU kernels take float32 on a CPU, not {q.dtype} on {q.device.type}."
    if q.shape[-1] not in HEAD_DIMS:
        return f"The CPU kernels take head dims that are multiples of 16 up to 256, not {q.shape[-1]}."
    if block_size is not None and block_size > MAX_BLOCK_SIZE:
        return f"The CPU kernels take blocks of up to {MAX_BLOCK_SIZE} tokens, not {block_size}."
    library = _library(q.shape[-1])
    return library if isinstance(library, str) else None


@functools.cache
def _library(dim: int) -> ctypes.CDLL | str:
    """The kernels for a head dimension, or why there are none."""
    try:
        library = load_library(SOURCE, D=dim)
    except CannotCompile as error:
        logger.warning("attention on this CPU runs in PyTorch, at about half the speed: %s", error)
        return f"They could not be compiled: {error}."
    library.scratch_floats.argtypes, library.scratch_floats.restype = [ctypes.c_int64], ctypes.c_int64
    return library


@functools.cache
def _scratch_floats(dim: int, tile: int) -> int:
    library = _library(dim)
    assert isinstance(library, ctypes.CDLL)  # is_supported has been asked
    return library.scratch_floats(tile)


_threads_started = False  # by a kernel, in this process or in the one that it was forked from


def _threads() -> int:
    """torch's number of threads."""
    global _threads_started
    threads = torch.get_num_threads()
    _threads_started |= threads > 1
    return threads


def _after_fork() -> None:
    """OpenMP's threads do not survive a fork, and a child that waits for them, here or in torch, waits for ever."""
    if _threads_started:
        torch.set_num_threads(1)


os.register_at_fork(after_in_child=_after_fork)


def _scratch(floats: int) -> Tensor:
    """This thread's working memory, kept from call to call."""
    buffers = reused_buffers(torch.float32)
    if "cpu kernels" not in buffers or buffers["cpu kernels"].numel() < floats:
        buffers["cpu kernels"] = torch.empty(floats, dtype=torch.float32, device="cpu")
    return buffers["cpu kernels"]


def _run(
    function: str, mix: HybridSpec, views: Sequence[Tensor], pointers: Sequence[Tensor | None],
    table: Sequence[Tensor] | None = None,
) -> None:  # fmt: skip
    """Calls a kernel; of `problem`, views are the first of VIEWS and pointers padding, alpha, beta, states, dalpha,
    dbeta, parameter, dparameter, shared."""
    batch, heads, tokens, dim = views[0].shape
    threads, tile = _threads(), max(1, min(mix.block_size, tokens)) if mix.diag_weight else TILE
    scratch = _scratch(threads * _scratch_floats(dim, tile))
    problem = _PROBLEM.pack(
        batch, heads, tokens, tile, threads, _rows(dim, mix), mix.keep_threshold if mix.dropout_p else 0,
        mix.joint, int(mix.seed or 0), mix.lln_weight, mix.diag_weight,
        *(0 if x is None else x.data_ptr() for x in pointers), scratch.data_ptr(),
        *(0, 0, 0) if table is None else (table[0].data_ptr(), table[1].data_ptr(), len(table[0])),
        *(number for x in views for number in (x.data_ptr(), *x.stride()[:3])), *_NO_VIEW * (len(VIEWS) - len(views)),
    )  # fmt: skip
    getattr(_library(dim), function)(problem)


def _rows(dim: int, mix: HybridSpec) -> int:
    """Of a state: those of L in two parts where somebody wants them."""
    return dim + (3 if mix.joint or mix.exchange else 1)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def forward(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor | None, beta: Tensor | None, mask: Tensor | None, mix: HybridSpec
) -> tuple[Tensor, Tensor, Tensor, Sequence[Tensor]]:
    """α and β None are matched head by head, while q and k are in the cache."""
    q, k, v = _dense(q), _dense(k), _dense(v)
    batch, heads, _, dim = q.shape
    out, (states,), table = fresh_result(q), empty_saved(q, mix), None
    if alpha is None or beta is None:
        alpha, beta, table = q.new_empty(batch, heads), q.new_empty(batch, heads), calibration_table(dim)
    parameter = _contiguous(mix.parameter)
    pointers = (_contiguous(mask), alpha.contiguous(), beta.contiguous(), states, None, None, parameter, None, None)
    if mix.exchange is None:
        _run("forward", mix, (q, k, v, out), pointers, table)
        return out, alpha, beta, (states,)
    _run("forward_keys", mix, (q, k, v, out), pointers)
    _merge(states, mix.exchange)
    _run("forward_queries", mix, (q, k, v, out), pointers)
    return out, alpha, beta, (states,)


def _merge(states: Tensor, exchange: Exchange) -> None:
    dim = states.shape[-1]
    state, log_sum, top, total = states.split((dim, 1, 1, 1), dim=2)
    merged = exchange.merge_states(top[:, :, 0], total[:, :, 0], state)
    state.copy_(merged[2])
    log_sum[:, :, 0] = merged[0] + merged[1].clamp_min(1.0).log()  # with a real key the sum is at least 1


def backward(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, mask: Tensor | None, mix: HybridSpec,
    saved: Sequence[Tensor], grad: Tensor, needed: Sequence[bool],
) -> Sequence[Tensor | None]:  # fmt: skip
    q, k, v, grad = _dense(q), _dense(k), _dense(v), _dense(grad)
    dq, dk, dv = empty_results(q, k, v)
    alpha, beta = alpha.contiguous(), beta.contiguous()
    dalpha, dbeta, dparameter = (torch.empty_like(alpha) if need else None for need in needed)
    shared = None if mix.exchange is None else q.new_empty(*q.shape[:2], q.shape[-1] + 1, q.shape[-1])
    pointers = (_contiguous(mask), alpha, beta, *saved, dalpha, dbeta, _contiguous(mix.parameter), dparameter, shared)
    views = (q, k, v, grad, dq, dk, dv)
    if mix.exchange is None or shared is None:
        _run("backward", mix, views, pointers)
    else:
        _run("backward_queries", mix, views, pointers)
        dstate, g = shared.split((q.shape[-1], 1), dim=2)
        dstate_of_all, g_of_all = mix.exchange.sum(dstate, g)
        dstate.copy_(dstate_of_all)
        g.copy_(g_of_all)
        _run("backward_keys", mix, views, pointers)
    return dq, dk, dv, dalpha, dbeta, dparameter


def empty_results(q: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
    return [fresh_result(_dense(x)) for x in (q, k, v)]


def empty_saved(q: Tensor, mix: HybridSpec) -> Sequence[Tensor]:
    """The states of csrc/problem.h."""
    batch, heads, _, dim = q.shape
    return (q.new_empty(batch, heads, _rows(dim, mix), dim),)


def match_moments(q: Tensor, k: Tensor, mask: Tensor | None, table: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    alpha, beta = q.new_empty(*q.shape[:2]), q.new_empty(*q.shape[:2])
    pointers = (_contiguous(mask), alpha, beta, None, None, None, None, None, None)
    _run("match_moments", HybridSpec(1.0, 0.0), (_dense(q), _dense(k)), pointers, table)
    return alpha, beta
