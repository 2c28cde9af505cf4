"""Triton kernels that finish the backward pass of the joint form.

The formulas and symbols are those of backends/torch.py; forward_kernels.py explains the names.

All kernels of the backward pass, in the order of their launches:

    _joint_dq_kernel       of joint_query_kernels.py: reads q, k, v, do, writes dq, dα and six numbers of each query
    _joint_dstate_kernel   reads q and do, writes dS = Aᵀ (c do) and g = Σ_i A δ of each split of the tokens
    _lln_dcombine_kernel   of backward_kernels.py: adds up the splits; launched only if there are several
    _joint_dkv_kernel      reads q, k, v and do, writes dk, dv and dβ

The arguments dS and g of the kernels are scaled as in backward_kernels.py: dS by state_scale / s, and g by 1 / s.
"""

# ruff: noqa: ANN001, ANN202 - arguments of kernels have no Python types

import triton
import triton.language as tl

from lln_fairseq.ops.backends.triton.backward_kernels import (
    _add_key_features_times_state,
    _add_times_state_T,
    _exp2_at_most_1,
    _key_features,
    _rounding_error,
    _state_scale,
)
from lln_fairseq.ops.backends.triton.forward_kernels import (
    LOG2E,
    _dot,
    _dropout_scale,
    _head_offset,
    _load_keys,
    _load_log_sum,
    _query_features,
    _row_pointers,
)
from lln_fairseq.ops.backends.triton.joint_kernels import _load_inverse_s, _mask_other_blocks


