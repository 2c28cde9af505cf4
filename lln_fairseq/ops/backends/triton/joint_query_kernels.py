"""Triton kernel that starts the backward pass of the joint form.

It reads q, k, v and do, and writes dq, dα, the gradient of the offset o, and six numbers of each query that the later
kernels need. The formulas and symbols are those of backends/torch.py, with the softmax matrix Diag,
E = do v_bᵀ, de_i = Σ_j Diag_ij E_ij and oe_i = do_i O_i. forward_kernels.py explains the names. The six numbers are the
rows of `query_stats`, (6, B H, N) float32:

    0   lse, the log-normalizer of the softmax in the block in base 2; infinite for a query that is not usable
    1   de
    2   c
    3   1 - c u
    4   du
    5   δ = Σ_d A dA

Since the rows of P sum to 1, δ = c oe - du Σ_j M. This formula does not need dA.
"""

# ruff: noqa: ANN001, ANN202 - arguments of kernels have no Python types

import triton
import triton.language as tl

from lln_fairseq.ops.backends.triton.backward_kernels import _add_times_state_T, _exp2_at_most_1, _key_features
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
from lln_fairseq.ops.backends.triton.joint_kernels import (
    _count_block_keys,
    _count_sequence_keys,
    _load_inverse_s,
    _mask_other_blocks,
    _outside_mass,
    _outside_weight,
)


