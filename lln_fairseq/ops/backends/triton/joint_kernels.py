"""Triton kernel of the forward pass of the joint form of LLN+Diag, and device functions that its backward pass shares.

The formulas are those of ops/formula.py and backends/torch.py, with the softmax matrix Diag, the mass u, the
weight c and the offset o. forward_kernels.py explains the other names, and its first two kernels compute m, s and S.

M, the part of the LLN matrix inside the blocks, is (A / s) W_bᵀ, where W_b has the rows of W that belong to the block.
A is multiplied by min s / s, which is at most 1, and the product is multiplied by 1 / min s, where min s is the minimum
over the features. So half precision can represent both operands at any N.
"""

# ruff: noqa: ANN001, ANN202 - arguments of kernels have no Python types

import triton
import triton.language as tl

from lln_fairseq.ops.backends.triton.backward_kernels import _key_features
from lln_fairseq.ops.backends.triton.forward_kernels import (
    LOG2E,
    LOWEST,
    _block_scores,
    _dot,
    _dropout_scale,
    _head_offset,
    _is_real_key,
    _is_usable_query,
    _load_keys,
    _load_log_sum,
    _query_features,
    _reciprocal_or_zero,
    _row_pointers,
    _softmax_step,
)
from lln_fairseq.ops.formula import FLOOR as _FLOOR

FLOOR = tl.constexpr(_FLOOR)


@triton.jit
def _load_inverse_s(log_key_sum, i_bh, D: tl.constexpr):
    """Return two factors whose product is 1 / s: the number 1 / min s, and min s / s, (D,), which is at most 1."""
    b_log_key_sum = tl.load(log_key_sum + i_bh * D + tl.arange(0, D))
    min_log_key_sum = tl.min(b_log_key_sum, 0)
    return tl.exp2(-min_log_key_sum), tl.exp2(min_log_key_sum - b_log_key_sum)


