"""LLN and LLN+Diag attention and moment matching on the GPU: host side of the Triton kernels, on torch and triton only.

Nothing here waits for the device, every launch depends on shapes alone (so CUDA graphs can capture it), and the number
of splits of the tokens depends on N and D alone, so that a sentence gets the same bits whatever else is in the batch.
"""

import os
from contextlib import nullcontext
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from . import lln_triton_backward as backward_kernels
from . import lln_triton_forward as forward_kernels
from . import lln_triton_moments as moment_kernels

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
HEAD_DIMS = (16, 32, 64, 128)
_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
MAX_SPLITS = 128


class Tile(NamedTuple):
    """Rows of a tile, warps of a program, depth of the load pipeline."""

    rows: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """The tiles of the kernels that walk over tokens."""

    state: Tile
    out: Tile
    diag_out: Tile
    dstate: Tile
    dkv: Tile
    diag_bwd: Tile
    diag_bwd_long: Tile  # for blocks with more tokens than diag_bwd.rows


# (architecture, bytes of an element, head dim up to): chosen so that half precision does not spill, shared memory fits
# and many warps share a multiprocessor (tests/ops/test_lln_triton_aot.py prints all that). Compute capability 8.x and
# 12.x take the rows of 80, 9.x and 10.x those of 90. float32 works on small tiles: tf32x3 needs three operands for one.
_TABLE = {  # rows, warps, stages of each kernel in the order of Tiles
    (80, 2, 64): ((64, 4, 2), (64, 4, 2), (64, 4, 1), (64, 8, 2), (32, 4, 2), (32, 4, 1), (32, 4, 1)),
    (80, 2, 128): ((64, 8, 2), (64, 8, 1), (64, 8, 1), (32, 8, 2), (32, 8, 1), (32, 8, 1), (32, 8, 1)),
    (80, 4, 64): ((32, 4, 1), (32, 4, 1), (16, 8, 1), (16, 8, 1), (16, 8, 1), (16, 8, 1), (16, 8, 1)),
    (80, 4, 128): ((16, 8, 1), (16, 8, 1), (16, 8, 1), (16, 8, 1), (16, 8, 1), (16, 8, 1), (16, 8, 1)),
    (90, 2, 64): ((64, 4, 2), (64, 4, 2), (64, 4, 2), (64, 8, 2), (64, 8, 2), (64, 4, 1), (32, 4, 1)),
    (90, 2, 128): ((64, 8, 2), (64, 8, 1), (64, 8, 1), (32, 8, 2), (32, 8, 1), (32, 8, 1), (32, 8, 1)),
}
TILES = {key: Tiles(*(Tile(*tile) for tile in tiles)) for key, tiles in _TABLE.items()}
TILES |= {(90, 4, dim): TILES[80, 4, dim] for dim in (64, 128)}