@triton.jit(do_not_specialize=["N", "T"])
def _joint_dstate_kernel(
    q,
    do,
    alpha,
    m,
    log_key_sum,
    S,
    query_stats,
    g,
    dS,
    stride_b,
    stride_h,
    stride_n,
    stride_do_b,
    stride_do_h,
    stride_do_n,
    stride_stat,
    H,
    N,
    T,
    FINAL: tl.constexpr,
    PADDED: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Compute Aᵀ (c do) and Σ_i A δ_i over the tokens [i_s T, (i_s + 1) T), and write them to dS and g.

    The grid, the shapes and FINAL are those of _lln_dstate_kernel, and WEIGHT is 1. PADDED is True if the call has a
    mask. query_stats then marks the queries that are not usable.
    """
    i_bh = tl.program_id(0).to(tl.int64)
    i_s = tl.program_id(1)
    i_out = i_bh * tl.num_programs(1) + i_s
    p_q = q + _head_offset(i_bh, stride_b, stride_h, H)
    p_do = do + _head_offset(i_bh, stride_do_b, stride_do_h, H)
    start = i_s * T
    end = tl.minimum(start + T, N)
    o_d = tl.arange(0, D)
    o_dd = o_d[:, None] * D + o_d[None, :]
    b_alpha = tl.load(alpha + i_bh)
    b_l = _load_log_sum(m, log_key_sum, i_bh, D)
    b_dS = tl.zeros([D, D], tl.float32)
    b_g = tl.zeros([D], tl.float32)
    for i_r in range(0, end - start, ROWS):
        i_t = start + i_r
        o_q = i_t + tl.arange(0, ROWS)
        in_range = o_q < end
        # (ROWS,)
        p_stats = query_stats + i_bh * N + o_q
        usable = in_range
        if PADDED:
            usable = usable & (tl.load(p_stats, mask=in_range, other=0.0) != float("inf"))
        b_c = tl.load(p_stats + 2 * stride_stat, mask=in_range, other=0.0)
        b_delta = tl.load(p_stats + 5 * stride_stat, mask=in_range, other=0.0)
        # (ROWS, D)
        b_q = tl.load(_row_pointers(p_q, i_t, stride_n, ROWS, D), mask=usable[:, None], other=0.0)
        b_do = tl.load(_row_pointers(p_do, i_t, stride_do_n, ROWS, D), mask=in_range[:, None], other=0.0)
        b_a = _query_features(b_q, b_alpha, b_l)
        # (D,)
        b_g += tl.sum(b_a * b_delta[:, None], 0)
        # (D, D)
        b_a = (b_a * b_c[:, None]).to(DOT)
        b_dS = _dot(tl.trans(b_a), b_do.to(DOT), acc=b_dS)

    if FINAL:
        b_log_key_sum = tl.load(log_key_sum + i_bh * D + o_d)
        scale = _state_scale(b_log_key_sum, N)
        b_inverse_key_sum = tl.exp2(-b_log_key_sum)
        b_dS *= (b_inverse_key_sum * scale)[:, None]
        b_state = tl.load(S + i_bh * D * D + o_dd).to(tl.float32)
        b_g = b_g * b_inverse_key_sum + tl.sum(b_state * _rounding_error(b_dS, dS), 1) / scale
    tl.store(g + i_out * D + o_d, b_g)
    tl.store(dS + i_out * D * D + o_dd, b_dS.to(dS.dtype.element_ty))


@triton.jit
def _joint_block_dkv(
    b_k,
    b_v,
    b_w,
    q,
    p_do,
    p_stats,
    b_alpha,
    m,
    log_key_sum,
    seed,
    i_bh,
    o_k,
    start,
    end,
    stride_n,
    stride_do_n,
    stride_stat,
    SCALE: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PADDED: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Compute the parts of dk and dv that come from the queries of the same block, for a tile of keys.

    Args:
        b_k, b_v, b_w: (ROWS, D) keys, values and W, in the dtype DOT.
        p_do, p_stats: pointers to the gradient of the output and to query_stats of the head.
        o_k: (ROWS,) indices of the keys.
        PADDED: True if the call has a mask.

    Returns:
        The part of dv, (inner Diag - c M)ᵀ do with inner = 1 - c u; the part of dk that comes from the softmax, not yet
        multiplied by SCALE; and Xᵀ A. Each is (ROWS, D) float32. The rows of padding keys hold arbitrary finite
        numbers.
    """
    b_dv = tl.zeros([ROWS, D], tl.float32)
    b_dk = tl.zeros([ROWS, D], tl.float32)
    b_xa = tl.zeros([ROWS, D], tl.float32)
    for i_r in range(0, CHUNK, ROWS):
        o_q = start + i_r + tl.arange(0, ROWS)
        # (queries,)
        in_range = o_q < end
        b_lse = tl.load(p_stats + o_q, mask=in_range, other=0.0)
        b_de = tl.load(p_stats + stride_stat + o_q, mask=in_range, other=0.0)
        b_c = tl.load(p_stats + 2 * stride_stat + o_q, mask=in_range, other=0.0)
        b_block_weight = tl.load(p_stats + 3 * stride_stat + o_q, mask=in_range, other=0.0)
        b_du = tl.load(p_stats + 4 * stride_stat + o_q, mask=in_range, other=0.0)
        usable = in_range
        if PADDED:
            usable = in_range & (b_lse != float("inf"))
        # (queries, D)
        b_q = tl.load(_row_pointers(q, start + i_r, stride_n, ROWS, D), mask=usable[:, None], other=0.0)
        b_do = tl.load(_row_pointers(p_do, start + i_r, stride_do_n, ROWS, D), mask=in_range[:, None], other=0.0)
        b_do = b_do.to(DOT)
        b_a = _query_features(b_q, b_alpha, _load_log_sum(m, log_key_sum, i_bh, D))
        inverse_min_s, b_min_s_over_s = _load_inverse_s(log_key_sum, i_bh, D)
        # (queries, keys), not transposed: this way a thread needs the statistics of few queries.
        b_scores = _dot(b_q.to(DOT), tl.trans(b_k))
        b_p = b_block_weight[:, None] * _exp2_at_most_1(b_scores * (SCALE * LOG2E) - b_lse[:, None])
        b_scaled_a = (b_a * b_min_s_over_s[None, :]).to(DOT)
        b_cm = _dot(b_scaled_a, tl.trans(b_w)) * (inverse_min_s * b_c)[:, None]
        b_keep = 1.0
        if DROPOUT > 0:
            b_keep = _dropout_scale(seed, i_bh, o_q[:, None], o_k[None, :], DROPOUT)
        b_weights = _mask_other_blocks(b_p * b_keep - b_cm, o_q[:, None], o_k[None, :], BLOCK, CHUNK)
        # (keys, D)
        b_dv = _dot(tl.trans(b_weights.to(DOT)), b_do, acc=b_dv)

        # (queries, keys)
        b_e = _dot(b_do, tl.trans(b_v))
        b_x = -b_c[:, None] * b_e - b_du[:, None]
        b_x = _mask_other_blocks(b_x, o_q[:, None], o_k[None, :], BLOCK, CHUNK)
        # (keys, D)
        b_xa = _dot(tl.trans(b_x.to(DOT)), b_a.to(DOT), acc=b_xa)
        # (queries, keys)
        b_dscores = b_p * (b_e * b_keep - b_de[:, None])
        b_dscores = _mask_other_blocks(b_dscores, o_q[:, None], o_k[None, :], BLOCK, CHUNK)
        # (keys, D)
        b_dk = _dot(tl.trans(b_dscores.to(DOT)), b_q.to(DOT), acc=b_dk)
    return b_dv, b_dk, b_xa


@triton.jit(do_not_specialize=["N"])
def _joint_dkv_kernel(
    q,
    k,
    v,
    do,
    padding,
    alpha,
    beta,
    m,
    log_key_sum,
    g,
    dS,
    seed,
    query_stats,
    dk,
    dv,
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
    stride_stat,
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
    """Write dk and dv, and Σ k dy of each program to dbeta, from dS, g and the query_stats of _joint_dq_kernel.

    The grid is (B H, ⌈N / CHUNK⌉), and dbeta is (B H, ⌈N / CHUNK⌉) float32. The rows of padding keys are 0.
    """
    i_bh = tl.program_id(0).to(tl.int64)
    i_c = tl.program_id(1)
    i_b = i_bh // H
    offset = _head_offset(i_bh, stride_b, stride_h, H)
    offset_out = _head_offset(i_bh, stride_out_b, stride_out_h, H)
    p_do = do + _head_offset(i_bh, stride_do_b, stride_do_h, H)
    p_stats = query_stats + i_bh * N
    start = i_c * CHUNK
    end = tl.minimum(start + CHUNK, N)
    o_d = tl.arange(0, D)
    b_alpha = tl.load(alpha + i_bh)
    b_beta = tl.load(beta + i_bh)
    p_m = m + i_bh * D + o_d
    p_log_key_sum = log_key_sum + i_bh * D + o_d
    scale = _state_scale(tl.load(p_log_key_sum), N)
    unscale = 1.0 / scale
    b_dbeta = tl.zeros([ROWS], tl.float32)
    for i_r in range(0, CHUNK, ROWS):
        i_t = start + i_r
        o_k, real, b_k, b_v = _load_keys(k + offset, v + offset, padding, i_b, i_t, end, stride_n, N, D, ROWS)
        in_range = (o_k < end)[:, None]
        p_k = k + offset + i_t.to(tl.int64) * stride_n
        p_v = v + offset + i_t.to(tl.int64) * stride_n
        # (ROWS, D)
        b_w = _key_features(b_k, real, b_beta, tl.load(p_m)).to(DOT)
        b_dv, b_dk, b_xa = _joint_block_dkv(
            b_k.to(DOT),
            b_v.to(DOT),
            b_w,
            q + offset,
            p_do,
            p_stats,
            b_alpha,
            m,
            log_key_sum,
            seed,
            i_bh,
            o_k,
            start,
            end,
            stride_n,
            stride_do_n,
            stride_stat,
            SCALE,
            DROPOUT,
            BLOCK,
            CHUNK,
            padding is not None,
            D,
            ROWS,
            DOT,
        )
        b_dv = _add_key_features_times_state(
            scale * b_dv, p_k, real, b_beta, m + i_bh * D, dS + i_bh * D * D, stride_n, D, ROWS, DOT
        )
        b_dv = tl.where(real[:, None], unscale * b_dv, 0.0)
        p_dv = _row_pointers(dv + offset_out, i_t, stride_out_n, ROWS, D)
        tl.store(p_dv, b_dv.to(dv.dtype.element_ty), mask=in_range)
        # v dSᵀ + Xᵀ A / s, times the scale of dS
        b_xa = b_xa * (scale * tl.exp2(-tl.load(p_log_key_sum)))[None, :]
        b_dw = _add_times_state_T(b_xa, p_v, real, dS + i_bh * D * D, stride_n, D, ROWS, DOT)
        b_k = tl.load(_row_pointers(k + offset, i_t, stride_n, ROWS, D), mask=real[:, None], other=0.0)
        b_dw = unscale * b_dw - tl.load(g + i_bh * D + o_d)[None, :]
        b_dy = _key_features(b_k, real, b_beta, tl.load(p_m)) * b_dw
        b_dbeta += tl.sum(b_k.to(tl.float32) * b_dy, 1)
        b_dk = tl.where(real[:, None], b_beta * b_dy + SCALE * b_dk, 0.0)
        p_dk = _row_pointers(dk + offset_out, i_t, stride_out_n, ROWS, D)
        tl.store(p_dk, b_dk.to(dk.dtype.element_ty), mask=in_range)
    tl.store(dbeta + i_bh * tl.num_programs(1) + i_c, tl.sum(b_dbeta, 0))
