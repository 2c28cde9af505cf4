"""Triton kernels of the backward pass, in all forms. device.py explains the notation.

LLN and ½ (LLN + block-diagonal softmax), with the gradient do of the output (½ of it for the sum), x = αq + L, y = βk:

    dA = do Sᵀ      δ_i = Σ_d A dA     dx = A (dA - δ)                    dq = α dx     dα = Σ q dx
    dS = Aᵀ do      g = Σ_i A δ        dy = W (v dSᵀ - g) / total         dk = β dy     dβ = Σ k dy
                                       dv = W dS / total

Block-diagonal softmax: let p be the softmax of q_i k_j / √D over the keys j of the block of query i:

    e = do vᵀ    de_i = Σ_j p e    dx = p (e - de)    dq = dx k / √D    dk = dxᵀ q / √D    dv = pᵀ do

The formulas of the joint form are those of backends/torch.py. Since the rows of P sum to 1, δ = c oe - du Σ_j M there,
which does not need dA.

The kernels, in the order of their launches:

    joint form     _backward_kernel with QUERIES   reads q, k, v, do; writes dq, dα, the gradient of o, and query_stats
    with LLN       _grad_state_kernel              reads q, do; writes dS and g of each split; for LLN also dq and dα
    with LLN       _combine_grad_state_kernel      adds up the splits; launched only if there are several
    global tokens  _global_keys_kernel             reads q, do; writes what far queries add to global keys
    LLN            _backward_kernel with KEYS      reads k, v; writes dk, dv and dβ
    block-diagonal _backward_kernel with both      reads q, k, v, do; writes dq, dk, dv; as the joint form's two kernels
                                                   if there are global tokens or keys of neighboring blocks
    joint form     _backward_kernel with KEYS      reads q, k, v, do; writes dk, dv and dβ
    average        _backward_kernel with both      reads q, k, v, do; writes dq, dk, dv, dα and dβ

The rows of do that belong to global queries count as 0: global_rows.py has their part of the gradients.

A, dA, W and p are computed again: q, k and v are the only tensors as long as the sequence that the forward pass saves.
Tiles are loaded again where they are needed. Tiles that stayed in registers would spill them.

The kernels that read dS get state_scale · dS / total and g / total, where state_scale is a power of two close to
min_d total_d / √N. This dS neither overflows nor underflows in half precision at any N. dS alone grows like √N to N,
and 1 / total shrinks like 1 / N.
"""

# ruff: noqa: ANN001, ANN202 - arguments of kernels have no Python types

from typing import Any, NamedTuple

import triton
import triton.language as tl

from lln_fairseq.ops.backends.triton.block_functions import (
    _block_scores,
    _clear_other_blocks,
    _count_key_rows,
    _dropout_scale,
    _find_pairs,
    _first_reached,
    _load_chunk_keys,
    _load_inverse_total,
    _log_sum_exp,
    _outside_mass,
    _outside_weight,
    _reciprocal_or_zero,
    _softmax_step,
)
from lln_fairseq.ops.backends.triton.device import (
    DIAG,
    JOINT,
    LLN,
    LOG2E,
    LOWEST,
    _dot,
    _exp2_at_most_1,
    _has_row,
    _head_offset,
    _key_features,
    _load_head,
    _load_keys,
    _load_log_sum,
    _load_queries,
    _load_rows,
    _matrix_pointers,
    _query_features,
    _state_of_head,
    _store_rows,
)


class QueryStats(NamedTuple):
    """Numbers of each query of a tile, (rows,), which the query pass computes for the key pass.

    In memory they are the rows of `query_stats`, (6, B H, N) float32, or (2, B H, N) if the form is not joint.
    """

    lse: Any  # the log-normalizer of the softmax in base 2
    de: Any
    c: Any  # from here on, only in the joint form
    block_weight: Any  # 1 - c u
    du: Any
    delta: Any  # δ = Σ_d A dA


@triton.jit
def _state_scale(b_log_total, N):
    """Return state_scale = 2^⌊log2(min_d total_d / √N)⌋ from log_total, (D,), in base 2."""
    return tl.exp2(tl.floor(tl.min(b_log_total, 0) - 0.5 * tl.log2(N.to(tl.float32))))


@triton.jit
def _rounding_error(b_x, p):
    """Return x' - x in float32, where x' is x rounded to the dtype that the pointer p points to.

    The caller corrects g with this error. Σ_j dy_j = S · dS - g must equal Σ_i dx_i, otherwise dk and dβ get an error
    along the mean key. dS is rounded twice: A is rounded before the product Aᵀ do, and dS is rounded when it is stored.
    The errors that both roundings cause in S · dS are added to g.
    """
    return b_x.to(p.dtype.element_ty).to(tl.float32) - b_x


