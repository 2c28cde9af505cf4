"""Triton kernel of the second backward pass of LLN+Diag: q, k, v, do -> dq, dk, dv, dα, dβ in one launch.

The LLN part follows backward_kernels.py, whose first pass made dS and g. The block-diagonal part, with p the softmax of
x_ij = q_i k_j · SCALE over the block of query i: dp = do vᵀ, δ_i = Σ_j p dp, dx = p (dp - δ), dq = dx k · SCALE,
dk = dxᵀ q · SCALE, dv = pᵀ do. A, dA, W and p are recomputed; nothing as long as N was saved but q, k and v.
"""

# ruff: noqa: ANN001, ANN202 - arguments of kernels have no Python types

import triton
import triton.language as tl

from lln_fairseq.ops.backends.triton.backward_kernels import (
    _exp_below_1,
    _exp_keys,
    _keys_times_state,
    _state_scale,
    _times_state_transposed,
)
from lln_fairseq.ops.backends.triton.forward_kernels import (
    LOG2E,
    _dropout_scale,
    _features,
    _inverse,
    _key_tile,
    _log_normaliser,
    _log_sum,
    _offset,
    _rows,
    _scores,
    _softmax_step,
    _usable,
)


@triton.jit
def _diag_dq(
    b_q, b_do, k, v, pad, seed, i_bh, i_b, o_q, start, end, stride_n, N,
    SCALE: tl.constexpr, DROPOUT: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, HAS_PAD: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of the queries o_q: Σ_j p (dp - δ) k_j (ROWS, D), log-normaliser and δ = Σ_j p dp (ROWS,) of their softmax."""
    b_m = tl.full([ROWS], -1e30, tl.float32)
    b_l = tl.zeros([ROWS], tl.float32)
    b_delta = tl.zeros([ROWS], tl.float32)
    for i_r in range(0, CHUNK, ROWS):
        o_k, real, b_k, b_v = _key_tile(k, v, pad, i_b, start + i_r, end, stride_n, N, D, ROWS, HAS_PAD)
        # (queries, keys)
        b_x = _scores(b_q, b_k.to(DOT), o_q, o_k, real, BLOCK, CHUNK, PRECISION)
        b_dp = tl.dot(b_do, tl.trans(b_v.to(DOT)), input_precision=PRECISION)
        if DROPOUT > 0:
            b_dp *= _dropout_scale(seed, i_bh, o_q[:, None], o_k[None, :], DROPOUT)
        b_p, b_shrink, b_m, b_l = _softmax_step(b_x, b_m, b_l, SCALE)
        b_delta = b_delta * b_shrink + tl.sum(b_p * b_dp, 1)
    b_delta *= _inverse(b_l)
    b_lse = _log_sum(b_m, b_l)

    b_dq = tl.zeros([ROWS, D], tl.float32)
    for i_r in range(0, CHUNK, ROWS):
        o_k, real, b_k, b_v = _key_tile(k, v, pad, i_b, start + i_r, end, stride_n, N, D, ROWS, HAS_PAD)
        b_x = _scores(b_q, b_k.to(DOT), o_q, o_k, real, BLOCK, CHUNK, PRECISION)
        b_dp = tl.dot(b_do, tl.trans(b_v.to(DOT)), input_precision=PRECISION)
        if DROPOUT > 0:
            b_dp *= _dropout_scale(seed, i_bh, o_q[:, None], o_k[None, :], DROPOUT)
        b_dx = _exp_below_1(b_x * (SCALE * LOG2E) - b_lse[:, None]) * (b_dp - b_delta[:, None])
        b_dq = tl.dot(b_dx.to(DOT), b_k.to(DOT), acc=b_dq, input_precision=PRECISION)
    return b_dq, b_lse, b_delta


@triton.jit(do_not_specialize=["N"])
def _lln_diag_bwd_kernel(
    q, k, v, do, pad, alpha, beta, m, log_s, S, g, dS, seed, lse, delta, dq, dk, dv, dalpha, dbeta,
    stride_b, stride_h, stride_n, stride_do_b, stride_do_h, stride_do_n, stride_out_b, stride_out_h, stride_out_n, H, N,
    SCALE: tl.constexpr, DROPOUT: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, WRITE_AB: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, SLICE: tl.constexpr, HAS_PAD: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk, dv of ½ (LLN + Diag) and the sums Σ q dx, Σ k dy of each program.

    grid (B H, ⌈N / CHUNK⌉): a program owns whole blocks, so nothing it needs is written by another. First the rows are
    queries (dq, and the statistics of each row's softmax), then keys (dk, dv); tiles are loaded anew in between, which
    is what keeps the registers from spilling. lse, delta: (B H, N) float32, the statistics where they outgrow one tile.
    """
    i_bh, i_c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_b = i_bh // H
    offset = _offset(i_bh, stride_b, stride_h, H)
    offset_out = _offset(i_bh, stride_out_b, stride_out_h, H)
    p_do = do + _offset(i_bh, stride_do_b, stride_do_h, H)
    start = i_c * CHUNK
    end = tl.minimum(start + CHUNK, N)
    o_d = tl.arange(0, D)

    b_alpha = tl.load(alpha + i_bh)
    b_lse = tl.zeros([ROWS], tl.float32)
    b_delta = tl.zeros([ROWS], tl.float32)
    b_sum = tl.zeros([ROWS], tl.float32)
    for i_r in range(0, CHUNK, ROWS):
        i_t = start + i_r
        o_q = i_t + tl.arange(0, ROWS)
        inside = o_q < end
        # (ROWS, D)
        b_q = tl.load(_rows(q + offset, i_t, stride_n, ROWS, D), mask=inside[:, None], other=0.0)
        usable = _usable(b_q, pad, i_b, o_q, end, N, HAS_PAD)
        if HAS_PAD:
            b_q = tl.where(usable[:, None], b_q, 0.0)
        b_do = tl.load(_rows(p_do, i_t, stride_do_n, ROWS, D), mask=inside[:, None], other=0.0).to(DOT)
        b_dq, b_lse, b_delta = _diag_dq(
            b_q.to(DOT), b_do, k + offset, v + offset, pad, seed, i_bh, i_b, o_q, start, end, stride_n, N,
            SCALE, DROPOUT, BLOCK, CHUNK, D, ROWS, HAS_PAD, DOT, PRECISION,
        )  # fmt: skip
        b_da = _times_state_transposed(
            tl.zeros([ROWS, D], tl.float32), p_do + i_t.to(tl.int64) * stride_do_n, inside, S + i_bh * D * D,
            stride_do_n, D, ROWS, SLICE, DOT, PRECISION,
        )  # fmt: skip
        if HAS_PAD:
            b_lse = tl.where(usable, b_lse, float("inf"))  # no weight for a query that cannot be used
        b_q = tl.load(_rows(q + offset, i_t, stride_n, ROWS, D), mask=usable[:, None], other=0.0)
        b_a = _features(b_q, b_alpha, _log_normaliser(m, log_s, i_bh, D))
        b_dx = 0.5 * b_a * (b_da - tl.sum(b_a * b_da, 1)[:, None])
        b_dq = b_alpha * b_dx + (0.5 * SCALE) * b_dq
        p_dq = _rows(dq + offset_out, i_t, stride_out_n, ROWS, D)
        tl.store(p_dq, b_dq.to(dq.dtype.element_ty), mask=inside[:, None])
        if WRITE_AB:
            b_sum += tl.sum(b_q.to(tl.float32) * b_dx, 1)
        if CHUNK > ROWS:
            tl.store(lse + i_bh * N + o_q, b_lse, mask=inside)
            tl.store(delta + i_bh * N + o_q, b_delta, mask=inside)
    if WRITE_AB:
        tl.store(dalpha + i_bh * tl.num_programs(1) + i_c, tl.sum(b_sum, 0))
    if CHUNK > ROWS:
        tl.debug_barrier()  # the statistics just stored are read by other threads of this program below

    b_beta = tl.load(beta + i_bh)
    scale = _state_scale(tl.load(log_s + i_bh * D + o_d), N)
    unscale = 1.0 / scale
    b_sum = tl.zeros([ROWS], tl.float32)
    for i_r in range(0, CHUNK, ROWS):
        i_t = start + i_r
        o_k, real, b_k, b_v = _key_tile(k + offset, v + offset, pad, i_b, i_t, end, stride_n, N, D, ROWS, HAS_PAD)
        inside = (o_k < end)[:, None]
        b_dkd = tl.zeros([ROWS, D], tl.float32)
        b_dvd = tl.zeros([ROWS, D], tl.float32)
        for i_j in range(0, CHUNK, ROWS):
            o_q = start + i_j + tl.arange(0, ROWS)
            # (queries, D)
            if CHUNK > ROWS:
                b_lse = tl.load(lse + i_bh * N + o_q, mask=o_q < end, other=0.0)
            usable = o_q < end
            if HAS_PAD:
                usable = usable & (b_lse != float("inf"))
            b_q = tl.load(_rows(q + offset, start + i_j, stride_n, ROWS, D), mask=usable[:, None], other=0.0)
            b_do = tl.load(_rows(p_do, start + i_j, stride_do_n, ROWS, D), mask=(o_q < end)[:, None], other=0.0)
            if CHUNK > ROWS:
                b_delta = tl.load(delta + i_bh * N + o_q, mask=o_q < end, other=0.0)
            # (queries, keys), not transposed: then a thread needs the statistics of few queries
            b_x = _scores(b_q.to(DOT), b_k.to(DOT), o_q, o_k, real, BLOCK, CHUNK, PRECISION)
            b_p = _exp_below_1(b_x * (SCALE * LOG2E) - b_lse[:, None])
            b_dp = tl.dot(b_do.to(DOT), tl.trans(b_v.to(DOT)), input_precision=PRECISION)
            b_pd = b_p
            if DROPOUT > 0:
                b_keep = _dropout_scale(seed, i_bh, o_q[:, None], o_k[None, :], DROPOUT)
                b_dp *= b_keep
                b_pd = b_p * b_keep
            b_dvd = tl.dot(tl.trans(b_pd.to(DOT)), b_do.to(DOT), acc=b_dvd, input_precision=PRECISION)
            b_dx = b_p * (b_dp - b_delta[:, None])
            b_dkd = tl.dot(tl.trans(b_dx.to(DOT)), b_q.to(DOT), acc=b_dkd, input_precision=PRECISION)
        p_k = k + offset + i_t.to(tl.int64) * stride_n
        p_v = v + offset + i_t.to(tl.int64) * stride_n
        b_dv = unscale * _keys_times_state(
            (0.5 * scale) * b_dvd, p_k, real, b_beta, m + i_bh * D, dS + i_bh * D * D, stride_n,
            D, ROWS, SLICE, DOT, PRECISION,
        )  # fmt: skip
        tl.store(_rows(dv + offset_out, i_t, stride_out_n, ROWS, D), b_dv.to(dv.dtype.element_ty), mask=inside)
        b_dw = _times_state_transposed(
            tl.zeros([ROWS, D], tl.float32), p_v, real, dS + i_bh * D * D, stride_n, D, ROWS, SLICE, DOT, PRECISION
        )
        b_dw = unscale * b_dw - tl.load(g + i_bh * D + o_d)[None, :]
        b_dy = _exp_keys(p_k, o_d, real, b_beta, m + i_bh * D, stride_n, ROWS) * b_dw
        b_dkd = b_beta * b_dy + (0.5 * SCALE) * b_dkd
        tl.store(_rows(dk + offset_out, i_t, stride_out_n, ROWS, D), b_dkd.to(dk.dtype.element_ty), mask=inside)
        if WRITE_AB:
            b_sum += tl.sum(b_k.to(tl.float32) * b_dy, 1)
    if WRITE_AB:
        tl.store(dbeta + i_bh * tl.num_programs(1) + i_c, tl.sum(b_sum, 0))
