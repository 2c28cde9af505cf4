"""LLN and LLN+Diag attention and moment matching on the GPU: host side of the Triton kernels, on torch and triton only.

Nothing here waits for the device, every launch depends on shapes alone (so CUDA graphs can capture it), and the number
of splits of the tokens depends on N and D alone, so that a sentence gets the same bits whatever else is in the batch.
"""

import torch
import triton
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from lln_fairseq.ops import lln_triton_backward as backward_kernels
from lln_fairseq.ops import lln_triton_diag_backward as diag_backward_kernels
from lln_fairseq.ops import lln_triton_forward as forward_kernels
from lln_fairseq.ops import lln_triton_moments as moment_kernels
from lln_fairseq.ops.lln_triton_launch import (
    aligned,
    check_inputs,
    chunk_of,
    device_of,
    dot_options,
    is_supported,
    mask_bytes,
    per_head,
    split_tokens,
    strides,
    tiles_for,
    workspace,
)

__all__ = ["is_supported", "lln_attention", "lln_diag_attention", "match_moments"]


def _state(k: Tensor, v: Tensor, pad: Tensor | None, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """m, s (B H, D) float32 and S (B H, D, D) in the dtype of v: see lln_triton_forward."""
    (batch, heads, length, dim), tile = k.shape, tiles_for(k).state
    bh, (splits, tokens) = batch * heads, split_tokens(length, dim)
    m, s = workspace(k, bh, dim), workspace(k, bh, dim)
    state = torch.empty((bh, dim, dim), dtype=v.dtype, device=v.device)
    parts = (m, s, state)
    if splits > 1:
        parts = (workspace(k, bh, splits, dim), workspace(k, bh, splits, dim), workspace(k, bh, splits, dim, dim))
    forward_kernels._lln_state_kernel[bh, splits](
        k, v, pad, beta, *parts, *strides(k), heads, length, tokens,
        D=dim, ROWS=tile.rows, HAS_PAD=pad is not None, FINAL=splits == 1, **dot_options(k),
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
        q, k, v = aligned(q, k, v)
        alpha, beta = alpha.contiguous(), beta.contiguous()
        batch, heads, length, dim = q.shape
        tile = tiles_for(q).out if block_size is None else tiles_for(q).diag_out
        out = torch.empty_like(q)
        chunk = chunk_of(block_size, tile.rows)
        with device_of(q):
            m, s, state = _state(k, v, pad, beta)
            forward_kernels._lln_out_kernel[batch * heads, triton.cdiv(length, chunk)](
                q, k, v, pad, alpha, m, s, state, seed, out, *strides(q), *strides(out), heads, length,
                SCALE=dim**-0.5, DROPOUT=dropout_p, BLOCK=block_size or 0, CHUNK=chunk,
                D=dim, ROWS=tile.rows, HAS_PAD=pad is not None, **dot_options(q),
                num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
        ctx.save_for_backward(q, k, v, alpha, beta, pad, seed, m, s, state)
        ctx.block_size, ctx.dropout_p = block_size, dropout_p
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, do: Tensor) -> tuple[Tensor | None, ...]:
        q = ctx.saved_tensors[0]
        if do.stride(-1) != 1:  # an expanded gradient, of .sum() say
            do = do.contiguous()
        with device_of(q):
            gradients = (_lln_backward if ctx.block_size is None else _lln_diag_backward)(ctx, do)
        return (*gradients, None, None, None, None)


def _dstate(ctx: FunctionCtx, do: Tensor, share: float, dq: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """g (B H, D) float32 and c dS / s (B H, D, D) of lln_triton_backward; with dq: filled in, and dα (B H,)."""
    q, _, _, alpha, _, _, _, m, s, state = ctx.saved_tensors
    (batch, heads, length, dim), tile = q.shape, tiles_for(q).dstate
    bh, (splits, tokens) = batch * heads, split_tokens(length, dim)
    g, dstate = workspace(q, bh, dim), torch.empty_like(state)
    parts = (g, dstate) if splits == 1 else (workspace(q, bh, splits, dim), workspace(q, bh, splits, dim, dim))
    dalpha = workspace(q, bh, splits) if dq is not None and ctx.needs_input_grad[3] else None
    out = q if dq is None else dq
    backward_kernels._lln_dstate_kernel[bh, splits](
        q, do, alpha, m, s, state, *parts, dq, dalpha, *strides(q), *strides(do), *strides(out),
        heads, length, tokens,
        SHARE=share, WRITE_DQ=dq is not None, WRITE_DALPHA=dalpha is not None, FINAL=splits == 1,
        D=dim, ROWS=tile.rows, SLICE=min(dim, 64), **dot_options(q), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        backward_kernels._lln_dcombine_kernel[bh, dim * dim // 256](
            *parts, s, state, g, dstate, length, splits, SHARE=share, D=dim, COLS=256, ROWS=16, num_warps=4
        )
    return g, dstate, dalpha


def _summed(partial: Tensor | None, like: Tensor) -> Tensor | None:
    """Σ over the programs, in a fixed order, in the shape (B, H)."""
    return None if partial is None else partial.sum(-1).view_as(like)


def _lln_backward(ctx: FunctionCtx, do: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, alpha, beta, pad, _, m, s, _ = ctx.saved_tensors
    (batch, heads, length, dim), tile = q.shape, tiles_for(q).dkv
    dq, dk, dv = torch.empty_like(q), torch.empty_like(q), torch.empty_like(q)
    g, dstate, dalpha = _dstate(ctx, do, 1.0, dq)
    chunk = chunk_of(None, tile.rows)
    grid = (batch * heads, triton.cdiv(length, chunk))
    dbeta = workspace(q, *grid) if ctx.needs_input_grad[4] else None
    backward_kernels._lln_dkv_kernel[grid](
        k, v, pad, beta, m, s, g, dstate, dk, dv, dbeta, *strides(q), *strides(dk), heads, length,
        WRITE_DBETA=dbeta is not None, CHUNK=chunk, D=dim, ROWS=tile.rows, SLICE=min(dim, 64),
        HAS_PAD=pad is not None, **dot_options(q), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return dq, dk, dv, _summed(dalpha, alpha), _summed(dbeta, beta)


def _lln_diag_backward(ctx: FunctionCtx, do: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, alpha, beta, pad, seed, m, s, state = ctx.saved_tensors
    (batch, heads, length, dim), tile = q.shape, tiles_for(q).diag_bwd
    if ctx.block_size > tile.rows:
        tile = tiles_for(q).diag_bwd_long
    dq, dk, dv = torch.empty_like(q), torch.empty_like(q), torch.empty_like(q)
    g, dstate, _ = _dstate(ctx, do, 0.5, None)
    chunk = chunk_of(ctx.block_size, tile.rows)
    grid = (batch * heads, triton.cdiv(length, chunk))
    wanted = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
    dalpha, dbeta = (workspace(q, *grid), workspace(q, *grid)) if wanted else (None, None)
    statistics = workspace(q, 2, batch * heads, length) if chunk > tile.rows else (None, None)
    diag_backward_kernels._lln_diag_bwd_kernel[grid](
        q, k, v, do, pad, alpha, beta, m, s, state, g, dstate, seed, *statistics, dq, dk, dv, dalpha, dbeta,
        *strides(q), *strides(do), *strides(dq), heads, length,
        SCALE=dim**-0.5, DROPOUT=ctx.dropout_p, BLOCK=ctx.block_size, CHUNK=chunk, WRITE_AB=wanted,
        D=dim, ROWS=tile.rows, SLICE=min(dim, 64), HAS_PAD=pad is not None, **dot_options(q),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return dq, dk, dv, _summed(dalpha, alpha), _summed(dbeta, beta)


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
    check_inputs(q, k, v, key_padding_mask)
    pad = mask_bytes(key_padding_mask)
    return LLNFunction.apply(q, k, v, per_head(alpha, q), per_head(beta, q), pad, None, 0.0, None)


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
    check_inputs(q, k, v, key_padding_mask)
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
    pad = mask_bytes(key_padding_mask)
    return LLNFunction.apply(q, k, v, per_head(alpha, q), per_head(beta, q), pad, block_size, float(dropout_p), seed)


@torch.no_grad()
def match_moments(
    q: Tensor, k: Tensor, key_padding_mask: Tensor | None, log_s_table: Tensor, log_sigma2_table: Tensor
) -> tuple[Tensor, Tensor]:
    """α = σ̃ / (√2 σ_q), β = σ̃ / (√2 σ_k), float32 (B, H), without gradient and without waiting for the device.

    σ: population standard deviation about the mean over the real tokens and the features of a (batch, head), at least
    1e-6; log σ̃² piecewise linear in log s, s = σ_q²σ_k², through the increasing table (T,), T >= 2, its end slopes
    continued (arXiv 2311.13541, section 4.1).
    """
    check_inputs(q, k, k, key_padding_mask)
    q, k = aligned(q, k)
    pad = mask_bytes(key_padding_mask)
    batch, heads, length, dim = q.shape
    splits, tokens = split_tokens(length, dim)
    table = [x.to(device=q.device, dtype=torch.float32).contiguous() for x in (log_s_table, log_sigma2_table)]
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
