"""Launch the Triton kernels of the joint form of LLN+Diag, which ops/formula.py defines together with its offset o.

The forward pass reads or writes tensors of N x D numbers per head 6 times, the backward pass 13 times.

The functions share some arguments. `state` has the tensors m, log_key_sum and S that forward_kernels.py defines: m and
log_key_sum are (B H, D) in float32, and S is (B H, D, D) in the dtype of q. `padding` is bytes (B, N), 1 = padded, or
None. "Programs" are the programs of a kernel that work on one sequence and head.
"""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from lln_fairseq.ops.backends.triton import backward_kernels, joint_backward_kernels, joint_kernels, joint_query_kernels
from lln_fairseq.ops.backends.triton.launch import (
    chunk_size,
    kernel_options,
    split_tokens,
    strides,
    tiles_for,
    workspace,
)
from lln_fairseq.ops.formula import Inputs, Spec

NUM_QUERY_STATS = 6  # listed in joint_query_kernels.py


def joint_out(spec: Spec, inputs: Inputs, padding: Tensor | None, state: Sequence[Tensor]) -> Tensor:
    """Return the output of the joint form, (B, H, N, D).

    q, k and v have common strides and dense features, and α and β are contiguous; this holds for `joint_backward` too.
    """
    q, k, v, alpha, beta, offset, *_ = inputs
    assert offset is not None
    batch, heads, length, dim = q.shape
    out = torch.empty_like(q)
    tile = tiles_for(q).for_block_size("joint_out", spec.block_size)
    chunk = chunk_size(spec.block_size, tile.rows)
    joint_kernels._joint_out_kernel[batch * heads, triton.cdiv(length, chunk)](
        q,
        k,
        v,
        padding,
        _count_padding(padding),
        alpha,
        beta,
        offset.contiguous(),
        *state,
        inputs.seed,
        out,
        *strides(q),
        *strides(out),
        heads,
        length,
        SCALE=dim**-0.5,
        DROPOUT=spec.dropout,
        BLOCK=spec.block_size,
        CHUNK=chunk,
        **kernel_options(q, tile),
    )
    return out


def joint_backward(
    spec: Spec, inputs: Inputs, padding: Tensor | None, state: Sequence[Tensor], do: Tensor, needed: Sequence[bool]
) -> Sequence[Tensor | None]:
    """Return the gradients of q, k, v, α, β and the offset for the joint form; see `Backend.backward`.

    `do` is the gradient of the output, (B, H, N, D) with dense features.
    """
    q, k, v, alpha, beta, offset, *_ = inputs
    assert alpha is not None
    assert offset is not None
    batch, heads, length, dim = q.shape
    bh = batch * heads
    dq = torch.empty_like(q)
    query_stats = workspace(q, NUM_QUERY_STATS, bh, length)
    tile = tiles_for(q).for_block_size("joint_dq", spec.block_size)
    chunk = chunk_size(spec.block_size, tile.rows)
    grid = (bh, triton.cdiv(length, chunk))
    # Each program writes its part of dα and of the gradient of the offset.
    dalpha = workspace(q, *grid)
    djoint_offset = workspace(q, *grid)
    joint_query_kernels._joint_dq_kernel[grid](
        q,
        k,
        v,
        do,
        padding,
        _count_padding(padding),
        alpha,
        beta,
        offset.contiguous(),
        *state,
        inputs.seed,
        query_stats,
        dq,
        dalpha,
        djoint_offset,
        *strides(q),
        *strides(do),
        *strides(dq),
        query_stats.stride(0),
        heads,
        length,
        SCALE=dim**-0.5,
        DROPOUT=spec.dropout,
        BLOCK=spec.block_size,
        CHUNK=chunk,
        **kernel_options(q, tile),
    )
    g, grad_state = _compute_grad_state(q, padding, alpha, state, do, query_stats)
    dk = torch.empty_like(q)
    dv = torch.empty_like(q)
    tile = tiles_for(q).for_block_size("joint_dkv", spec.block_size)
    chunk = chunk_size(spec.block_size, tile.rows)
    grid = (bh, triton.cdiv(length, chunk))
    dbeta = workspace(q, *grid)
    joint_backward_kernels._joint_dkv_kernel[grid](
        q,
        k,
        v,
        do,
        padding,
        alpha,
        beta,
        *state[:2],
        g,
        grad_state,
        inputs.seed,
        query_stats,
        dk,
        dv,
        dbeta,
        *strides(q),
        *strides(do),
        *strides(dk),
        query_stats.stride(0),
        heads,
        length,
        SCALE=dim**-0.5,
        DROPOUT=spec.dropout,
        BLOCK=spec.block_size,
        CHUNK=chunk,
        **kernel_options(q, tile),
    )
    grads: list[Tensor | None] = [dq, dk, dv]
    for partial, is_needed in zip((dalpha, dbeta, djoint_offset), needed, strict=True):
        grads.append(partial.sum(-1).view(batch, heads) if is_needed else None)
    return grads


def _compute_grad_state(
    q: Tensor, padding: Tensor | None, alpha: Tensor, state: Sequence[Tensor], do: Tensor, query_stats: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the sums over the queries that backward_kernels.py defines.

    Returns: g (B H, D) in float32, and state_scale · dS / s (B H, D, D) in the dtype of q.
    """
    batch, heads, length, dim = q.shape
    bh = batch * heads
    _, log_key_sum, S = state
    splits, tokens = split_tokens(length, dim)
    g = workspace(q, bh, dim)
    grad_state = torch.empty_like(S)
    parts = (g, grad_state)
    if splits > 1:
        parts = (workspace(q, bh, splits, dim), workspace(q, bh, splits, dim, dim))
    joint_backward_kernels._joint_dstate_kernel[bh, splits](
        q,
        do,
        alpha,
        *state,
        query_stats,
        *parts,
        *strides(q),
        *strides(do),
        query_stats.stride(0),
        heads,
        length,
        tokens,
        FINAL=splits == 1,
        PADDED=padding is not None,
        **kernel_options(q, tiles_for(q).dstate),
    )
    if splits > 1:
        backward_kernels._lln_dcombine_kernel[bh, dim * dim // 256](
            *parts, log_key_sum, S, g, grad_state, length, splits, WEIGHT=1.0, D=dim, COLS=256, ROWS=16, num_warps=4
        )
    return g, grad_state


def _count_padding(padding: Tensor | None) -> Tensor | None:
    """Return the number of padding keys of each sequence, int32 (B,), or None if `padding` is None."""
    if padding is None:
        return None
    return padding.sum(dim=-1, dtype=torch.int32)
