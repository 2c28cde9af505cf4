"""LLN and block-diagonal attention and moment matching on a CPU: Python's side of the C kernels in csrc/.

They do in two or three passes over the tokens what takes PyTorch a dozen, read any layout with dense features and need
a C compiler when they are first used. Where they cannot run, lln_pytorch.py does the same.
"""

import ctypes
import functools
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lln_fairseq.ops._compile import CannotCompile, load_library
from lln_fairseq.ops._memory import Scratch, fresh_result
from lln_fairseq.ops.lln_pytorch import Mixture
from lln_fairseq.ops.moment_matching import calibration_table

SOURCE = Path(__file__).with_name("csrc") / "attention.c"
HEAD_DIMS = range(16, 257, 16)
MAX_BLOCK_SIZE = 256
TILE = 64  # tokens, without blocks

logger = logging.getLogger(__name__)


class _View(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p)] + [(name, ctypes.c_int64) for name in ("batch", "head", "token")]


class _Table(ctypes.Structure):
    _fields_ = [("x", ctypes.c_void_p), ("y", ctypes.c_void_p), ("points", ctypes.c_int64)]


_VIEWS = ("q", "k", "v", "out", "grad", "dq", "dk", "dv")
_POINTERS = ("padding", "alpha", "beta", "log_sums", "states", "dalpha", "dbeta", "scratch")


class _Problem(ctypes.Structure):
    """`problem` of csrc/problem.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batches", "heads", "tokens", "tile", "threads", "kept")),
        ("seed", ctypes.c_uint64),
        ("lln", ctypes.c_float),
        ("diag", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("calibration", _Table),
        *((name, _View) for name in _VIEWS),
    ]


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


def _run(function: str, mix: Mixture, mask: Tensor | None, table: _Table | None = None, **tensors: Tensor) -> None:
    """Calls a kernel; the names of the tensors are those of its `problem`."""
    batch, heads, tokens, dim = tensors["q"].shape
    library, threads = _library(dim), torch.get_num_threads()
    tile = max(1, min(mix.block_size, tokens)) if mix.diag_weight else TILE
    scratch = Scratch(tensors["q"], tokens)("c", threads * library.scratch_floats(tile))
    pointers = {"scratch": scratch, **tensors} if mask is None else {"scratch": scratch, "padding": mask, **tensors}
    problem = _Problem(
        batch, heads, tokens, tile, threads, mix.kept_values if mix.dropout_p else 0,
        mix.seed, mix.lln_weight, mix.diag_weight, calibration=table or _Table(),
        **{name: _view(x) if name in _VIEWS else x.data_ptr() for name, x in pointers.items()},
    )  # fmt: skip
    getattr(library, function)(ctypes.byref(problem))


def _view(x: Tensor) -> _View:
    return _View(x.data_ptr(), *x.stride()[:3])


def _dense(*tensors: Tensor) -> list[Tensor]:
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


class MixtureFunction(torch.autograd.Function):
    """As lln_pytorch.MixtureFunction: q, k, v (B, H, N, D), alpha and beta (B, H), mask bool (B, N) or None.

    alpha and beta None: matched head by head, while q and k are in the cache.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor | None, beta: Tensor | None, mask: Tensor | None,
        mix: Mixture,
    ) -> Tensor:  # fmt: skip
        q, k, v = _dense(q, k, v)
        mask = None if mask is None else mask.contiguous()
        heads, dim = q.shape[0] * q.shape[1], q.shape[3]
        table = _calibration(dim) if alpha is None else None
        alpha, beta = (torch.empty(q.shape[:2]) if x is None else x.contiguous() for x in (alpha, beta))
        out, log_sums, states = fresh_result(q), torch.empty(heads, dim), torch.empty(heads, dim, dim)
        _run("forward", mix, mask, table, q=q, k=k, v=v, out=out, alpha=alpha, beta=beta, log_sums=log_sums,
             states=states)  # fmt: skip
        ctx.save_for_backward(q, k, v, alpha, beta, mask, log_sums, states)
        ctx.mix = mix
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, alpha, beta, mask, log_sums, states = ctx.saved_tensors
        (grad,) = _dense(grad)
        dq, dk, dv = (fresh_result(x) for x in (q, k, v))
        needed = zip(("dalpha", "dbeta"), ctx.needs_input_grad[3:5], strict=True)
        of_factors = {name: torch.empty_like(alpha) for name, wanted in needed if wanted}
        _run("backward", ctx.mix, mask, q=q, k=k, v=v, grad=grad, dq=dq, dk=dk, dv=dv, alpha=alpha, beta=beta,
             log_sums=log_sums, states=states, **of_factors)  # fmt: skip
        return dq, dk, dv, of_factors.get("dalpha"), of_factors.get("dbeta"), None, None


@torch.no_grad()
def match_moments(q: Tensor, k: Tensor, mask: Tensor | None, *_: Tensor) -> tuple[Tensor, Tensor]:
    """moment_matching.match_moments of scope "head" with calibrated constants."""
    q, k = _dense(q, k)
    mask = None if mask is None else mask.contiguous()
    alpha, beta = torch.empty(q.shape[:2]), torch.empty(q.shape[:2])
    _run("match_moments", Mixture(1.0, 0.0), mask, _calibration(q.shape[-1]), q=q, k=k, alpha=alpha, beta=beta)
    return alpha, beta


def _calibration(dim: int) -> _Table:
    log_s, log_sigma2 = calibration_table(dim)
    return _Table(log_s.data_ptr(), log_sigma2.data_ptr(), len(log_s))
