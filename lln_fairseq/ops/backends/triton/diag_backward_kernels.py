"""Triton kernel of the second half of the backward pass of LLN+Diag.

It reads q, k, v and the gradient do of the output, and writes dq, dk, dv, dα and dβ. The formulas of the LLN part are
those of backward_kernels.py, whose kernels have already computed dS and g. For the block-diagonal part, let p be the
softmax of q_i k_j · SCALE over the keys j in the block of query i. Then

    dp = do vᵀ     δ_i = Σ_j p dp     dx = p (dp - δ)     dq = dx k · SCALE     dk = dxᵀ q · SCALE     dv = pᵀ do

A, dA, W and p are computed again: q, k and v are the only tensors as long as the sequence that the forward pass saves.

One program walks over the rows of its chunk twice: first it computes their gradients as queries, then as keys. Both
passes load their tiles themselves. Tiles that stayed in registers from one pass to the next would spill them.

The statistics of a query are lse, the log-normalizer of its softmax in base 2, and delta, its δ.
"""

# ruff: noqa: ANN001, ANN202 - arguments of kernels have no Python types

import triton
import triton.language as tl

from lln_fairseq.ops.backends.triton.backward_kernels import (
    _add_key_features_times_state,
    _add_times_state_T,
    _exp2_at_most_1,
    _load_key_features,
    _state_scale,
)
from lln_fairseq.ops.backends.triton.forward_kernels import (
    LOG2E,
    LOWEST,
    _block_scores,
    _dot,
    _dropout_scale,
    _head_offset,
    _is_usable_query,
    _load_keys,
    _load_log_sum,
    _log_sum_exp,
    _query_features,
    _reciprocal_or_zero,
    _row_pointers,
    _softmax_step,
)