def _capability(device: torch.device) -> int:
    """Compute capability as one number, 90 for 9.0."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _shared_memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def _tiles(q: Tensor) -> Tiles:
    if INTERPRETED:  # where the number of operations counts and not their size
        return Tiles(*[Tile(64, 4, 1)] * len(Tiles._fields))
    arch = 90 if 90 <= _capability(q.device) < 120 else 80
    return TILES[arch, q.element_size(), 64 if q.shape[-1] <= 64 else 128]


def is_supported(q: Tensor) -> str | None:
    """None where the kernels can run on tensors like q, (B, H, N, D); otherwise the reason in one sentence."""
    if q.dtype not in _DTYPES:
        return f"The Triton kernels take float16, bfloat16 and float32, not {q.dtype}."
    if q.shape[-1] not in HEAD_DIMS:
        return f"The Triton kernels take head dims {HEAD_DIMS}, not {q.shape[-1]}."
    if q.device.type != "cuda":
        return None if INTERPRETED and q.device.type == "cpu" else f"The Triton kernels need CUDA, not {q.device.type}."
    if not INTERPRETED and _capability(q.device) < 80:
        return "The Triton kernels need compute capability 8.0: older tensor cores have no path in Triton."
    if not INTERPRETED and q.element_size() * q.shape[-1] == 512 and _shared_memory(q.device) < 147456:
        return "float32 with head dim 128 needs 144 KB of shared memory, which this device does not have."
    return None


def _splits(length: int, dim: int) -> tuple[int, int]:
    """Number of splits of the tokens, and tokens in each: enough programs for the device, little traffic of states."""
    splits = min(max(length // max(1024, 16 * dim), 1), MAX_SPLITS)
    tokens = triton.cdiv(triton.cdiv(length, splits), 128) * 128
    return triton.cdiv(length, tokens), tokens


def _chunk(block_size: int | None, rows: int) -> int:
    """Tokens that a program owns: as many whole blocks as fit in one tile, or one block that needs several."""
    if block_size is None:
        return 4 * rows
    return max(rows // block_size, 1) * block_size


def _dot(q: Tensor) -> dict[str, object]:
    """Operands of tl.dot. float32: three tf32 products (error 1e-6; one: 4e-4; `ieee` uses no tensor cores and spills).

    The interpreter multiplies bfloat16 wrongly, so there its operands are float32.
    """
    dtype = tl.float32 if INTERPRETED and q.dtype == torch.bfloat16 else _DTYPES[q.dtype]
    return {"DOT": dtype, "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32"}


def _device(x: Tensor) -> torch.cuda.device | nullcontext:
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _aligned(*tensors: Tensor) -> list[Tensor]:
    """The tensors with one set of strides and dense features; copied only where the layouts differ."""
    first = tensors[0] if tensors[0].stride(-1) == 1 and 0 not in tensors[0].stride() else tensors[0].contiguous()
    return [first] + [x if x.stride() == first.stride() else torch.empty_like(first).copy_(x) for x in tensors[1:]]


def _strides(x: Tensor) -> tuple[int, int, int]:
    return x.stride(0), x.stride(1), x.stride(2)


def _mask(key_padding_mask: Tensor | None) -> Tensor | None:
    return None if key_padding_mask is None else key_padding_mask.contiguous().view(torch.uint8)


def _per_head(x: Tensor | float, q: Tensor) -> Tensor:
    """A number or a tensor that broadcasts to (B, H), as float32 (B, H); autograd sums the expanded gradient."""
    x = torch.as_tensor(x, dtype=torch.float32, device=q.device)
    return x.expand(q.shape[0], q.shape[1])


def _workspace(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _state(k: Tensor, v: Tensor, pad: Tensor | None, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """m, s (B H, D) float32 and S (B H, D, D) in the dtype of v: see lln_triton_forward."""
    (batch, heads, length, dim), tile = k.shape, _tiles(k).state
    bh, (splits, tokens) = batch * heads, _splits(length, dim)
    m, s = _workspace(k, bh, dim), _workspace(k, bh, dim)
    state = torch.empty((bh, dim, dim), dtype=v.dtype, device=v.device)
    parts = (m, s, state)
    if splits > 1:
        parts = (_workspace(k, bh, splits, dim), _workspace(k, bh, splits, dim), _workspace(k, bh, splits, dim, dim))
    forward_kernels._lln_state_kernel[bh, splits](
        k, v, pad, beta, *parts, *_strides(k), heads, length, tokens,
        D=dim, ROWS=tile.rows, HAS_PAD=pad is not None, FINAL=splits == 1, **_dot(k),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        forward_kernels._lln_combine_kernel[bh, dim * dim // 256](
            *parts, m, s, state, splits, D=dim, COLS=256, ROWS=16, num_warps=4
        )
    return m, s, state


class LLNFunction(torch.autograd.Function):
    """LLN attention (block_size None) or ½ (LLN + block-diagonal softmax) on (B, H, N, D); 4 or 6 passes forward,
    7 or 9 backward over N x D. Saved: the inputs, two (B H, D) vectors and the (B H, D, D) state."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        alpha: Tensor,
        beta: Tensor,
        pad: Tensor | None,
        block_size: int | None,
        dropout_p: float,
        seed: Tensor | None,
    ) -> Tensor:
        q, k, v = _aligned(q, k, v)
        alpha, beta = alpha.contiguous(), beta.contiguous()
        batch, heads, length, dim = q.shape
        tile = _tiles(q).out if block_size is None else _tiles(q).diag_out
        out = torch.empty_like(q)
        chunk = _chunk(block_size, tile.rows)
        with _device(q):
            m, s, state = _state(k, v, pad, beta)
            forward_kernels._lln_out_kernel[batch * heads, triton.cdiv(length, chunk)](
                q, k, v, pad, alpha, m, s, state, seed, out, *_strides(q), *_strides(out), heads, length,
                SCALE=dim**-0.5, DROPOUT=dropout_p, BLOCK=block_size or 0, CHUNK=chunk,
                D=dim, ROWS=tile.rows, HAS_PAD=pad is not None, **_dot(q), num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
        ctx.save_for_backward(q, k, v, alpha, beta, pad, seed, m, s, state)
        ctx.block_size, ctx.dropout_p = block_size, dropout_p
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, do: Tensor) -> tuple[Tensor | None, ...]:
        q = ctx.saved_tensors[0]
        if do.stride(-1) != 1 or 0 in do.stride():  # an expanded gradient, of .sum() say
            do = do.contiguous()
        with _device(q):
            gradients = (_lln_backward if ctx.block_size is None else _lln_diag_backward)(ctx, do)
        return (*gradients, None, None, None, None)