@triton.jit
def _mask_other_blocks(b_x, o_q, o_k, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Return b_x (queries, keys) with 0 where the query and the key lie in different blocks of the chunk."""
    if CHUNK > BLOCK:
        b_x = tl.where(o_q // BLOCK == o_k // BLOCK, b_x, 0.0)
    return b_x


@triton.jit
def _count_block_keys(padding, i_b, o_q, start, end, N, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Return the number of keys that are not padding in the block of each query of the chunk [start, end), (ROWS,)."""
    o_block = o_q // BLOCK * BLOCK
    if padding is None:
        return tl.minimum(o_block + BLOCK, N) - o_block
    b_count = tl.zeros_like(o_q)
    for i_r in range(0, CHUNK, 16):
        o_k = start + i_r + tl.arange(0, 16)
        real = _is_real_key(padding, i_b, o_k, end, N)[None, :]
        b_count += tl.sum((real & (o_block[:, None] == (o_k // BLOCK * BLOCK)[None, :])).to(tl.int32), 1)
    return b_count


@triton.jit
def _count_sequence_keys(padded, i_b, N):
    """Return the number of keys of a sequence that are not padding.

    `padded` points to the number of padding keys of every sequence, or is None if there are no padding keys.
    """
    if padded is None:
        return N
    else:
        return N - tl.load(padded + i_b)


@triton.jit
def _outside_weight(b_u, b_offset, b_block_keys, sequence_keys):
    """Return the weight c of the keys outside the block and its derivatives by u and by the offset, each (queries,).

    c is 1 for a block whose keys are all padding, and 0 for a block with all keys of its sequence that are not padding.
    Both derivatives are 0 for these two kinds of blocks, and where the divisor of c is limited to FLOOR.

    Args:
        b_u: (queries,) mass u that LLN gives to the keys outside the block.
        b_offset: offset o of the head.
        b_block_keys: (queries,) number of keys in the block of the query that are not padding.
        sequence_keys: number of keys of the sequence that are not padding.
    """
    b_e = tl.exp2(b_offset * -LOG2E)
    b_divisor = b_u + (1.0 - b_u) * b_e
    b_c = 1.0 / tl.maximum(b_divisor, FLOOR)
    b_dc_du = tl.where(b_divisor > FLOOR, -b_c * b_c * (1.0 - b_e), 0.0)
    b_dc_doffset = tl.where(b_divisor > FLOOR, b_c * (1.0 - b_c * b_u), 0.0)
    no_keys = b_block_keys == 0
    constant = no_keys | (b_block_keys == sequence_keys)
    b_c = tl.where(no_keys, 1.0, tl.where(constant, 0.0, b_c))
    return b_c, tl.where(constant, 0.0, b_dc_du), tl.where(constant, 0.0, b_dc_doffset)


@triton.jit
def _outside_mass(b_inside):
    """Return u = 1 - b_inside, clamped to [0, 1], which u can leave by rounding.

    b_inside is Σ_j M, the mass that LLN gives to the keys inside the block.
    """
    return tl.minimum(tl.maximum(1.0 - b_inside, 0.0), 1.0)


@triton.jit
def _block_and_outside(
    b_q,
    b_scaled_a,
    b_outside,
    inverse_min_s,
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
    """Compute the softmax output from inside the block and the LLN output from outside it, for a tile of queries.

    The keys of the chunk [start, end) are loaded ROWS at a time. k and v point to the head.

    Args:
        b_q: (ROWS, D) queries.
        b_scaled_a: (ROWS, D) A min s / s in the dtype DOT.
        b_outside: (ROWS, D) A S in float32.
        inverse_min_s: 1 / min s.
        b_beta, b_m: β, and m in base 2, (D,).
        o_q: (ROWS,) indices of the queries.

    Returns:
        For the softmax, Σ_j 2^(score - maximum) v_j, (ROWS, D), after dropout, and Σ_j 2^(score - maximum), (ROWS,).
        For LLN, A S - M v, (ROWS, D), and Σ_j M, (ROWS,). All are float32.
    """
    b_row_max = tl.full([ROWS], LOWEST, tl.float32)
    b_row_sum = tl.zeros([ROWS], tl.float32)
    b_inside = tl.zeros([ROWS], tl.float32)
    b_o = tl.zeros([ROWS, D], tl.float32)
    for i_r in range(0, CHUNK, ROWS):
        o_k, real, b_k, b_v = _load_keys(k, v, padding, i_b, start + i_r, end, stride_n, N, D, ROWS)
        b_v = b_v.to(DOT)
        # (keys, D)
        b_w = _key_features(b_k, real, b_beta, b_m).to(DOT)
        # (queries, keys)
        b_minus_m = _dot(b_scaled_a, tl.trans(b_w))
        b_minus_m = -inverse_min_s * _mask_other_blocks(b_minus_m, o_q[:, None], o_k[None, :], BLOCK, CHUNK)
        b_inside -= tl.sum(b_minus_m, 1)
        # (queries, D)
        b_outside = _dot(b_minus_m.to(DOT), b_v, acc=b_outside)

        # (queries, keys)
        b_scores = _block_scores(b_q.to(DOT), b_k.to(DOT), o_q, o_k, real, BLOCK, CHUNK)
        b_p, b_rescale, b_row_max, b_row_sum = _softmax_step(b_scores, b_row_max, b_row_sum, SCALE)
        if DROPOUT > 0:
            b_p *= _dropout_scale(seed, i_bh, o_q[:, None], o_k[None, :], DROPOUT)
        # (queries, D)
        if CHUNK > ROWS:  # a single tile has no earlier sum to rescale
            b_o *= b_rescale[:, None]
        b_o = _dot(b_p.to(DOT), b_v, acc=b_o)
    return b_o, b_row_sum, b_outside, b_inside


@triton.jit(do_not_specialize=["N"])
def _joint_out_kernel(
    q,
    k,
    v,
    padding,
    padded,
    alpha,
    beta,
    joint_offset,
    m,
    log_key_sum,
    S,
    seed,
    out,
    stride_b,
    stride_h,
    stride_n,
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
    """Write the output (1 - c u) Diag v + c (A S - M v) with u = 1 - Σ_j M.

    The grid is (B H, ⌈N / CHUNK⌉).

    Args:
        padded: int32 (B,), the number of padding keys of each sequence. It is None if padding is None.
        joint_offset: (B H,), the offset o of each head.
    """
    i_bh = tl.program_id(0).to(tl.int64)
    i_c = tl.program_id(1)
    i_b = i_bh // H
    offset = _head_offset(i_bh, stride_b, stride_h, H)
    offset_out = _head_offset(i_bh, stride_out_b, stride_out_h, H)
    start = i_c * CHUNK
    end = tl.minimum(start + CHUNK, N)

    o_d = tl.arange(0, D)
    b_alpha = tl.load(alpha + i_bh)
    b_beta = tl.load(beta + i_bh)
    b_l = _load_log_sum(m, log_key_sum, i_bh, D)
    inverse_min_s, b_min_s_over_s = _load_inverse_s(log_key_sum, i_bh, D)
    b_m = tl.load(m + i_bh * D + o_d)
    sequence_keys = _count_sequence_keys(padded, i_b, N)
    for i_r in range(0, CHUNK, ROWS):
        i_t = start + i_r
        o_q = i_t + tl.arange(0, ROWS)
        in_range = (o_q < end)[:, None]
        # (ROWS, D)
        b_q = tl.load(_row_pointers(q + offset, i_t, stride_n, ROWS, D), mask=in_range, other=0.0)
        if padding is not None:
            b_q = tl.where(_is_usable_query(b_q, padding, i_b, o_q, end, N)[:, None], b_q, 0.0)
        b_a = _query_features(b_q, b_alpha, b_l)
        # (D, D)
        b_state = tl.load(S + i_bh * D * D + o_d[:, None] * D + o_d[None, :]).to(DOT)
        # (ROWS, D)
        b_lln = _dot(b_a.to(DOT), b_state)
        b_o, b_row_sum, b_outside, b_inside = _block_and_outside(
            b_q,
            (b_a * b_min_s_over_s[None, :]).to(DOT),
            b_lln,
            inverse_min_s,
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
        # (ROWS,)
        b_u = _outside_mass(b_inside)
        b_block_keys = _count_block_keys(padding, i_b, o_q, start, end, N, BLOCK, CHUNK)
        b_c, _, _ = _outside_weight(b_u, tl.load(joint_offset + i_bh), b_block_keys, sequence_keys)
        b_block_weight = (1.0 - b_c * b_u) * _reciprocal_or_zero(b_row_sum)
        # (ROWS, D)
        b_o = b_block_weight[:, None] * b_o + b_c[:, None] * b_outside
        p_out = _row_pointers(out + offset_out, i_t, stride_out_n, ROWS, D)
        tl.store(p_out, b_o.to(out.dtype.element_ty), mask=in_range)
