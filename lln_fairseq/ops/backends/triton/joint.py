"""Host side of the joint form's Triton kernels: 6 passes over N x D forward, 13 backward."""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from lln_fairseq.ops.backends import HybridSpec
from lln_fairseq.ops.backends.triton import backward_kernels, joint_backward_kernels, joint_kernels, joint_query_kernels
from lln_fairseq.ops.backends.triton.launch import (
    chunk_of,
    dot_options,
    split_tokens,
    strides,
    tiles_for,
    workspace,
)

ROWS_OF_A_QUERY = 6  # see joint_query_kernels.py


def joint_out(
    q: Tensor, k: Tensor, v: Tensor, pad: Tensor | None, alpha: Tensor, beta: Tensor, mix: HybridSpec,
    state: Sequence[Tensor],
) -> Tensor:  # fmt: skip
    """The output; state is m, log s and S."""
    (batch, heads, length, dim), out = q.shape, torch.empty_like(q)
    tile = tiles_for(q).of("joint_out", mix.block_size)
    chunk = chunk_of(mix.block_size, tile.rows)
    joint_kernels._joint_out_kernel[batch * heads, triton.cdiv(length, chunk)](
        q, k, v, pad, _padded_keys(pad), alpha, beta, _parameter(mix), *state, mix.seed, out,
        *strides(q), *strides(out), heads, length,
        SCALE=dim**-0.5, DROPOUT=mix.dropout_p, BLOCK=mix.block_size, CHUNK=chunk,
        D=dim, ROWS=tile.rows, HAS_PAD=pad is not None, **dot_options(q), **tile.options,
    )  # fmt: skip
    return out


def joint_backward(
    q: Tensor, k: Tensor, v: Tensor, pad: Tensor | None, alpha: Tensor, beta: Tensor, mix: HybridSpec,
    state: Sequence[Tensor], do: Tensor, needed: Sequence[bool],
) -> Sequence[Tensor | None]:  # fmt: skip
    """dq, dk, dv, and of dα, dβ and the parameter's gradient those that are needed."""
    (batch, heads, length, dim), bh = q.shape, q.shape[0] * q.shape[1]
    rows = workspace(q, ROWS_OF_A_QUERY, bh, length)
    dq, dalpha, dparameter = _rows_and_dq(q, k, v, pad, alpha, beta, mix, state, do, rows)
    g, dstate = _dstate(q, pad, alpha, state, do, rows)
    dk, dv, tile = torch.empty_like(q), torch.empty_like(q), tiles_for(q).of("joint_dkv", mix.block_size)
    chunk = chunk_of(mix.block_size, tile.rows)
    grid = (bh, triton.cdiv(length, chunk))
    dbeta = workspace(q, *grid)
    joint_backward_kernels._joint_dkv_kernel[grid](
        q, k, v, do, pad, alpha, beta, *state[:2], g, dstate, mix.seed, rows, dk, dv, dbeta,
        *strides(q), *strides(do), *strides(dk), rows.stride(0), heads, length,
        SCALE=dim**-0.5, DROPOUT=mix.dropout_p, BLOCK=mix.block_size, CHUNK=chunk,
        D=dim, ROWS=tile.rows, SLICE=min(dim, 64), HAS_PAD=pad is not None, **dot_options(q),
        **tile.options,
    )  # fmt: skip
    sums = zip((dalpha, dbeta, dparameter), needed, strict=True)
    return dq, dk, dv, *(x.sum(-1).view(batch, heads) if need else None for x, need in sums)


def _rows_and_dq(
    q: Tensor, k: Tensor, v: Tensor, pad: Tensor | None, alpha: Tensor, beta: Tensor, mix: HybridSpec,
    state: Sequence[Tensor], do: Tensor, rows: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, and dα and the parameter's gradient of each program; fills rows."""
    (batch, heads, length, dim), dq = q.shape, torch.empty_like(q)
    tile = tiles_for(q).of("joint_dq", mix.block_size)
    chunk = chunk_of(mix.block_size, tile.rows)
    grid = (batch * heads, triton.cdiv(length, chunk))
    dalpha, dparameter = workspace(q, *grid), workspace(q, *grid)
    joint_query_kernels._joint_dq_kernel[grid](
        q, k, v, do, pad, _padded_keys(pad), alpha, beta, _parameter(mix), *state, mix.seed, rows,
        dq, dalpha, dparameter,
        *strides(q), *strides(do), *strides(dq), rows.stride(0), heads, length,
        SCALE=dim**-0.5, DROPOUT=mix.dropout_p, BLOCK=mix.block_size, CHUNK=chunk,
        D=dim, ROWS=tile.rows, SLICE=min(dim, 64), HAS_PAD=pad is not None, **dot_options(q), **tile.options,
    )  # fmt: skip
    return dq, dalpha, dparameter


def _dstate(
    q: Tensor, pad: Tensor | None, alpha: Tensor, state: Sequence[Tensor], do: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """g (B H, D) float32 and c dS / s (B H, D, D) of backward_kernels.py."""
    (batch, heads, length, dim), tile, (_, log_s, S) = q.shape, tiles_for(q).dstate, state
    bh, (splits, tokens) = batch * heads, split_tokens(length, dim)
    g, dstate = workspace(q, bh, dim), torch.empty_like(S)
    parts = (g, dstate) if splits == 1 else (workspace(q, bh, splits, dim), workspace(q, bh, splits, dim, dim))
    joint_backward_kernels._joint_dstate_kernel[bh, splits](
        q, do, alpha, *state, rows, *parts, *strides(q), *strides(do), rows.stride(0), heads, length, tokens,
        FINAL=splits == 1, D=dim, ROWS=tile.rows, HAS_PAD=pad is not None, **dot_options(q),
        **tile.options,
    )  # fmt: skip
    if splits > 1:
        backward_kernels._lln_dcombine_kernel[bh, dim * dim // 256](
            *parts, log_s, S, g, dstate, length, splits, SHARE=1.0, D=dim, COLS=256, ROWS=16, num_warps=4
        )
    return g, dstate


def _padded_keys(pad: Tensor | None) -> Tensor | None:
    """(B,) padded keys of each sequence."""
    return None if pad is None else pad.sum(dim=-1, dtype=torch.int32)


def _parameter(mix: HybridSpec) -> Tensor:
    assert mix.parameter is not None
    return mix.parameter.contiguous()