def _dstate(ctx: FunctionCtx, do: Tensor, share: float, dq: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """g (B H, D) float32 and c dS / s (B H, D, D) of lln_triton_backward; with dq: filled in, and dα (B H,)."""
    q, _, _, alpha, _, _, _, m, s, state = ctx.saved_tensors
    (batch, heads, length, dim), tile = q.shape, _tiles(q).dstate
    bh, (splits, tokens) = batch * heads, _splits(length, dim)
    g, dstate = _workspace(q, bh, dim), torch.empty_like(state)
    parts = (g, dstate) if splits == 1 else (_workspace(q, bh, splits, dim), _workspace(q, bh, splits, dim, dim))
    dalpha = _workspace(q, bh, splits) if dq is not None and ctx.needs_input_grad[3] else None
    out = q if dq is None else dq
    backward_kernels._lln_dstate_kernel[bh, splits](
        q, do, alpha, m, s, state, *parts, dq, dalpha, *_strides(q), *_strides(do), *_strides(out),
        heads, length, tokens,
        SHARE=share, WRITE_DQ=dq is not None, WRITE_DALPHA=dalpha is not None, FINAL=splits == 1,
        D=dim, ROWS=tile.rows, SLICE=min(dim, 64), **_dot(q), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        backward_kernels._lln_dcombine_kernel[bh, dim * dim // 256](
            *parts, s, g, dstate, length, splits, SHARE=share, D=dim, COLS=256, ROWS=16, num_warps=4
        )
    return g, dstate, dalpha


def _summed(partial: Tensor | None, like: Tensor) -> Tensor | None:
    """Σ over the programs, in a fixed order, in the shape (B, H)."""
    return None if partial is None else partial.sum(-1).view_as(like)


def _lln_backward(ctx: FunctionCtx, do: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, alpha, beta, pad, _, m, s, _ = ctx.saved_tensors
    (batch, heads, length, dim), tile = q.shape, _tiles(q).dkv
    dq, dk, dv = torch.empty_like(q), torch.empty_like(q), torch.empty_like(q)
    g, dstate, dalpha = _dstate(ctx, do, 1.0, dq)
    chunk = _chunk(None, tile.rows)
    grid = (batch * heads, triton.cdiv(length, chunk))
    dbeta = _workspace(q, *grid) if ctx.needs_input_grad[4] else None
    backward_kernels._lln_dkv_kernel[grid](
        k, v, pad, beta, m, s, g, dstate, dk, dv, dbeta, *_strides(q), *_strides(dk), heads, length,
        WRITE_DBETA=dbeta is not None, CHUNK=chunk, D=dim, ROWS=tile.rows, SLICE=min(dim, 64),
        HAS_PAD=pad is not None, **_dot(q), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return dq, dk, dv, _summed(dalpha, alpha), _summed(dbeta, beta)


def _lln_diag_backward(ctx: FunctionCtx, do: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, alpha, beta, pad, seed, m, s, state = ctx.saved_tensors
    (batch, heads, length, dim), tile = q.shape, _tiles(q).diag_bwd
    if ctx.block_size > tile.rows:
        tile = _tiles(q).diag_bwd_long
    dq, dk, dv = torch.empty_like(q), torch.empty_like(q), torch.empty_like(q)
    g, dstate, _ = _dstate(ctx, do, 0.5, None)
    chunk = _chunk(ctx.block_size, tile.rows)
    grid = (batch * heads, triton.cdiv(length, chunk))
    wanted = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
    dalpha, dbeta = (_workspace(q, *grid), _workspace(q, *grid)) if wanted else (None, None)
    statistics = _workspace(q, 2, batch * heads, length) if chunk > tile.rows else (None, None)
    backward_kernels._lln_diag_bwd_kernel[grid](
        q, k, v, do, pad, alpha, beta, m, s, state, g, dstate, seed, *statistics, dq, dk, dv, dalpha, dbeta,
        *_strides(q), *_strides(do), *_strides(dq), heads, length,
        SCALE=dim**-0.5, DROPOUT=ctx.dropout_p, BLOCK=ctx.block_size, CHUNK=chunk, WRITE_AB=wanted,
        D=dim, ROWS=tile.rows, SLICE=min(dim, 64), HAS_PAD=pad is not None, **_dot(q),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return dq, dk, dv, _summed(dalpha, alpha), _summed(dbeta, beta)


def _check(q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> None:
    if reason := is_supported(q):
        raise ValueError(reason)
    for name, x in (("k", k), ("v", v)):
        if x.shape != q.shape or x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"q and {name} must agree in shape, dtype and device: {tuple(q.shape)} {q.dtype} {q.device}"
            )
    if key_padding_mask is not None and (
        key_padding_mask.dtype != torch.bool or key_padding_mask.shape != (q.shape[0], q.shape[2])
    ):
        raise ValueError(f"key_padding_mask must be bool of shape (B, N) = {(q.shape[0], q.shape[2])}")


def lln_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor | float,
    beta: Tensor | float,
    key_padding_mask: Tensor | None = None,
) -> Tensor:
    """softmax_d(αq + L) Wᵀv, W_jd = exp(βk_jd - L_d), L_d = logsumexp_j βk_jd (arXiv 2311.13541, eq. 8, exact).

    q, k, v: (B, H, N, D) in any layout with dense features; alpha, beta: broadcast to (B, H), and get gradients;
    key_padding_mask: bool (B, N), True = padded. Returns (B, H, N, D) in the layout of q; 0 where every key is padded.
    """
    _check(q, k, v, key_padding_mask)
    pad = _mask(key_padding_mask)
    return LLNFunction.apply(q, k, v, _per_head(alpha, q), _per_head(beta, q), pad, None, 0.0, None)


def lln_diag_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor | float,
    beta: Tensor | float,
    key_padding_mask: Tensor | None = None,
    block_size: int | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | int | None = None,
) -> Tensor:
    """½ (lln_attention + softmax(q kᵀ / √D) v inside blocks of `block_size` tokens); block_size defaults to D.

    dropout_p applies to the probabilities of the blocks. seed: int64 tensor with one element on the device of q (a CUDA
    graph then draws anew at each replay), an int, or None to draw one from PyTorch's generator of that device.
    """
    _check(q, k, v, key_padding_mask)
    block_size = q.shape[-1] if block_size is None else block_size
    if not 16 <= block_size <= 256:
        raise ValueError(f"block_size must lie in 16..256, not {block_size}")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must lie in [0, 1), not {dropout_p}")
    if dropout_p == 0.0:
        seed = None
    elif seed is None:
        seed = torch.randint(2**62, (1,), device=q.device)
    elif isinstance(seed, int):
        seed = torch.full((1,), seed, dtype=torch.int64, device=q.device)
    pad = _mask(key_padding_mask)
    return LLNFunction.apply(q, k, v, _per_head(alpha, q), _per_head(beta, q), pad, block_size, float(dropout_p), seed)


@torch.no_grad()
def match_moments(
    q: Tensor, k: Tensor, key_padding_mask: Tensor | None, log_s_table: Tensor, log_sigma2_table: Tensor
) -> tuple[Tensor, Tensor]:
    """α = σ̃ / (√2 σ_q), β = σ̃ / (√2 σ_k), float32 (B, H), without gradient and without waiting for the device.

    σ: population standard deviation about the mean over the real tokens and the features of a (batch, head), at least
    1e-6; log σ̃² piecewise linear in log s, s = σ_q²σ_k², through the increasing table (T,), T >= 2, its end slopes
    continued (arXiv 2311.13541, section 4.1).
    """
    _check(q, k, k, key_padding_mask)
    q, k = _aligned(q, k)
    pad = _mask(key_padding_mask)
    batch, heads, length, dim = q.shape
    splits, tokens = _splits(length, dim)
    table = [x.to(device=q.device, dtype=torch.float32).contiguous() for x in (log_s_table, log_sigma2_table)]
    size = {"SIZE": len(table[0]), "SIZE_2": triton.next_power_of_2(len(table[0]))}
    alpha, beta = _workspace(q, batch, heads), _workspace(q, batch, heads)
    part = _workspace(q, 5, batch * heads, splits) if splits > 1 else None
    with _device(q):
        moment_kernels._moments_kernel[batch * heads, splits](
            q, k, pad, *table, part, alpha, beta, *_strides(q), heads, length, tokens,
            **size, D=dim, ROWS=64, HAS_PAD=pad is not None, FINAL=splits == 1, num_warps=4, num_stages=2,
        )  # fmt: skip
        if splits > 1:
            moment_kernels._moments_combine_kernel[(batch * heads,)](
                part, *table, alpha, beta, splits, SPLITS_2=triton.next_power_of_2(splits), **size, num_warps=1
            )
    return alpha, beta
