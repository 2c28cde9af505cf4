"""LLN and LLN+Diag attention and moment matching on the GPU: host side of the Triton kernels, on torch and triton only.

Nothing here waits for the device, every launch depends on shapes alone (so CUDA graphs can capture it), and the number
of splits of the tokens depends on N and D alone, so that a sentence gets the same bits whatever else is in the batch.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from lln_fairseq.ops.backends import HybridSpec
from lln_fairseq.ops.backends.triton import (
    backward_kernels,
    diag_backward_kernels,
    forward_kernels,
    moment_kernels,
)
from lln_fairseq.ops.backends.triton.joint import joint_backward, joint_out
from lln_fairseq.ops.backends.triton.launch import (
    aligned,
    chunk_of,
    device_of,
    dot_options,
    is_supported,
    mask_bytes,
    split_tokens,
    strides,
    tiles_for,
    workspace,
)
from lln_fairseq.ops.exchange import Exchange
from lln_fairseq.ops.moment_matching import calibration_table

__all__ = ["backward", "draw_seed", "empty_results", "empty_saved", "forward", "is_supported", "match_moments"]


def _fill_state(k: Tensor, v: Tensor, pad: Tensor | None, beta: Tensor, state: tuple[Tensor, Tensor, Tensor]) -> None:
    """state: m, log s and S as `empty_saved` makes them."""
    (batch, heads, length, dim), tile = k.shape, tiles_for(k).state
    bh, (splits, tokens) = batch * heads, split_tokens(length, dim)
    parts = state
    if splits > 1:
        parts = (workspace(k, bh, splits, dim), workspace(k, bh, splits, dim), workspace(k, bh, splits, dim, dim))
    forward_kernels._lln_state_kernel[bh, splits](
        k, v, pad, beta, *parts, *strides(k), heads, length, tokens,
        D=dim, ROWS=tile.rows, HAS_PAD=pad is not None, FINAL=splits == 1, **dot_options(k),
        **tile.options,
    )  # fmt: skip
    if splits > 1:
        forward_kernels._lln_combine_kernel[bh, dim * dim // 256](
            *parts, *state, splits, D=dim, COLS=256, ROWS=16, num_warps=4
        )


def _merged_state(
    k: Tensor, v: Tensor, pad: Tensor | None, beta: Tensor, exchange: Exchange
) -> tuple[Tensor, Tensor, Tensor]:
    """The state of all workers' keys: exchanged in float32 with totals in place of logarithms to base 2, S in the dtype
    of k."""
    bh, dim = k.shape[0] * k.shape[1], k.shape[3]
    m, log_s, state = workspace(k, bh, dim), workspace(k, bh, dim), workspace(k, bh, dim, dim)
    _fill_state(k, v, pad, beta, (m, log_s, state))
    total = log_s.exp2()
    if pad is not None:  # of a sequence without a real key it is 0, which has no logarithm
        total *= pad.eq(0).any(dim=1).repeat_interleave(k.shape[1])[:, None]
    top, total, state = exchange.merge_states(m * math.log(2), total, state)
    return top / math.log(2), total.log2().nan_to_num(neginf=0.0), state.to(k.dtype)


def draw_seed(device: torch.device) -> Tensor:
    """A seed on the device: a CUDA graph then draws anew at each replay."""
    return torch.randint(2**62, (1,), device=device)


def forward(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor | None, beta: Tensor | None, mask: Tensor | None, mix: HybridSpec
) -> tuple[Tensor, Tensor, Tensor, Sequence[Tensor]]:
    """LLN alone, ½ (LLN + block-diagonal softmax) or a joint form: 4 or 6 passes over N x D."""
    if alpha is None or beta is None:
        alpha, beta = match_moments(q, k, mask, calibration_table(q.shape[-1], q.device))
    q, k, v = aligned(q, k, v)
    batch, heads, length, dim = q.shape
    block_size, pad = _block_size(mix), mask_bytes(mask)
    tile = tiles_for(q).diag_out if block_size else tiles_for(q).out
    chunk, state = chunk_of(block_size, tile.rows), empty_saved(q, mix)
    with device_of(q):
        if mix.exchange is None:
            _fill_state(k, v, pad, beta.contiguous(), state)
        else:
            state = _merged_state(k, v, pad, beta.contiguous(), mix.exchange)
        if mix.joint:
            out = joint_out(q, k, v, pad, alpha.contiguous(), beta.contiguous(), mix, state)
            return out, alpha, beta, state
        out = torch.empty_like(q)
        forward_kernels._lln_out_kernel[batch * heads, triton.cdiv(length, chunk)](
            q, k, v, pad, alpha.contiguous(), *state, mix.seed, out, *strides(q), *strides(out), heads, length,
            SCALE=dim**-0.5, DROPOUT=mix.dropout_p, BLOCK=block_size or 0, CHUNK=chunk,
            D=dim, ROWS=tile.rows, HAS_PAD=pad is not None, **dot_options(q),
            **tile.options,
        )  # fmt: skip
    return out, alpha, beta, state


def backward(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, mask: Tensor | None, mix: HybridSpec,
    saved: Sequence[Tensor], grad: Tensor, needed: Sequence[bool],
) -> Sequence[Tensor | None]:  # fmt: skip
    """7 or 9 passes over N x D, 13 for a joint form."""
    q, k, v = aligned(q, k, v)
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()  # an expanded one, of .sum() say
    m, log_s, state = saved
    alpha, beta, pad = alpha.contiguous(), beta.contiguous(), mask_bytes(mask)
    if mix.joint:
        with device_of(q):
            return joint_backward(q, k, v, pad, alpha, beta, mix, saved, grad, needed)
    run = _Backward(q, k, v, alpha, beta, pad, mix, m, log_s, state, grad, needed[0], needed[1])
    with device_of(q):
        return *(_lln_diag_backward if mix.diag_weight else _lln_backward)(run), None


def _block_size(mix: HybridSpec) -> int | None:
    return mix.block_size if mix.diag_weight else None


class _Backward(NamedTuple):
    """What a backward pass needs: the inputs, what forward saved, and the incoming gradient."""

    q: Tensor
    k: Tensor
    v: Tensor
    alpha: Tensor
    beta: Tensor
    pad: Tensor | None
    mix: HybridSpec
    m: Tensor
    log_s: Tensor
    state: Tensor
    do: Tensor
    needs_alpha: bool
    needs_beta: bool


def _dstate(run: _Backward, dq: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """g (B H, D) float32 and c dS / s (B H, D, D) of backward_kernels.py; with dq: filled in, and dα (B H,)."""
    q, do, log_s, state, share = run.q, run.do, run.log_s, run.state, run.mix.lln_weight
    (batch, heads, length, dim), tile = q.shape, tiles_for(q).dstate
    bh, (splits, tokens) = batch * heads, split_tokens(length, dim)
    g, dstate, exchange = workspace(q, bh, dim), torch.empty_like(state), run.mix.exchange
    final = splits == 1 and exchange is None
    parts = (g, dstate) if final else (workspace(q, bh, splits, dim), workspace(q, bh, splits, dim, dim))
    dalpha = workspace(q, bh, splits) if dq is not None and run.needs_alpha else None
    out = q if dq is None else dq
    backward_kernels._lln_dstate_kernel[bh, splits](
        q, do, run.pad, run.alpha, run.m, log_s, state, *parts, dq, dalpha, *strides(q), *strides(do), *strides(out),
        heads, length, tokens,
        SHARE=share, WRITE_DQ=dq is not None, WRITE_DALPHA=dalpha is not None, FINAL=final,
        D=dim, ROWS=tile.rows, SLICE=min(dim, 64), HAS_PAD=run.pad is not None, **dot_options(q),
        **tile.options,
    )  # fmt: skip
    if exchange is not None:  # the sum over all workers is one split
        dstate_sum, g_sum = exchange.sum(parts[1].sum(dim=1), parts[0].sum(dim=1))
        parts, splits = (g_sum, dstate_sum), 1
    if not final:
        backward_kernels._lln_dcombine_kernel[bh, dim * dim // 256](
            *parts, log_s, state, g, dstate, length, splits, SHARE=share, D=dim, COLS=256, ROWS=16, num_warps=4
        )
    return g, dstate, dalpha


def _summed(partial: Tensor | None, like: Tensor) -> Tensor | None:
    """Σ over the programs, in a fixed order, in the shape (B, H)."""
    return None if partial is None else partial.sum(-1).view_as(like)


def _lln_backward(run: _Backward) -> Sequence[Tensor | None]:
    q, k, v, alpha, beta, pad, _, m, log_s, *_ = run
    (batch, heads, length, dim), tile = q.shape, tiles_for(q).dkv
    dq, dk, dv = empty_results(q, k, v)
    g, dstate, dalpha = _dstate(run, dq)
    chunk = chunk_of(None, tile.rows)
    grid = (batch * heads, triton.cdiv(length, chunk))
    dbeta = workspace(q, *grid) if run.needs_beta else None
    backward_kernels._lln_dkv_kernel[grid](
        k, v, pad, beta, m, log_s, g, dstate, dk, dv, dbeta, *strides(q), *strides(dk), heads, length,
        WRITE_DBETA=dbeta is not None, CHUNK=chunk, D=dim, ROWS=tile.rows, SLICE=min(dim, 64),
        HAS_PAD=pad is not None, **dot_options(q), **tile.options,
    )  # fmt: skip
    return dq, dk, dv, _summed(dalpha, alpha), _summed(dbeta, beta)


def _lln_diag_backward(run: _Backward) -> Sequence[Tensor | None]:
    q, k, v, alpha, beta, pad, mix, m, log_s, state, do, *_ = run
    (batch, heads, length, dim), tile = q.shape, tiles_for(q).of("diag_bwd", mix.block_size)
    dq, dk, dv = empty_results(q, k, v)
    g, dstate, _ = _dstate(run, None)
    chunk = chunk_of(mix.block_size, tile.rows)
    grid = (batch * heads, triton.cdiv(length, chunk))
    wanted = run.needs_alpha or run.needs_beta
    dalpha, dbeta = (workspace(q, *grid), workspace(q, *grid)) if wanted else (None, None)
    statistics = workspace(q, 2, batch * heads, length) if chunk > tile.rows else (None, None)
    diag_backward_kernels._lln_diag_bwd_kernel[grid](
        q, k, v, do, pad, alpha, beta, m, log_s, state, g, dstate, mix.seed, *statistics, dq, dk, dv, dalpha, dbeta,
        *strides(q), *strides(do), *strides(dq), heads, length,
        SCALE=dim**-0.5, DROPOUT=mix.dropout_p, BLOCK=mix.block_size, CHUNK=chunk, WRITE_AB=wanted,
        D=dim, ROWS=tile.rows, SLICE=min(dim, 64), HAS_PAD=pad is not None, **dot_options(q),
        **tile.options,
    )  # fmt: skip
    return dq, dk, dv, _summed(dalpha, alpha), _summed(dbeta, beta)


def empty_results(q: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
    return [torch.empty_like(x) for x in aligned(q, k, v)]


def empty_saved(q: Tensor, mix: HybridSpec) -> tuple[Tensor, Tensor, Tensor]:
    """m, log s (B H, D) float32 and S (B H, D, D) in the dtype of q: see forward_kernels.py."""
    bh, dim = q.shape[0] * q.shape[1], q.shape[3]
    return workspace(q, bh, dim), workspace(q, bh, dim), q.new_empty(bh, dim, dim)


def match_moments(q: Tensor, k: Tensor, mask: Tensor | None, table: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """α = σ̃ / (√2 σ_q), β = σ̃ / (√2 σ_k), float32 (B, H), without gradient and without waiting for the device.

    σ: population standard deviation about the mean over the real tokens and the features of a (batch, head), at least
    1e-6; log σ̃² piecewise linear in log s, s = σ_q²σ_k², through the increasing table (T,), T >= 2, its end slopes
    continued (arXiv 2311.13541, section 4.1).
    """
    q, k = aligned(q, k)
    pad = mask_bytes(mask)
    batch, heads, length, dim = q.shape
    splits, tokens = split_tokens(length, dim)
    table = [x.to(device=q.device, dtype=torch.float32).contiguous() for x in table]
    size = {"SIZE": len(table[0]), "SIZE_2": triton.next_power_of_2(len(table[0]))}
    alpha, beta = workspace(q, batch, heads), workspace(q, batch, heads)
    part = workspace(q, 5, batch * heads, splits) if splits > 1 else None
    with device_of(q):
        moment_kernels._moments_kernel[batch * heads, splits](
            q, k, pad, *table, part, alpha, beta, *strides(q), heads, length, tokens,
            **size, D=dim, ROWS=64, HAS_PAD=pad is not None, FINAL=splits == 1, num_warps=4, num_stages=2,
        )  # fmt: skip
        if splits > 1:
            moment_kernels._moments_combine_kernel[(batch * heads,)](
                part, *table, alpha, beta, splits, SPLITS_2=triton.next_power_of_2(splits), **size, num_warps=1
            )
    return alpha, beta