@triton.jit
def _add_key_features_times_matrix(b_o, head, i_t, real, p_maximum, p_matrix, META: tl.constexpr):
    """Return b_o + W X, (rows, D) float32, for the keys i_t, i_t + 1, ... and the matrix X (D, D) at p_matrix.

    The keys and X are loaded 64 features at a time, so that only a part of a wide X is in registers.
    """
    SLICE: tl.constexpr = META.dim if META.dim < 64 else 64
    for i_f in range(0, META.dim, SLICE):
        o_f = i_f + tl.arange(0, SLICE)
        # (rows, SLICE)
        p_k = head.k + i_t.to(tl.int64) * head.stride + tl.arange(0, META.rows)[:, None] * head.stride + o_f[None, :]
        b_k = tl.load(p_k, mask=real[:, None], other=0.0)
        b_w = _key_features(b_k, real, head.beta, tl.load(p_maximum + o_f))
        # (SLICE, D)
        b_matrix = tl.load(p_matrix + o_f[:, None] * META.dim + tl.arange(0, META.dim)[None, :]).to(META.dot)
        b_o = _dot(b_w.to(META.dot), b_matrix, acc=b_o)
    return b_o


@triton.jit
def _add_times_transposed(b_o, p, i_t, stride, mask, p_matrix, META: tl.constexpr):
    """Return b_o + x Xᵀ, (rows, D) float32, for the tokens x of `_load_rows` and the matrix X (D, D) at p_matrix.

    x and X are loaded 64 features at a time.
    """
    SLICE: tl.constexpr = META.dim if META.dim < 64 else 64
    for i_f in range(0, META.dim, SLICE):
        o_f = i_f + tl.arange(0, SLICE)
        # (rows, SLICE)
        p_x = p + i_t.to(tl.int64) * stride + tl.arange(0, META.rows)[:, None] * stride + o_f[None, :]
        b_x = tl.load(p_x, mask=mask[:, None], other=0.0)
        # (D, SLICE)
        b_matrix = tl.load(p_matrix + tl.arange(0, META.dim)[:, None] * META.dim + o_f[None, :]).to(META.dot)
        b_o = _dot(b_x.to(META.dot), tl.trans(b_matrix), acc=b_o)
    return b_o


@triton.jit
def _load_query_stats(query_stats, head, o_q, mask, META: tl.constexpr):
    """Load the `QueryStats` of the queries o_q, with 0 where the mask is False."""
    p = query_stats + head.i_bh * head.N
    stride = tl.num_programs(0).to(tl.int64) * head.N
    b_lse = tl.load(p + o_q, mask=mask, other=0.0)
    b_de = tl.load(p + stride + o_q, mask=mask, other=0.0)
    if META.form == JOINT:
        b_c = tl.load(p + 2 * stride + o_q, mask=mask, other=0.0)
        b_block_weight = tl.load(p + 3 * stride + o_q, mask=mask, other=0.0)
        b_du = tl.load(p + 4 * stride + o_q, mask=mask, other=0.0)
        b_delta = tl.load(p + 5 * stride + o_q, mask=mask, other=0.0)
        return QueryStats(b_lse, b_de, b_c, b_block_weight, b_du, b_delta)
    else:
        return QueryStats(b_lse, b_de, 0.0, 0.0, 0.0, 0.0)


@triton.jit
def _store_query_stats(query_stats, head, o_q, mask, stats, META: tl.constexpr):
    p = query_stats + head.i_bh * head.N
    stride = tl.num_programs(0).to(tl.int64) * head.N
    tl.store(p + o_q, stats.lse, mask=mask)
    tl.store(p + stride + o_q, stats.de, mask=mask)
    if META.form == JOINT:
        tl.store(p + 2 * stride + o_q, stats.c, mask=mask)
        tl.store(p + 3 * stride + o_q, stats.block_weight, mask=mask)
        tl.store(p + 4 * stride + o_q, stats.du, mask=mask)
        tl.store(p + 5 * stride + o_q, stats.delta, mask=mask)


