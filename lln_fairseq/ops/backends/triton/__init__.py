"""The Triton backend: LLN and LLN+Diag attention and moment matching on a GPU. This module launches the kernels.

The functions never wait for the device, and the launches depend only on shapes, so CUDA graphs can capture them. A long
sequence is divided into splits, one program for each. Their number depends only on N and D, so that the result for a
sequence does not depend on the rest of the batch.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from lln_fairseq.ops.backends.triton import (
    backward_kernels,
    diag_backward_kernels,
    forward_kernels,
    moment_kernels,
)
from lln_fairseq.ops.backends.triton.joint import joint_backward, joint_out
from lln_fairseq.ops.backends.triton.launch import (
    aligned,
    chunk_size,
    device_of,
    kernel_options,
    mask_bytes,
    reason_against,
    split_tokens,
    strides,
    tiles_for,
    workspace,
)
from lln_fairseq.ops.exchange import Exchange
from lln_fairseq.ops.formula import AVERAGE, JOINT, WEIGHTS, Inputs, Spec
from lln_fairseq.ops.moment_matching import calibration_table

__all__ = ["allocate", "backward", "forward", "match_moments", "reason_against"]


def allocate(spec: Spec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """See `Backend.allocate`."""
    return [torch.empty_like(x) for x in aligned(q, k, v)], _empty_state(q)


def _empty_state(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return uninitialized tensors for m, log_key_sum and S, which `forward` saves and forward_kernels.py defines.

    m and log_key_sum are (B H, D) in float32, with logarithms in base 2. S is (B H, D, D) in the dtype of q.
    """
    bh = q.shape[0] * q.shape[1]
    dim = q.shape[3]
    return workspace(q, bh, dim), workspace(q, bh, dim), q.new_empty(bh, dim, dim)


def forward(
    spec: Spec, inputs: Inputs, exchange: Exchange | None = None
) -> tuple[Tensor, Tensor, Tensor, Sequence[Tensor]]:
    """See `Backend.forward`. The kernels read or write N x D numbers per head 4 times, or 6 times with blocks."""
    alpha = inputs.alpha
    beta = inputs.beta
    if alpha is None or beta is None:
        table = calibration_table(inputs.q.shape[-1], inputs.q.device)
        alpha, beta = match_moments(inputs.q, inputs.k, inputs.padding, table)
    q, k, v = aligned(*inputs[:3])
    padding = mask_bytes(inputs.padding)
    with device_of(q):
        if exchange is None:
            state = _empty_state(q)
            _compute_state(k, v, padding, beta.contiguous(), state)
        else:
            state = _exchanged_state(k, v, padding, beta.contiguous(), exchange)
        call = inputs._replace(q=q, k=k, v=v, alpha=alpha.contiguous(), beta=beta.contiguous())
        if spec.form == JOINT:
            out = joint_out(spec, call, padding, state)
        else:
            out = _hybrid_out(spec, call, padding, state)
    return out, alpha, beta, state