@triton.jit
def _block_row_sums(
    b_q,
    b_do,
    b_scaled_a,
    k,
    v,
    padding,
    b_beta,
    b_m,
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
    """Compute, for a tile of queries, sums over the keys of the block of each query.

    Args:
        b_q, b_do: (ROWS, D) queries and gradient of their output, in the dtype DOT.
        b_scaled_a: (ROWS, D) A min s / s in the dtype DOT.
        o_q: (ROWS,) indices of the queries.

    Returns: lse, de, min s · Σ_j M and min s · Σ_j M E, each (ROWS,) float32.
    """
    b_row_max = tl.full([ROWS], LOWEST, tl.float32)
    b_row_sum = tl.zeros([ROWS], tl.float32)
    b_de = tl.zeros([ROWS], tl.float32)
    b_inside = tl.zeros([ROWS], tl.float32)
    b_me = tl.zeros([ROWS], tl.float32)
    for i_r in range(0, CHUNK, ROWS):
        o_k, real, b_k, b_v = _load_keys(k, v, padding, i_b, start + i_r, end, stride_n, N, D, ROWS)
        # (queries, keys)
        b_e = _dot(b_do, tl.trans(b_v.to(DOT)))
        # (keys, D)
        b_w = _key_features(b_k, real, b_beta, b_m).to(DOT)
        # (queries, keys)
        b_scaled_m = _dot(b_scaled_a, tl.trans(b_w))
        b_scaled_m = _mask_other_blocks(b_scaled_m, o_q[:, None], o_k[None, :], BLOCK, CHUNK)
        # (queries,)
        b_inside += tl.sum(b_scaled_m, 1)
        b_me += tl.sum(b_scaled_m * b_e, 1)

        # (queries, keys)
        b_scores = _block_scores(b_q, b_k.to(DOT), o_q, o_k, real, BLOCK, CHUNK)
        if DROPOUT > 0:
            b_e *= _dropout_scale(seed, i_bh, o_q[:, None], o_k[None, :], DROPOUT)
        b_p, b_rescale, b_row_max, b_row_sum = _softmax_step(b_scores, b_row_max, b_row_sum, SCALE)
        # (queries,)
        b_de = b_de * b_rescale + tl.sum(b_p * b_e, 1)
    return _log_sum_exp(b_row_max, b_row_sum), b_de * _reciprocal_or_zero(b_row_sum), b_inside, b_me


@triton.jit
def _block_dq_and_da(
    b_q,
    b_do,
    b_da,
    b_lse,
    b_de,
    b_c,
    b_block_weight,
    b_du,
    k,
    v,
    padding,
    b_beta,
    b_m,
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
    """Compute the parts of dq and dA that come from the keys of the same block, for a tile of queries.

    Args:
        b_q, b_do: (ROWS, D) queries and gradient of their output.
        b_da: (ROWS, D) the other part of dA.
        b_lse, b_de, b_c, b_block_weight, b_du: (ROWS,) the first five rows of query_stats for these queries.
        o_q: (ROWS,) indices of the queries.

    Returns:
        The part of dq that comes from the softmax, not yet multiplied by SCALE, and b_da + X W, both (ROWS, D) float32.
    """
    b_dq = tl.zeros([ROWS, D], tl.float32)
    for i_r in range(0, CHUNK, ROWS):
        o_k, real, b_k, b_v = _load_keys(k, v, padding, i_b, start + i_r, end, stride_n, N, D, ROWS)
        # (queries, keys)
        b_e = _dot(b_do, tl.trans(b_v.to(DOT)))
        # (keys, D)
        b_w = _key_features(b_k, real, b_beta, b_m).to(DOT)
        # (queries, keys)
        b_x = -b_c[:, None] * b_e - b_du[:, None]
        b_x = _mask_other_blocks(b_x, o_q[:, None], o_k[None, :], BLOCK, CHUNK)
        # (queries, D)
        b_da = _dot(b_x.to(DOT), b_w, acc=b_da)

        # (queries, keys)
        b_scores = _block_scores(b_q, b_k.to(DOT), o_q, o_k, real, BLOCK, CHUNK)
        if DROPOUT > 0:
            b_e *= _dropout_scale(seed, i_bh, o_q[:, None], o_k[None, :], DROPOUT)
        b_p = _exp2_at_most_1(b_scores * (SCALE * LOG2E) - b_lse[:, None])
        b_dscores = b_p * (b_block_weight[:, None] * (b_e - b_de[:, None]))
        # (queries, D)
        b_dq = _dot(b_dscores.to(DOT), b_k.to(DOT), acc=b_dq)
    return b_dq, b_da


@triton.jit(do_not_specialize=["N"])
def _joint_dq_kernel(
    q,
    k,
    v,
    do,
    padding,
    padded,
    alpha,
    beta,
    joint_offset,
    m,
    log_key_sum,
    S,
    seed,
    query_stats,
    dq,
    dalpha,
    djoint_offset,
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
    """Write dq, query_stats, and the part of dα and of the gradient of the offset of each program.

    The grid is (B H, ⌈N / CHUNK⌉). dalpha and djoint_offset are (B H, ⌈N / CHUNK⌉) float32. `padded` and joint_offset
    are the same as in _joint_out_kernel.
    """
    i_bh = tl.program_id(0).to(tl.int64)
    i_c = tl.program_id(1)
    i_b = i_bh // H
    offset = _head_offset(i_bh, stride_b, stride_h, H)
    offset_out = _head_offset(i_bh, stride_out_b, stride_out_h, H)
    p_do = do + _head_offset(i_bh, stride_do_b, stride_do_h, H)
    start = i_c * CHUNK
    end = tl.minimum(start + CHUNK, N)

    o_d = tl.arange(0, D)
    b_alpha = tl.load(alpha + i_bh)
    b_beta = tl.load(beta + i_bh)
    sequence_keys = _count_sequence_keys(padded, i_b, N)
    b_djoint_offset = tl.zeros([ROWS], tl.float32)
    b_dalpha = tl.zeros([ROWS], tl.float32)
    for i_r in range(0, CHUNK, ROWS):
        i_t = start + i_r
        o_q = i_t + tl.arange(0, ROWS)
        in_range = o_q < end
        # (ROWS, D)
        b_q = tl.load(_row_pointers(q + offset, i_t, stride_n, ROWS, D), mask=in_range[:, None], other=0.0)
        usable = _is_usable_query(b_q, padding, i_b, o_q, end, N)
        if padding is not None:
            b_q = tl.where(usable[:, None], b_q, 0.0)
        b_do = tl.load(_row_pointers(p_do, i_t, stride_do_n, ROWS, D), mask=in_range[:, None], other=0.0).to(DOT)
        b_a = _query_features(b_q, b_alpha, _load_log_sum(m, log_key_sum, i_bh, D))
        # (D,)
        b_m = tl.load(m + i_bh * D + o_d)
        inverse_min_s, b_min_s_over_s = _load_inverse_s(log_key_sum, i_bh, D)
        # (ROWS,)
        b_lse, b_de, b_inside, b_me = _block_row_sums(
            b_q.to(DOT),
            b_do,
            (b_a * b_min_s_over_s[None, :]).to(DOT),
            k + offset,
            v + offset,
            padding,
            b_beta,
            b_m,
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
        # (ROWS, D): do Sᵀ
        b_da = _add_times_state_T(
            tl.zeros([ROWS, D], tl.float32),
            p_do + i_t.to(tl.int64) * stride_do_n,
            in_range,
            S + i_bh * D * D,
            stride_do_n,
            D,
            ROWS,
            DOT,
        )
        # (ROWS,)
        b_inside *= inverse_min_s
        b_oe = tl.sum(b_a * b_da, 1) - inverse_min_s * b_me
        b_u = _outside_mass(b_inside)
        b_block_keys = _count_block_keys(padding, i_b, o_q, start, end, N, BLOCK, CHUNK)
        b_c, b_dc_du, b_dc_doffset = _outside_weight(b_u, tl.load(joint_offset + i_bh), b_block_keys, sequence_keys)
        b_block_weight = 1.0 - b_c * b_u
        b_du = b_dc_du * b_oe - (b_c + b_dc_du * b_u) * b_de
        b_delta = b_c * b_oe - b_du * b_inside
        b_djoint_offset += b_dc_doffset * (b_oe - b_u * b_de)
        if padding is not None:
            b_lse = tl.where(usable, b_lse, float("inf"))  # weights of unusable queries become 0 in the later kernels

        # (ROWS, D): s dA = c s do Sᵀ + X W
        p_log_key_sum = log_key_sum + i_bh * D + o_d
        b_dq, b_da = _block_dq_and_da(
            b_q.to(DOT),
            b_do,
            b_c[:, None] * tl.exp2(tl.load(p_log_key_sum))[None, :] * b_da,
            b_lse,
            b_de,
            b_c,
            b_block_weight,
            b_du,
            k + offset,
            v + offset,
            padding,
            b_beta,
            b_m,
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
        p_stats = query_stats + i_bh * N + o_q
        tl.store(p_stats, b_lse, mask=in_range)
        tl.store(p_stats + stride_stat, b_de, mask=in_range)
        tl.store(p_stats + 2 * stride_stat, b_c, mask=in_range)
        tl.store(p_stats + 3 * stride_stat, b_block_weight, mask=in_range)
        tl.store(p_stats + 4 * stride_stat, b_du, mask=in_range)
        tl.store(p_stats + 5 * stride_stat, b_delta, mask=in_range)
        # q is loaded again, so that it does not stay in registers.
        b_q = tl.load(_row_pointers(q + offset, i_t, stride_n, ROWS, D), mask=usable[:, None], other=0.0)
        b_dx = b_a * (tl.exp2(-tl.load(p_log_key_sum))[None, :] * b_da - b_delta[:, None])
        b_dalpha += tl.sum(b_q.to(tl.float32) * b_dx, 1)
        p_dq = _row_pointers(dq + offset_out, i_t, stride_out_n, ROWS, D)
        tl.store(p_dq, (b_alpha * b_dx + SCALE * b_dq).to(dq.dtype.element_ty), mask=in_range[:, None])
    i_program = i_bh * tl.num_programs(1) + i_c
    tl.store(dalpha + i_program, tl.sum(b_dalpha, 0))
    tl.store(djoint_offset + i_program, tl.sum(b_djoint_offset, 0))