@triton.jit(do_not_specialize=["N", "T"])
def _grad_state_kernel(
    q,
    do,
    padding,
    num_global,
    alpha,
    maximum,
    log_total,
    S,
    query_stats,
    g,
    dS,
    dq,
    dalpha,
    s_b,
    s_h,
    s_n,
    s_do_b,
    s_do_h,
    s_do_n,
    s_out_b,
    s_out_h,
    s_out_n,
    H,
    N,
    T,
    FINAL: tl.constexpr,
    META: tl.constexpr,
):
    """Compute Aᵀ do and Σ_i A δ_i over the tokens [i_s T, (i_s + 1) T), and dq and dα if they are not None.

    In the joint form it computes Aᵀ (c do), with c and δ from query_stats. The grid is (B H, splits).

    Args:
        g: output, (B H, splits, D) float32: Σ_i A δ_i; with FINAL it is multiplied by META.weight / total.
        dS: output, (B H, splits, D, D): Aᵀ do; with FINAL it is multiplied by META.weight · state_scale / total.
        dq: output, (B H, N, D), or None; only for LLN.
        dalpha: output, (B H, splits) float32: Σ q dx of each split; or None. It requires dq.
        FINAL: True if there is a single split. Otherwise _combine_grad_state_kernel does these multiplications.
    """
    D: tl.constexpr = META.dim
    ROWS: tl.constexpr = META.rows
    head = _load_head(
        q, None, None, do, padding, None, num_global, alpha, None, None, s_b, s_h, s_n, s_do_b, s_do_h, s_do_n, H, N
    )
    state = _state_of_head(maximum, log_total, S, head.i_bh, META)
    start = tl.program_id(1) * T
    end = tl.minimum(start + T, N)
    b_l = _load_log_sum(state, META)
    # (D, D)
    if D <= 64 and META.form != JOINT:
        b_ST = tl.trans(tl.load(_matrix_pointers(state.S, META))).to(META.dot)
    b_dS = tl.zeros([D, D], tl.float32)
    b_g = tl.zeros([D], tl.float32)
    b_dalpha = tl.zeros([ROWS], tl.float32)
    for i_r in range(0, end - start, ROWS):
        i_t = start + i_r
        o_q, _, b_q = _load_queries(head, i_t, end, META)
        in_range = o_q < end
        has_row = _has_row(head, o_q, end, META)
        # (rows, D)
        b_do = _load_rows(head.do, i_t, head.stride_do, has_row, META).to(META.dot)
        b_a = _query_features(b_q, head.alpha, b_l)
        if META.form == JOINT:
            stats = _load_query_stats(query_stats, head, o_q, in_range, META)
            b_g += tl.sum(b_a * stats.delta[:, None], 0)
            b_rounded_a = (b_a * stats.c[:, None]).to(META.dot)
        else:
            if D <= 64:
                b_da = _dot(b_do, b_ST)
            else:
                b_da = tl.zeros([ROWS, D], tl.float32)
                b_da = _add_times_transposed(b_da, head.do, i_t, head.stride_do, has_row, state.S, META)
            b_dx = b_a * (b_da - tl.sum(b_a * b_da, 1)[:, None])
            b_rounded_a = b_a.to(META.dot)
            # (D,): A δ, plus the error of S · dS from rounding A
            b_g += tl.sum(b_rounded_a.to(tl.float32) * b_da - b_dx, 0)
        # (D, D)
        b_dS = _dot(tl.trans(b_rounded_a), b_do, acc=b_dS)
        if dalpha is not None:
            b_dalpha += tl.sum(b_q.to(tl.float32) * b_dx, 1)
        if dq is not None:
            p_dq = dq + _head_offset(head.i_bh, s_out_b, s_out_h, H)
            _store_rows(p_dq, i_t, s_out_n, head.alpha * b_dx, in_range, META)

    if FINAL:
        b_log_total = tl.load(state.log_total + tl.arange(0, D))
        scale = _state_scale(b_log_total, N)
        b_inverse_total = tl.exp2(-b_log_total)
        b_dS *= (b_inverse_total * (META.weight * scale))[:, None]
        b_state = tl.load(_matrix_pointers(state.S, META)).to(tl.float32)
        b_g = b_g * (b_inverse_total * META.weight) + tl.sum(b_state * _rounding_error(b_dS, dS), 1) / scale
    i_out = head.i_bh * tl.num_programs(1) + tl.program_id(1)
    tl.store(g + i_out * D + tl.arange(0, D), b_g)
    tl.store(_matrix_pointers(dS + i_out * D * D, META), b_dS.to(dS.dtype.element_ty))
    if dalpha is not None:
        tl.store(dalpha + i_out, tl.sum(b_dalpha, 0))