@triton.jit
def _block_dq(
    b_q,
    b_do,
    k,
    v,
    padding,
    seed,
    i_bh,
    i_b,
    o_q,
    start,
    end,
    stride_n,
    N,
    SCALE: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Compute the block-diagonal part of dq for a tile of queries.

    Args:
        b_q, b_do: (ROWS, D) queries and gradient of their output, in the dtype DOT.
        o_q: (ROWS,) indices of the queries.

    Returns:
        dx k, (ROWS, D) float32, not yet multiplied by SCALE, then lse and δ of the queries, both (ROWS,) float32.
    """
    b_row_max = tl.full([ROWS], LOWEST, tl.float32)
    b_row_sum = tl.zeros([ROWS], tl.float32)
    b_delta = tl.zeros([ROWS], tl.float32)
    for i_r in range(0, CHUNK, ROWS):
        o_k, real, b_k, b_v = _load_keys(k, v, padding, i_b, start + i_r, end, stride_n, N, D, ROWS)
        # (queries, keys)
        b_scores = _block_scores(b_q, b_k.to(DOT), o_q, o_k, real, BLOCK, CHUNK)
        b_dp = _dot(b_do, tl.trans(b_v.to(DOT)))
        if DROPOUT > 0:
            b_dp *= _dropout_scale(seed, i_bh, o_q[:, None], o_k[None, :], DROPOUT)
        b_p, b_rescale, b_row_max, b_row_sum = _softmax_step(b_scores, b_row_max, b_row_sum, SCALE)
        # (queries,)
        b_delta = b_delta * b_rescale + tl.sum(b_p * b_dp, 1)
    b_delta *= _reciprocal_or_zero(b_row_sum)
    b_lse = _log_sum_exp(b_row_max, b_row_sum)

    b_dq = tl.zeros([ROWS, D], tl.float32)
    for i_r in range(0, CHUNK, ROWS):
        o_k, real, b_k, b_v = _load_keys(k, v, padding, i_b, start + i_r, end, stride_n, N, D, ROWS)
        # (queries, keys)
        b_scores = _block_scores(b_q, b_k.to(DOT), o_q, o_k, real, BLOCK, CHUNK)
        b_dp = _dot(b_do, tl.trans(b_v.to(DOT)))
        if DROPOUT > 0:
            b_dp *= _dropout_scale(seed, i_bh, o_q[:, None], o_k[None, :], DROPOUT)
        b_dx = _exp2_at_most_1(b_scores * (SCALE * LOG2E) - b_lse[:, None]) * (b_dp - b_delta[:, None])
        # (queries, D)
        b_dq = _dot(b_dx.to(DOT), b_k.to(DOT), acc=b_dq)
    return b_dq, b_lse, b_delta


@triton.jit
def _block_dkv(
    b_k,
    b_v,
    real,
    o_k,
    q,
    do,
    b_lse,
    b_delta,
    lse,
    delta,
    seed,
    i_bh,
    start,
    end,
    stride_n,
    stride_do_n,
    N,
    SCALE: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PADDED: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Compute the block-diagonal parts of dk and dv for a tile of keys.

    Args:
        b_k, b_v: (ROWS, D) keys and values.
        o_k: (ROWS,) indices of the keys.
        b_lse, b_delta: (ROWS,) statistics of the queries if the chunk has a single tile; otherwise not used.
        lse, delta: pointers to the statistics of all queries, (B H, N), if the chunk has several tiles.
        PADDED: True if the call has a mask. An infinite lse then marks a query that is not usable.

    Returns: dxᵀ q, not yet multiplied by SCALE, and pᵀ do, both (ROWS, D) float32.
    """
    b_dk = tl.zeros([ROWS, D], tl.float32)
    b_dv = tl.zeros([ROWS, D], tl.float32)
    for i_r in range(0, CHUNK, ROWS):
        o_q = start + i_r + tl.arange(0, ROWS)
        # (queries,)
        if CHUNK > ROWS:
            b_lse = tl.load(lse + i_bh * N + o_q, mask=o_q < end, other=0.0)
        usable = o_q < end
        if PADDED:
            usable = usable & (b_lse != float("inf"))
        # (queries, D)
        b_q = tl.load(_row_pointers(q, start + i_r, stride_n, ROWS, D), mask=usable[:, None], other=0.0)
        b_do = tl.load(_row_pointers(do, start + i_r, stride_do_n, ROWS, D), mask=(o_q < end)[:, None], other=0.0)
        if CHUNK > ROWS:
            b_delta = tl.load(delta + i_bh * N + o_q, mask=o_q < end, other=0.0)
        # (queries, keys), not transposed: this way a thread needs the statistics of few queries.
        b_scores = _block_scores(b_q.to(DOT), b_k.to(DOT), o_q, o_k, real, BLOCK, CHUNK)
        b_p = _exp2_at_most_1(b_scores * (SCALE * LOG2E) - b_lse[:, None])
        b_dp = _dot(b_do.to(DOT), tl.trans(b_v.to(DOT)))
        b_dropped_p = b_p
        if DROPOUT > 0:
            b_keep = _dropout_scale(seed, i_bh, o_q[:, None], o_k[None, :], DROPOUT)
            b_dp *= b_keep
            b_dropped_p = b_p * b_keep
        # (keys, D)
        b_dv = _dot(tl.trans(b_dropped_p.to(DOT)), b_do.to(DOT), acc=b_dv)
        b_dx = b_p * (b_dp - b_delta[:, None])
        b_dk = _dot(tl.trans(b_dx.to(DOT)), b_q.to(DOT), acc=b_dk)
    return b_dk, b_dv


@triton.jit
def _query_pass(
    q,
    k,
    v,
    do,
    padding,
    alpha,
    m,
    log_key_sum,
    S,
    seed,
    lse,
    delta,
    dq,
    dalpha,
    i_bh,
    i_b,
    i_c,
    start,
    end,
    stride_n,
    stride_do_n,
    stride_out_n,
    N,
    SCALE: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Store dq of the chunk [start, end), and Σ q dx in dalpha if dalpha is not None.

    q, k, v, do and dq point to the head. If the chunk has several tiles, the statistics of all queries are stored in
    lse and delta. The lse of a query that is not usable is infinite.

    Returns: the statistics lse and δ of the last tile of queries, both (ROWS,).
    """
    b_alpha = tl.load(alpha + i_bh)
    b_lse = tl.zeros([ROWS], tl.float32)
    b_delta = tl.zeros([ROWS], tl.float32)
    b_dalpha = tl.zeros([ROWS], tl.float32)
    for i_r in range(0, CHUNK, ROWS):
        i_t = start + i_r
        o_q = i_t + tl.arange(0, ROWS)
        in_range = o_q < end
        # (ROWS, D)
        b_q = tl.load(_row_pointers(q, i_t, stride_n, ROWS, D), mask=in_range[:, None], other=0.0)
        usable = _is_usable_query(b_q, padding, i_b, o_q, end, N)
        if padding is not None:
            b_q = tl.where(usable[:, None], b_q, 0.0)
        b_do = tl.load(_row_pointers(do, i_t, stride_do_n, ROWS, D), mask=in_range[:, None], other=0.0).to(DOT)
        b_dq, b_lse, b_delta = _block_dq(
            b_q.to(DOT),
            b_do,
            k,
            v,
            padding,
            seed,
            i_bh,
            i_b,
            o_q,
            start,
            end,
            stride_n,
            N,
            SCALE,
            DROPOUT,
            BLOCK,
            CHUNK,
            D,
            ROWS,
            DOT,
        )
        p_do = do + i_t.to(tl.int64) * stride_do_n
        b_da = _add_times_state_T(
            tl.zeros([ROWS, D], tl.float32), p_do, in_range, S + i_bh * D * D, stride_do_n, D, ROWS, DOT
        )
        if padding is not None:
            b_lse = tl.where(usable, b_lse, float("inf"))  # weights of unusable queries become 0 in the key pass
        b_q = tl.load(_row_pointers(q, i_t, stride_n, ROWS, D), mask=usable[:, None], other=0.0)
        b_a = _query_features(b_q, b_alpha, _load_log_sum(m, log_key_sum, i_bh, D))
        b_dx = 0.5 * b_a * (b_da - tl.sum(b_a * b_da, 1)[:, None])
        b_dq = b_alpha * b_dx + (0.5 * SCALE) * b_dq
        p_dq = _row_pointers(dq, i_t, stride_out_n, ROWS, D)
        tl.store(p_dq, b_dq.to(dq.dtype.element_ty), mask=in_range[:, None])
        if dalpha is not None:
            b_dalpha += tl.sum(b_q.to(tl.float32) * b_dx, 1)
        if CHUNK > ROWS:
            tl.store(lse + i_bh * N + o_q, b_lse, mask=in_range)
            tl.store(delta + i_bh * N + o_q, b_delta, mask=in_range)
    if dalpha is not None:
        tl.store(dalpha + i_bh * tl.num_programs(1) + i_c, tl.sum(b_dalpha, 0))
    return b_lse, b_delta


@triton.jit
def _key_pass(
    q,
    k,
    v,
    do,
    padding,
    beta,
    m,
    log_key_sum,
    g,
    dS,
    seed,
    lse,
    delta,
    b_lse,
    b_delta,
    dk,
    dv,
    dbeta,
    i_bh,
    i_b,
    i_c,
    start,
    end,
    stride_n,
    stride_do_n,
    stride_out_n,
    N,
    SCALE: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Store dk and dv of the chunk [start, end), and Σ k dy in dbeta if dbeta is not None.

    q, k, v, do, dk and dv point to the head. lse, delta, b_lse and b_delta are the statistics of the queries, as
    _query_pass has stored and returned them.
    """
    o_d = tl.arange(0, D)
    b_beta = tl.load(beta + i_bh)
    scale = _state_scale(tl.load(log_key_sum + i_bh * D + o_d), N)
    unscale = 1.0 / scale
    b_dbeta = tl.zeros([ROWS], tl.float32)
    for i_r in range(0, CHUNK, ROWS):
        i_t = start + i_r
        o_k, real, b_k, b_v = _load_keys(k, v, padding, i_b, i_t, end, stride_n, N, D, ROWS)
        in_range = (o_k < end)[:, None]
        # (ROWS, D)
        b_block_dk, b_block_dv = _block_dkv(
            b_k,
            b_v,
            real,
            o_k,
            q,
            do,
            b_lse,
            b_delta,
            lse,
            delta,
            seed,
            i_bh,
            start,
            end,
            stride_n,
            stride_do_n,
            N,
            SCALE,
            DROPOUT,
            BLOCK,
            CHUNK,
            padding is not None,
            D,
            ROWS,
            DOT,
        )
        p_k = k + i_t.to(tl.int64) * stride_n
        p_v = v + i_t.to(tl.int64) * stride_n
        p_m = m + i_bh * D
        p_dS = dS + i_bh * D * D
        b_dv = unscale * _add_key_features_times_state(
            (0.5 * scale) * b_block_dv, p_k, real, b_beta, p_m, p_dS, stride_n, D, ROWS, DOT
        )
        p_dv = _row_pointers(dv, i_t, stride_out_n, ROWS, D)
        tl.store(p_dv, b_dv.to(dv.dtype.element_ty), mask=in_range)
        b_dw = _add_times_state_T(tl.zeros([ROWS, D], tl.float32), p_v, real, p_dS, stride_n, D, ROWS, DOT)
        b_dw = unscale * b_dw - tl.load(g + i_bh * D + o_d)[None, :]
        b_dy = _load_key_features(p_k, o_d, real, b_beta, p_m, stride_n, ROWS) * b_dw
        b_dk = b_beta * b_dy + (0.5 * SCALE) * b_block_dk
        p_dk = _row_pointers(dk, i_t, stride_out_n, ROWS, D)
        tl.store(p_dk, b_dk.to(dk.dtype.element_ty), mask=in_range)
        if dbeta is not None:
            b_dbeta += tl.sum(b_k.to(tl.float32) * b_dy, 1)
    if dbeta is not None:
        tl.store(dbeta + i_bh * tl.num_programs(1) + i_c, tl.sum(b_dbeta, 0))


@triton.jit(do_not_specialize=["N"])
def _lln_diag_bwd_kernel(
    q,
    k,
    v,
    do,
    padding,
    alpha,
    beta,
    m,
    log_key_sum,
    S,
    g,
    dS,
    seed,
    lse,
    delta,
    dq,
    dk,
    dv,
    dalpha,
    dbeta,
    stride_b,
    stride_h,
    stride_n,
    stride_do_b,
    stride_do_h,
    stride_do_n,
    stride_out_b,
    stride_out_h,
    stride_out_n,
    H,
    N,
    SCALE: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Write dq, dk, dv, and the terms of dα and dβ, for ½ (LLN + block-diagonal softmax).

    The grid is (B H, ⌈N / CHUNK⌉). A program computes whole blocks, so it needs nothing that another program writes.

    Args:
        lse, delta: (B H, N) float32 buffers for the statistics of the queries, or None if CHUNK <= ROWS.
        dalpha, dbeta: outputs, (B H, ⌈N / CHUNK⌉) float32: Σ q dx and Σ k dy of each program; or None.
    """
    i_bh = tl.program_id(0).to(tl.int64)
    i_c = tl.program_id(1)
    i_b = i_bh // H
    offset = _head_offset(i_bh, stride_b, stride_h, H)
    offset_out = _head_offset(i_bh, stride_out_b, stride_out_h, H)
    p_do = do + _head_offset(i_bh, stride_do_b, stride_do_h, H)
    start = i_c * CHUNK
    end = tl.minimum(start + CHUNK, N)

    b_lse, b_delta = _query_pass(
        q + offset,
        k + offset,
        v + offset,
        p_do,
        padding,
        alpha,
        m,
        log_key_sum,
        S,
        seed,
        lse,
        delta,
        dq + offset_out,
        dalpha,
        i_bh,
        i_b,
        i_c,
        start,
        end,
        stride_n,
        stride_do_n,
        stride_out_n,
        N,
        SCALE,
        DROPOUT,
        BLOCK,
        CHUNK,
        D,
        ROWS,
        DOT,
    )
    if CHUNK > ROWS:
        tl.debug_barrier()  # the key pass reads statistics that other threads of this program have just stored
    _key_pass(
        q + offset,
        k + offset,
        v + offset,
        p_do,
        padding,
        beta,
        m,
        log_key_sum,
        g,
        dS,
        seed,
        lse,
        delta,
        b_lse,
        b_delta,
        dk + offset_out,
        dv + offset_out,
        dbeta,
        i_bh,
        i_b,
        i_c,
        start,
        end,
        stride_n,
        stride_do_n,
        stride_out_n,
        N,
        SCALE,
        DROPOUT,
        BLOCK,
        CHUNK,
        D,
        ROWS,
        DOT,
    )
