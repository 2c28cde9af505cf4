"""Triton kernel of the forward pass of the queries, in all forms. device.py explains the notation.

The forms are LLN, block-diagonal softmax, half the sum of both, and the joint form of ops/formula.py with its mass u,
weight c and offset o. M is the part of the LLN matrix inside the blocks, Diag the matrix of the softmax inside them.
"""

# ruff: noqa: ANN001, ANN202 - arguments of kernels have no Python types

import triton
import triton.language as tl

from lln_fairseq.ops.backends.triton.block_functions import (
    _block_scores,
    _clear_other_blocks,
    _count_key_rows,
    _dropout_scale,
    _find_pairs,
    _load_chunk_keys,
    _load_inverse_total,
    _outside_mass,
    _outside_weight,
    _reciprocal_or_zero,
    _softmax_step,
)
from lln_fairseq.ops.backends.triton.device import (
    DIAG,
    JOINT,
    LLN,
    LOWEST,
    _dot,
    _has_row,
    _head_offset,
    _key_features,
    _load_head,
    _load_log_sum,
    _load_queries,
    _matrix_pointers,
    _query_features,
    _state_of_head,
    _store_rows,
)


@triton.jit
def _attend_to_block(head, state, b_q, b_a, b_lln, o_q, start, end, META: tl.constexpr):
    """Compute sums over the keys of the block of each query of a tile; in the joint form, also those of LLN.

    Args:
        b_a, b_lln: (rows, D) A and A S of the queries.

    Returns:
        For the softmax, Σ_j 2^(score - maximum) v_j, (rows, D), after dropout, and Σ_j 2^(score - maximum), (rows,).
        For the joint form, A S - M v, (rows, D), Σ_j M and the number of keys, (rows,); otherwise without meaning.
    """
    ROWS: tl.constexpr = META.rows
    if META.form == JOINT:
        inverse_least, b_least_over_total = _load_inverse_total(state, META)
        b_scaled_a = (b_a * b_least_over_total[None, :]).to(META.dot)
        b_maximum = tl.load(state.maximum + tl.arange(0, META.dim))
    b_row_max = tl.full([ROWS], LOWEST, tl.float32)
    b_row_sum = tl.zeros([ROWS], tl.float32)
    b_inside = tl.zeros([ROWS], tl.float32)
    b_num_keys = tl.zeros([ROWS], tl.int32)
    b_o = tl.zeros_like(b_lln)
    for i_r in range(0, _count_key_rows(head, start, META), ROWS):
        o_k, real, b_k, b_v = _load_chunk_keys(head, start, end, i_r, META)
        b_v = b_v.to(META.dot)
        # (queries, keys)
        pairs = _find_pairs(head, o_q, o_k, real, META)
        b_scores = _block_scores(b_q, b_k, pairs, META)
        if META.form == JOINT:
            b_num_keys += tl.sum(pairs.to(tl.int32), 1)
            b_w = _key_features(b_k, real, head.beta, b_maximum).to(META.dot)
            b_minus_m = -inverse_least * _clear_other_blocks(_dot(b_scaled_a, tl.trans(b_w)), pairs, META)
            b_inside -= tl.sum(b_minus_m, 1)
            # (queries, D)
            b_lln = _dot(b_minus_m.to(META.dot), b_v, acc=b_lln)
        b_p, b_rescale, b_row_max, b_row_sum = _softmax_step(b_scores, b_row_max, b_row_sum, META)
        if META.dropout > 0:
            b_p *= _dropout_scale(head, o_q, o_k, META)
        # (queries, D)
        if META.chunk_rows > ROWS or META.has_global:  # a single tile has no earlier sum to rescale
            b_o *= b_rescale[:, None]
        b_o = _dot(b_p.to(META.dot), b_v, acc=b_o)
    return b_o, b_row_sum, b_lln, b_inside, b_num_keys


@triton.jit(do_not_specialize=["N"])
def _output_kernel(
    q,
    k,
    v,
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
    out,
    s_b,
    s_h,
    s_n,
    s_out_b,
    s_out_h,
    s_out_n,
    H,
    N,
    META: tl.constexpr,
):
    """Write A S, Diag v, ½ (A S + Diag v) or (1 - c u) Diag v + c (A S - M v) with u = 1 - Σ_j M.

    The grid is (B H, ⌈N / chunk⌉). `offset` is (B H,), the offset o of each head. `out` is (B, H, N, D), the output,
    of which the rows of global tokens are not written.
    """
    D: tl.constexpr = META.dim
    ROWS: tl.constexpr = META.rows
    head = _load_head(q, k, v, None, padding, num_padding, num_global, alpha, beta, seed, s_b, s_h, s_n, 0, 0, 0, H, N)
    state = _state_of_head(maximum, log_total, S, head.i_bh, META)
    p_out = out + _head_offset(head.i_bh, s_out_b, s_out_h, H)
    start = tl.program_id(1) * META.chunk
    end = tl.minimum(start + META.chunk, N)
    if META.form != DIAG:
        b_l = _load_log_sum(state, META)
    # (D, D)
    if META.form != JOINT and META.form != DIAG:
        b_state = tl.load(_matrix_pointers(state.S, META)).to(META.dot)
    for i_r in range(0, META.chunk, META.rows):
        i_t = start + i_r
        o_q, _, b_q = _load_queries(head, i_t, end, META)
        # (rows, D)
        b_a = tl.zeros([ROWS, D], tl.float32)
        b_o = b_a
        if META.form != DIAG:
            b_a = _query_features(b_q, head.alpha, b_l)
        if META.form == JOINT:  # S does not stay in shared memory while the keys of the block are added
            b_state = tl.load(_matrix_pointers(state.S, META)).to(META.dot)
        if META.form != DIAG:
            b_o = _dot(b_a.to(META.dot), b_state)
        if META.form != LLN:
            b_block, b_row_sum, b_lln, b_inside, b_num_keys = _attend_to_block(
                head, state, b_q, b_a, b_o, o_q, start, end, META
            )
            # (rows,)
            b_block_weight = _reciprocal_or_zero(b_row_sum)
            if META.form == JOINT:
                b_u = _outside_mass(b_inside)
                b_c, _, _ = _outside_weight(b_u, tl.load(offset + head.i_bh), b_num_keys, head.num_keys)
                b_block_weight *= 1.0 - b_c * b_u
                b_lln *= b_c[:, None]
            # (rows, D)
            b_o = META.weight * (b_block_weight[:, None] * b_block + b_lln)
        _store_rows(p_out, i_t, s_out_n, b_o, _has_row(head, o_q, end, META), META)