@triton.jit(do_not_specialize=["N", "SPLITS"])
def _combine_grad_state_kernel(
    part_g, part_dS, log_total, S, g, dS, N, SPLITS, WEIGHT: tl.constexpr, D: tl.constexpr, COLS: tl.constexpr
):
    """Add up the splits of _grad_state_kernel, 16 at a time.

    The outputs are dS = WEIGHT · state_scale / total · Σ part_dS and g = WEIGHT / total · Σ part_g over the splits. The
    grid and the tiles are those of _combine_state_kernel. COLS must be a multiple of D.
    """
    i_bh = tl.program_id(0).to(tl.int64)
    i_c = tl.program_id(1)
    o_c = i_c * COLS + tl.arange(0, COLS)
    p_g = part_g + i_bh * SPLITS * D + (o_c // D)[None, :]
    p_dS = part_dS + i_bh * SPLITS * D * D + o_c[None, :]

    b_g = tl.zeros([COLS], tl.float32)
    b_dS = tl.zeros([COLS], tl.float32)
    for i_s in range(0, SPLITS, 16):
        o_s = (i_s + tl.arange(0, 16))[:, None]
        # (COLS,)
        b_g += tl.sum(tl.load(p_g + o_s * D, mask=o_s < SPLITS, other=0.0), 0)
        b_dS += tl.sum(tl.load(p_dS + o_s * D * D, mask=o_s < SPLITS, other=0.0), 0)

    scale = _state_scale(tl.load(log_total + i_bh * D + tl.arange(0, D)), N)
    b_inverse_total = tl.exp2(-tl.load(log_total + i_bh * D + o_c // D))
    b_dS *= b_inverse_total * (WEIGHT * scale)
    tl.store(dS + i_bh * D * D + o_c, b_dS.to(dS.dtype.element_ty))
    # All D elements of a row of b_g hold the row's g. Each takes 1 / D of it and the correction for its element of dS,
    # so that their sum is g with the corrections of the whole row.
    b_g *= b_inverse_total * (WEIGHT / D)
    b_state = tl.load(S + i_bh * D * D + o_c).to(tl.float32)
    b_g += b_state * _rounding_error(b_dS, dS) / scale
    o_row = i_c * (COLS // D) + tl.arange(0, COLS // D)
    tl.store(g + i_bh * D + o_row, tl.sum(tl.reshape(b_g, (COLS // D, D)), 1))


@triton.jit
def _sum_over_block(head, state, b_q, b_do, o_q, start, end, META: tl.constexpr):
    """Compute, for a tile of queries, sums over the keys of the block of each query.

    Returns:
        lse and de; in the joint form also Σ_j M, Σ_j M E and the number of keys, otherwise 0. Each is (rows,).
    """
    ROWS: tl.constexpr = META.rows
    inverse_least = 1.0
    if META.form == JOINT:
        inverse_least, b_least_over_total = _load_inverse_total(state, META)
        b_a = _query_features(b_q, head.alpha, _load_log_sum(state, META))
        b_scaled_a = (b_a * b_least_over_total[None, :]).to(META.dot)
        b_maximum = tl.load(state.maximum + tl.arange(0, META.dim))
    b_row_max = tl.full([ROWS], LOWEST, tl.float32)
    b_row_sum = tl.zeros([ROWS], tl.float32)
    b_de = tl.zeros([ROWS], tl.float32)
    b_inside = tl.zeros([ROWS], tl.float32)
    b_me = tl.zeros([ROWS], tl.float32)
    b_num_keys = tl.zeros([ROWS], tl.int32)
    for i_r in range(0, _count_key_rows(head, start, META), ROWS):
        o_k, real, b_k, b_v = _load_chunk_keys(head, start, end, i_r, META)
        # (queries, keys)
        pairs = _find_pairs(head, o_q, o_k, real, META)
        b_scores = _block_scores(b_q, b_k, pairs, META)
        b_e = _dot(b_do, tl.trans(b_v.to(META.dot)))
        if META.form == JOINT:
            b_num_keys += tl.sum(pairs.to(tl.int32), 1)
            b_w = _key_features(b_k, real, head.beta, b_maximum).to(META.dot)
            b_scaled_m = _clear_other_blocks(_dot(b_scaled_a, tl.trans(b_w)), pairs, META)
            # (queries,)
            b_inside += tl.sum(b_scaled_m, 1)
            b_me += tl.sum(b_scaled_m * b_e, 1)
        if META.dropout > 0:
            b_e *= _dropout_scale(head, o_q, o_k, META)
        b_p, b_rescale, b_row_max, b_row_sum = _softmax_step(b_scores, b_row_max, b_row_sum, META)
        b_de = b_de * b_rescale + tl.sum(b_p * b_e, 1)
    b_lse = _log_sum_exp(b_row_max, b_row_sum)
    b_de *= _reciprocal_or_zero(b_row_sum)
    return b_lse, b_de, inverse_least * b_inside, inverse_least * b_me, b_num_keys


@triton.jit
def _add_block_gradients(b_da, head, state, b_q, b_do, stats, o_q, start, end, META: tl.constexpr):
    """Compute the gradients that a tile of queries gets from the keys of its blocks.

    Returns:
        The part of dq that comes from the softmax, without the factor META.weight / √D, and b_da + dM W in the joint
        form, otherwise b_da; both (rows, D) float32.
    """
    if META.form == JOINT:
        b_maximum = tl.load(state.maximum + tl.arange(0, META.dim))
    b_dq = tl.zeros_like(b_da)
    for i_r in range(0, _count_key_rows(head, start, META), META.rows):
        o_k, real, b_k, b_v = _load_chunk_keys(head, start, end, i_r, META)
        # (queries, keys)
        pairs = _find_pairs(head, o_q, o_k, real, META)
        b_e = _dot(b_do, tl.trans(b_v.to(META.dot)))
        if META.form == JOINT:
            b_w = _key_features(b_k, real, head.beta, b_maximum).to(META.dot)
            b_x = _clear_other_blocks(-stats.c[:, None] * b_e - stats.du[:, None], pairs, META)
            # (queries, D)
            b_da = _dot(b_x.to(META.dot), b_w, acc=b_da)
        # (queries, keys)
        b_scores = _block_scores(b_q, b_k, pairs, META)
        if META.dropout > 0:
            b_e *= _dropout_scale(head, o_q, o_k, META)
        b_p = _exp2_at_most_1(b_scores * (META.scale * LOG2E) - stats.lse[:, None])
        if META.form == JOINT:
            b_p *= stats.block_weight[:, None]
        b_dscores = b_p * (b_e - stats.de[:, None])
        # (queries, D)
        b_dq = _dot(b_dscores.to(META.dot), b_k.to(META.dot), acc=b_dq)
    return b_dq, b_da


@triton.jit
def _query_pass(head, state, offset, query_stats, dq, stride_dq, dalpha, doffset, start, end, META: tl.constexpr):
    """Store dq of the chunk [start, end), and Σ q dx and the gradient of the offset in dalpha and doffset if not None.

    `offset` and dq point to the head, dalpha and doffset to the elements of the program. The statistics of the queries
    are stored in query_stats if it is not None.

    Returns: the `QueryStats` of the last tile of queries.
    """
    D: tl.constexpr = META.dim
    ROWS: tl.constexpr = META.rows
    b_dalpha = tl.zeros([ROWS], tl.float32)
    b_doffset = tl.zeros([ROWS], tl.float32)
    b_zero = tl.zeros([ROWS], tl.float32)
    stats = QueryStats(b_zero, b_zero, b_zero, b_zero, b_zero, b_zero)
    for i_r in range(0, META.chunk, ROWS):
        i_t = start + i_r
        o_q, usable, b_q = _load_queries(head, i_t, end, META)
        in_range = o_q < end
        has_row = _has_row(head, o_q, end, META)
        # (rows, D)
        b_do = _load_rows(head.do, i_t, head.stride_do, has_row, META).to(META.dot)
        b_da = tl.zeros([ROWS, D], tl.float32)
        # (rows,)
        b_lse, b_de, b_inside, b_me, b_num_keys = _sum_over_block(head, state, b_q, b_do, o_q, start, end, META)
        if META.has_padding:
            b_lse = tl.where(usable, b_lse, float("inf"))  # weights of unusable queries become 0 in the key pass
        stats = QueryStats(b_lse, b_de, b_zero, b_zero, b_zero, b_zero)
        if META.form == JOINT:
            # (rows, D)
            b_a = _query_features(b_q, head.alpha, _load_log_sum(state, META))
            b_da = _add_times_transposed(b_da, head.do, i_t, head.stride_do, has_row, state.S, META)
            # (rows,)
            b_oe = tl.sum(b_a * b_da, 1) - b_me
            b_u = _outside_mass(b_inside)
            b_c, b_dc_du, b_dc_doffset = _outside_weight(b_u, tl.load(offset), b_num_keys, head.num_keys)
            b_du = b_dc_du * b_oe - (b_c + b_dc_du * b_u) * b_de
            b_delta = b_c * b_oe - b_du * b_inside
            b_doffset += b_dc_doffset * (b_oe - b_u * b_de)
            stats = QueryStats(b_lse, b_de, b_c, 1.0 - b_c * b_u, b_du, b_delta)
            # (rows, D): total · dA = c total do Sᵀ + dM W
            b_da *= b_c[:, None] * tl.exp2(tl.load(state.log_total + tl.arange(0, D)))[None, :]
        b_dq, b_da = _add_block_gradients(b_da, head, state, b_q, b_do, stats, o_q, start, end, META)
        if query_stats is not None:
            _store_query_stats(query_stats, head, o_q, in_range, stats, META)
        b_dq *= META.weight * META.scale
        if META.form != DIAG:
            b_q = _load_rows(head.q, i_t, head.stride, usable, META)
            if META.form == JOINT:
                b_da *= tl.exp2(-tl.load(state.log_total + tl.arange(0, D)))[None, :]
            else:
                b_a = _query_features(b_q, head.alpha, _load_log_sum(state, META))
                b_da = _add_times_transposed(b_da, head.do, i_t, head.stride_do, has_row, state.S, META)
                b_delta = tl.sum(b_a * b_da, 1)
            b_dx = META.weight * b_a * (b_da - b_delta[:, None])
            b_dq += head.alpha * b_dx
        _store_rows(dq, i_t, stride_dq, b_dq, in_range, META)
        if dalpha is not None:
            b_dalpha += tl.sum(b_q.to(tl.float32) * b_dx, 1)
    if dalpha is not None:
        tl.store(dalpha, tl.sum(b_dalpha, 0))
    if doffset is not None:
        tl.store(doffset, tl.sum(b_doffset, 0))
    return stats


@triton.jit
def _sum_over_queries(
    head, state, query_stats, tile_stats, b_k, b_v, o_k, real, start, end, num_rows, META: tl.constexpr
):
    """Compute what the queries [start, end) add to the gradients of a tile of keys.

    Args:
        query_stats: the statistics of all queries, used if tile_stats is None.
        tile_stats: the `QueryStats` of the queries if they fit in one tile, or None.
        num_rows: the number of rows of the tiles of queries.

    Returns:
        The part of dv without the factor META.weight, that of dk without META.weight / √D, and for the joint form Xᵀ A,
        otherwise 0. Each is (rows, D) float32.
    """
    D: tl.constexpr = META.dim
    ROWS: tl.constexpr = META.rows
    if META.form == JOINT:
        b_w = _key_features(b_k, real, head.beta, tl.load(state.maximum + tl.arange(0, D))).to(META.dot)
    b_dv = tl.zeros([ROWS, D], tl.float32)
    b_dk = tl.zeros([ROWS, D], tl.float32)
    b_xa = tl.zeros([ROWS, D], tl.float32)
    for i_r in range(0, num_rows, ROWS):
        i_t = start + i_r
        o_q = i_t + tl.arange(0, ROWS)
        in_range = o_q < end
        has_row = _has_row(head, o_q, end, META)
        if tile_stats is None:
            stats = _load_query_stats(query_stats, head, o_q, in_range, META)
        else:
            stats = tile_stats
        usable = in_range
        if META.has_padding:
            usable = in_range & (stats.lse != float("inf"))
        b_q = _load_rows(head.q, i_t, head.stride, usable, META)
        b_do = _load_rows(head.do, i_t, head.stride_do, has_row, META).to(META.dot)
        if META.form == JOINT:
            b_a = _query_features(b_q, head.alpha, _load_log_sum(state, META))
            inverse_least, b_least_over_total = _load_inverse_total(state, META)
        # (queries, keys), not transposed: this way a thread needs the statistics of few queries.
        pairs = _find_pairs(head, o_q, o_k, real, META)
        b_scores = _dot(b_q.to(META.dot), tl.trans(b_k.to(META.dot)))
        b_p = _exp2_at_most_1(b_scores * (META.scale * LOG2E) - stats.lse[:, None])
        b_p = _clear_other_blocks(b_p, pairs, META)
        b_keep = 1.0
        if META.dropout > 0:
            b_keep = _dropout_scale(head, o_q, o_k, META)
        if META.form == JOINT:
            b_p *= stats.block_weight[:, None]
        b_weights = b_p * b_keep
        if META.form == JOINT:
            b_m = _dot((b_a * b_least_over_total[None, :]).to(META.dot), tl.trans(b_w))
            b_weights -= _clear_other_blocks(b_m * (inverse_least * stats.c)[:, None], pairs, META)
        # (keys, D)
        b_dv = _dot(tl.trans(b_weights.to(META.dot)), b_do, acc=b_dv)
        # (queries, keys)
        b_e = _dot(b_do, tl.trans(b_v.to(META.dot)))
        if META.form == JOINT:
            b_x = _clear_other_blocks(-stats.c[:, None] * b_e - stats.du[:, None], pairs, META)
            # (keys, D)
            b_xa = _dot(tl.trans(b_x.to(META.dot)), b_a.to(META.dot), acc=b_xa)
        b_dscores = b_p * (b_e * b_keep - stats.de[:, None])
        # (keys, D)
        b_dk = _dot(tl.trans(b_dscores.to(META.dot)), b_q.to(META.dot), acc=b_dk)
    return b_dv, b_dk, b_xa


@triton.jit
def _key_pass(
    head,
    state,
    g,
    dS,
    query_stats,
    tile_stats,
    global_sums,
    num_splits,
    max_rows,
    dk,
    dv,
    stride_out,
    dbeta,
    start,
    end,
    META: tl.constexpr,
):
    """Store dk and dv of the chunk [start, end), and Σ k dy in dbeta if it is not None.

    g, dS, global_sums, dk and dv point to the head, dbeta to the element of the program. query_stats and tile_stats are
    those of `_sum_over_queries`. global_sums, num_splits and max_rows are those of _global_keys_kernel.
    """
    D: tl.constexpr = META.dim
    ROWS: tl.constexpr = META.rows
    o_d = tl.arange(0, D)
    scale = 1.0
    if META.form != DIAG:
        scale = _state_scale(tl.load(state.log_total + o_d), head.N)
        unscale = 1.0 / scale
    b_dbeta = tl.zeros([ROWS], tl.float32)
    for i_r in range(0, META.chunk, ROWS):
        i_t = start + i_r
        o_k, real, b_k, b_v = _load_keys(head, i_t, end, META)
        # (rows, D)
        b_dv = tl.zeros([ROWS, D], tl.float32)
        b_block_dk = tl.zeros([ROWS, D], tl.float32)
        b_dw = tl.zeros([ROWS, D], tl.float32)
        if META.form != LLN:
            b_dv, b_block_dk, b_dw = _sum_over_queries(
                head,
                state,
                query_stats,
                tile_stats,
                b_k,
                b_v,
                o_k,
                real,
                _first_reached(start, META),
                tl.minimum(end + META.reach, head.N),
                META.chunk + 2 * META.reach,
                META,
            )
            if META.has_global:
                num_global = tl.minimum(head.num_global, max_rows)
                is_global = real & (o_k < num_global)
                for i_s in range(0, tl.where(i_t < num_global, num_splits, 0)):
                    p_sums = global_sums + i_s * 3 * max_rows.to(tl.int64) * D
                    b_dv += _load_rows(p_sums, i_t, D, is_global, META)
                    b_block_dk += _load_rows(p_sums + max_rows * D, i_t, D, is_global, META)
                    b_dw += _load_rows(p_sums + 2 * max_rows * D, i_t, D, is_global, META)
            b_dv *= META.weight * scale
        if META.form != DIAG:
            b_dv = unscale * _add_key_features_times_matrix(b_dv, head, i_t, real, state.maximum, dS, META)
        _store_rows(dv, i_t, stride_out, tl.where(real[:, None], b_dv, 0.0), o_k < end, META)
        if META.form == JOINT:  # Xᵀ A / total, times the scale of dS
            b_dw *= (scale * tl.exp2(-tl.load(state.log_total + o_d)))[None, :]
        b_dk = (META.weight * META.scale) * b_block_dk
        if META.form != DIAG:
            b_dw = unscale * _add_times_transposed(b_dw, head.v, i_t, head.stride, real, dS, META)
            # k is loaded again, so that it does not stay in registers.
            b_k = _load_rows(head.k, i_t, head.stride, real, META)
            b_w = _key_features(b_k, real, head.beta, tl.load(state.maximum + o_d))
            b_dy = b_w * (b_dw - tl.load(g + o_d)[None, :])
            b_dk += head.beta * b_dy
        _store_rows(dk, i_t, stride_out, tl.where(real[:, None], b_dk, 0.0), o_k < end, META)
        if dbeta is not None:
            b_dbeta += tl.sum(b_k.to(tl.float32) * b_dy, 1)
    if dbeta is not None:
        tl.store(dbeta, tl.sum(b_dbeta, 0))


@triton.jit(do_not_specialize=["N", "T"])
def _global_keys_kernel(
    q,
    k,
    v,
    do,
    padding,
    num_global,
    alpha,
    beta,
    seed,
    maximum,
    log_total,
    query_stats,
    global_sums,
    s_b,
    s_h,
    s_n,
    s_do_b,
    s_do_h,
    s_do_n,
    H,
    N,
    T,
    META: tl.constexpr,
):
    """Compute what the queries [i_s T, (i_s + 1) T) beyond reach of a chunk of global keys add to their gradients.

    The grid is (B H, splits, chunks with global keys of any sequence). META.block is META.chunk, since all these
    queries attend to all these keys.

    Args:
        global_sums: output, (B H, splits, 3, max_rows, D) float32 with max_rows = chunks · chunk: the results of
            `_sum_over_queries`.
    """
    D: tl.constexpr = META.dim
    head = _load_head(
        q, k, v, do, padding, None, num_global, alpha, beta, seed, s_b, s_h, s_n, s_do_b, s_do_h, s_do_n, H, N
    )
    state = _state_of_head(maximum, log_total, maximum, head.i_bh, META)
    i_s = tl.program_id(1)
    key_start = tl.program_id(2) * META.chunk
    key_end = tl.minimum(key_start + META.chunk, head.num_global)
    start = tl.maximum(i_s * T, key_start + META.chunk + META.reach)
    end = tl.minimum((i_s + 1) * T, N)
    if key_start >= key_end:  # this sequence has fewer global tokens than another one
        end = start
    max_rows = tl.num_programs(2) * META.chunk
    p_sums = global_sums + (head.i_bh * tl.num_programs(1) + i_s) * 3 * max_rows * D
    for i_r in range(0, META.chunk, META.rows):
        i_t = key_start + i_r
        o_k, real, b_k, b_v = _load_keys(head, i_t, key_end, META)
        b_dv, b_dk, b_xa = _sum_over_queries(
            head, state, query_stats, None, b_k, b_v, o_k, real, start, end, end - start, META
        )
        _store_rows(p_sums, i_t, D, b_dv, o_k < key_end, META)
        _store_rows(p_sums + max_rows * D, i_t, D, b_dk, o_k < key_end, META)
        _store_rows(p_sums + 2 * max_rows * D, i_t, D, b_xa, o_k < key_end, META)


def _backward_kernel_name(specialization):
    """Return the name under which profilers list a kernel."""
    passes = [name for name in ("QUERIES", "KEYS") if specialization.constants[name]]
    return "_".join(("_backward_kernel", *passes)).lower()


@triton.jit(do_not_specialize=["N", "num_splits", "max_rows"], repr=_backward_kernel_name)
def _backward_kernel(
    q,
    k,
    v,
    do,
    padding,
    num_padding,
    num_global,
    alpha,
    beta,
    offset,
    seed,
    maximum,
    log_total,
    S,
    g,
    dS,
    query_stats,
    global_sums,
    dq,
    dk,
    dv,
    dalpha,
    dbeta,
    doffset,
    num_splits,
    max_rows,
    s_b,
    s_h,
    s_n,
    s_do_b,
    s_do_h,
    s_do_n,
    s_out_b,
    s_out_h,
    s_out_n,
    H,
    N,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    META: tl.constexpr,
):
    """Write the gradients of the queries, of the keys, or of both, of one chunk. The grid is (B H, ⌈N / chunk⌉).

    With both, a program computes its chunk first as queries and then as keys, and needs nothing that another program
    writes.

    Args:
        g, dS: the outputs of the two kernels for the state's gradient; with KEYS; None in the form DIAG.
        query_stats: the buffer of `QueryStats`, which QUERIES writes and KEYS reads; or None if both are computed and
            the queries of a chunk fit in one tile.
        global_sums, num_splits, max_rows: see _global_keys_kernel; with KEYS and global tokens.
        dalpha, dbeta, doffset: outputs, (B H, ⌈N / chunk⌉) float32: the terms of the gradients; or None.
    """
    head = _load_head(
        q, k, v, do, padding, num_padding, num_global, alpha, beta, seed, s_b, s_h, s_n, s_do_b, s_do_h, s_do_n, H, N
    )
    state = _state_of_head(maximum, log_total, S, head.i_bh, META)
    out = _head_offset(head.i_bh, s_out_b, s_out_h, H)
    i_program = head.i_bh * tl.num_programs(1) + tl.program_id(1)
    start = tl.program_id(1) * META.chunk
    end = tl.minimum(start + META.chunk, N)
    tile_stats = None
    if QUERIES:
        tile_stats = _query_pass(
            head,
            state,
            offset if offset is None else offset + head.i_bh,
            query_stats,
            dq + out,
            s_out_n,
            dalpha if dalpha is None else dalpha + i_program,
            doffset if doffset is None else doffset + i_program,
            start,
            end,
            META,
        )
    if QUERIES and query_stats is not None:
        tile_stats = None
        tl.debug_barrier()  # the key pass reads statistics that other threads of this program have just stored
    if KEYS:
        _key_pass(
            head,
            state,
            g if g is None else g + head.i_bh * META.dim,
            dS if dS is None else dS + head.i_bh * META.dim * META.dim,
            query_stats,
            tile_stats,
            global_sums if global_sums is None else global_sums + head.i_bh * num_splits * 3 * max_rows * META.dim,
            num_splits,
            max_rows,
            dk + out,
            dv + out,
            s_out_n,
            dbeta if dbeta is None else dbeta + i_program,
            start,
            end,
            META,
        )