def _compute_state(
    k: Tensor, v: Tensor, padding: Tensor | None, beta: Tensor, state: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Compute the state of the keys, and write it to the tensors in `state`.

    The state has three parts, m, log_key_sum and S, which forward_kernels.py defines.

    Args:
        k, v: (B, H, N, D), as `aligned` returns them.
        padding: bytes (B, N), 1 = padded, or None.
        beta: (B, H) float32, contiguous.
        state: tensors like those of `_empty_state`, which are overwritten. S has the dtype of q or is float32.
    """
    batch, heads, length, dim = k.shape
    bh = batch * heads
    splits, tokens = split_tokens(length, dim)
    parts = state
    if splits > 1:
        parts = (workspace(k, bh, splits, dim), workspace(k, bh, splits, dim), workspace(k, bh, splits, dim, dim))
    forward_kernels._lln_state_kernel[bh, splits](
        k,
        v,
        padding,
        beta,
        *parts,
        *strides(k),
        heads,
        length,
        tokens,
        FINAL=splits == 1,
        **kernel_options(k, tiles_for(k).state),
    )
    if splits > 1:
        forward_kernels._lln_combine_kernel[bh, dim * dim // 256](
            *parts, *state, splits, D=dim, COLS=256, ROWS=16, num_warps=4
        )


def _exchanged_state(
    k: Tensor, v: Tensor, padding: Tensor | None, beta: Tensor, exchange: Exchange
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the state over the keys of all workers: m, log_key_sum and S, in the shapes and dtypes of `_empty_state`.

    The workers exchange three float32 tensors: m in base e, s, and S. The arguments are those of `_compute_state`.
    """
    bh = k.shape[0] * k.shape[1]
    dim = k.shape[3]
    m = workspace(k, bh, dim)
    log_key_sum = workspace(k, bh, dim)
    state = workspace(k, bh, dim, dim)
    _compute_state(k, v, padding, beta, (m, log_key_sum, state))
    total = log_key_sum.exp2()
    if padding is not None:
        # s must be 0 for a sequence that is all padding, but the kernel stores log_key_sum = 0.
        total *= padding.eq(0).any(dim=1).repeat_interleave(k.shape[1])[:, None]
    m, total, state = exchange.merge_states(m * math.log(2), total, state)
    return m / math.log(2), total.log2().nan_to_num(neginf=0.0), state.to(k.dtype)


def _hybrid_out(spec: Spec, inputs: Inputs, padding: Tensor | None, state: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return LLN or ½ (LLN + block-diagonal softmax), (B, H, N, D), from the state m, log_key_sum and S of the keys."""
    q, k, v, alpha, *_ = inputs
    batch, heads, length, dim = q.shape
    if spec.form == AVERAGE:
        tile = tiles_for(q).diag_out
        chunk = chunk_size(spec.block_size, tile.rows)
        kernel_block_size = spec.block_size
    else:
        tile = tiles_for(q).out
        chunk = chunk_size(None, tile.rows)
        kernel_block_size = 0
    out = torch.empty_like(q)
    forward_kernels._lln_out_kernel[batch * heads, triton.cdiv(length, chunk)](
        q,
        k,
        v,
        padding,
        alpha,
        *state,
        inputs.seed,
        out,
        *strides(q),
        *strides(out),
        heads,
        length,
        SCALE=dim**-0.5,
        DROPOUT=spec.dropout,
        BLOCK=kernel_block_size,
        CHUNK=chunk,
        **kernel_options(q, tile),
    )
    return out


def backward(
    spec: Spec,
    inputs: Inputs,
    saved: Sequence[Tensor],
    grad: Tensor,
    needed: Sequence[bool],
    exchange: Exchange | None = None,
) -> Sequence[Tensor | None]:
    """See `Backend.backward`. The kernels read or write N x D numbers per head 7, 9 (blocks) or 13 times (joint).

    For ½ (LLN + block-diagonal softmax), the gradients of α and β are both computed if either of them is needed.
    """
    q, k, v = aligned(*inputs[:3])
    if grad.stride(-1) != 1:  # an expanded gradient, such as that of .sum()
        grad = grad.contiguous()
    assert inputs.alpha is not None
    assert inputs.beta is not None
    alpha = inputs.alpha.contiguous()
    beta = inputs.beta.contiguous()
    padding = mask_bytes(inputs.padding)
    with device_of(q):
        if spec.form == JOINT:
            call = inputs._replace(q=q, k=k, v=v, alpha=alpha, beta=beta)
            return joint_backward(spec, call, padding, saved, grad, needed)
        m, log_key_sum, state = saved
        tensors = _BackwardInputs(
            q,
            k,
            v,
            alpha,
            beta,
            padding,
            spec,
            inputs.seed,
            exchange,
            m,
            log_key_sum,
            state,
            grad,
            needed[0],
            needed[1],
        )
        if spec.form == AVERAGE:
            return *_lln_diag_backward(tensors), None
        return *_lln_backward(tensors), None


class _BackwardInputs(NamedTuple):
    """The inputs of the forward pass, the m, log_key_sum and state that it saved, and `do`, the output's gradient."""

    q: Tensor
    k: Tensor
    v: Tensor
    alpha: Tensor
    beta: Tensor
    padding: Tensor | None
    spec: Spec
    seed: Tensor | None
    exchange: Exchange | None
    m: Tensor
    log_key_sum: Tensor
    state: Tensor
    do: Tensor
    needs_alpha: bool
    needs_beta: bool


def _lln_backward(inputs: _BackwardInputs) -> Sequence[Tensor | None]:
    """Return the gradients of q, k, v, α and β for LLN without blocks.

    The first three are (B, H, N, D). The last two are (B, H), or None if they are not needed.
    """
    k = inputs.k
    batch, heads, length, _ = k.shape
    dq = torch.empty_like(inputs.q)
    dk = torch.empty_like(k)
    dv = torch.empty_like(inputs.v)
    partial_dalpha = None
    if inputs.needs_alpha:
        splits, _ = split_tokens(length, k.shape[3])
        partial_dalpha = workspace(k, batch * heads, splits)
    g, grad_state = _compute_grad_state(inputs, dq, partial_dalpha)
    tile = tiles_for(k).dkv
    chunk = chunk_size(None, tile.rows)
    grid = (batch * heads, triton.cdiv(length, chunk))
    partial_dbeta = None
    if inputs.needs_beta:
        partial_dbeta = workspace(k, *grid)
    backward_kernels._lln_dkv_kernel[grid](
        k,
        inputs.v,
        inputs.padding,
        inputs.beta,
        inputs.m,
        inputs.log_key_sum,
        g,
        grad_state,
        dk,
        dv,
        partial_dbeta,
        *strides(k),
        *strides(dk),
        heads,
        length,
        CHUNK=chunk,
        **kernel_options(k, tile),
    )
    return dq, dk, dv, _sum_programs(partial_dalpha, inputs.alpha), _sum_programs(partial_dbeta, inputs.beta)


def _lln_diag_backward(inputs: _BackwardInputs) -> Sequence[Tensor | None]:
    """Return the gradients of q, k, v, α and β for ½ (LLN + block-diagonal softmax).

    The first three are (B, H, N, D). The last two are (B, H), or both None if neither of them is needed.
    """
    q = inputs.q
    batch, heads, length, dim = q.shape
    block_size = inputs.spec.block_size
    dq = torch.empty_like(q)
    dk = torch.empty_like(inputs.k)
    dv = torch.empty_like(inputs.v)
    g, grad_state = _compute_grad_state(inputs)
    tile = tiles_for(q).for_block_size("diag_bwd", block_size)
    chunk = chunk_size(block_size, tile.rows)
    grid = (batch * heads, triton.cdiv(length, chunk))
    partial_dalpha = None
    partial_dbeta = None
    if inputs.needs_alpha or inputs.needs_beta:
        partial_dalpha = workspace(q, *grid)
        partial_dbeta = workspace(q, *grid)
    lse = None
    delta = None
    if chunk > tile.rows:  # the statistics of the queries do not fit in one tile
        lse, delta = workspace(q, 2, batch * heads, length)
    diag_backward_kernels._lln_diag_bwd_kernel[grid](
        q,
        inputs.k,
        inputs.v,
        inputs.do,
        inputs.padding,
        inputs.alpha,
        inputs.beta,
        inputs.m,
        inputs.log_key_sum,
        inputs.state,
        g,
        grad_state,
        inputs.seed,
        lse,
        delta,
        dq,
        dk,
        dv,
        partial_dalpha,
        partial_dbeta,
        *strides(q),
        *strides(inputs.do),
        *strides(dq),
        heads,
        length,
        SCALE=dim**-0.5,
        DROPOUT=inputs.spec.dropout,
        BLOCK=block_size,
        CHUNK=chunk,
        **kernel_options(q, tile),
    )
    return dq, dk, dv, _sum_programs(partial_dalpha, inputs.alpha), _sum_programs(partial_dbeta, inputs.beta)


def _compute_grad_state(
    inputs: _BackwardInputs, dq: Tensor | None = None, partial_dalpha: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the sums over the queries that backward_kernels.py defines.

    Args:
        inputs: the inputs of the backward pass. With an exchange, the sums run over the queries of all workers.
        dq: None, or (B, H, N, D) to be overwritten with the gradient of q; only for LLN without blocks.
        partial_dalpha: None, or (B H, splits) float32 to be overwritten with the part of dα of each split. It
            requires dq.

    Returns: g (B H, D) in float32, and state_scale · dS / s (B H, D, D) in the dtype of q.
    """
    q = inputs.q
    batch, heads, length, dim = q.shape
    bh = batch * heads
    splits, tokens = split_tokens(length, dim)
    exchange = inputs.exchange
    g = workspace(q, bh, dim)
    grad_state = torch.empty_like(inputs.state)
    final = splits == 1 and exchange is None
    parts = (g, grad_state)
    if not final:
        parts = (workspace(q, bh, splits, dim), workspace(q, bh, splits, dim, dim))
    dq_strides = strides(q) if dq is None else strides(dq)
    backward_kernels._lln_dstate_kernel[bh, splits](
        q,
        inputs.do,
        inputs.padding,
        inputs.alpha,
        inputs.m,
        inputs.log_key_sum,
        inputs.state,
        *parts,
        dq,
        partial_dalpha,
        *strides(q),
        *strides(inputs.do),
        *dq_strides,
        heads,
        length,
        tokens,
        WEIGHT=WEIGHTS[inputs.spec.form][0],
        FINAL=final,
        **kernel_options(q, tiles_for(q).dstate),
    )
    if exchange is not None:
        # The sum over the splits and the workers takes the place of a single split.
        grad_state_sum, g_sum = exchange.sum(parts[1].sum(dim=1), parts[0].sum(dim=1))
        parts = (g_sum, grad_state_sum)
        splits = 1
    if not final:
        backward_kernels._lln_dcombine_kernel[bh, dim * dim // 256](
            *parts,
            inputs.log_key_sum,
            inputs.state,
            g,
            grad_state,
            length,
            splits,
            WEIGHT=WEIGHTS[inputs.spec.form][0],
            D=dim,
            COLS=256,
            ROWS=16,
            num_warps=4,
        )
    return g, grad_state


def _sum_programs(partial: Tensor | None, like: Tensor) -> Tensor | None:
    """Sum the parts (B H, programs) of the programs, always in the same order.

    Returns: the sums in the shape (B, H) of `like`, or None if `partial` is None.
    """
    if partial is None:
        return None
    return partial.sum(-1).view_as(like)


def match_moments(q: Tensor, k: Tensor, padding: Tensor | None, table: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Compute α = σ̃ / (√2 σ_q) and β = σ̃ / (√2 σ_k) by moment matching; see `Backend.match_moments`.

    σ_q and σ_k are the population standard deviations over the features and the tokens of a sequence and head, without
    padding tokens; at least 1e-6. log σ̃² is interpolated linearly at log s with s = σ_q² σ_k². Outside the table, the
    nearest segment continues, up to log σ̃² = 24.

    Args:
        q, k: (B, H, N, D) with any strides.
        padding: bool (B, N), True = padded, or None.
        table: ascending log s and log σ̃², both (T,) with T >= 2. They are copied to the device of q if necessary.

    Returns: α and β, both (B, H) in float32, without gradient.
    """
    q, k = aligned(q, k)
    padding = mask_bytes(padding)
    batch, heads, length, dim = q.shape
    splits, tokens = split_tokens(length, dim)
    table = [x.to(device=q.device, dtype=torch.float32).contiguous() for x in table]
    size = len(table[0])
    size_2 = triton.next_power_of_2(size)
    alpha = workspace(q, batch, heads)
    beta = workspace(q, batch, heads)
    part = None
    if splits > 1:
        part = workspace(q, 5, batch * heads, splits)
    with device_of(q):
        moment_kernels._moments_kernel[batch * heads, splits](
            q,
            k,
            padding,
            *table,
            part,
            alpha,
            beta,
            *strides(q),
            heads,
            length,
            tokens,
            SIZE=size,
            SIZE_2=size_2,
            D=dim,
            ROWS=64,
            FINAL=splits == 1,
            num_warps=4,
            num_stages=2,
        )
        if splits > 1:
            moment_kernels._moments_combine_kernel[(batch * heads,)](
                part,
                *table,
                alpha,
                beta,
                splits,
                SPLITS_2=triton.next_power_of_2(splits),
                SIZE=size,
                SIZE_2=size_2,
                num_warps=1,
            )
    return alpha, beta
