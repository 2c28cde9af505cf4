"""Triton kernel of the first backward launch of the joint forms: what the others need of every query, six numbers.

The log-normaliser of the block's softmax, de, c, 1 - c u, du and δ = Σ_d A dA = c oe - du Σ_j M. As rows of P sum to 1,
δ needs no dA. Formulas: backends/pytorch/joint.py.
"""

# ruff: noqa: ANN001, ANN202 - arguments of kernels have no Python types

import triton
import triton.language as tl

from lln_fairseq.ops.backends.triton.backward_kernels import _times_state_transposed
from lln_fairseq.ops.backends.triton.forward_kernels import (
    _dropout_scale,
    _features,
    _log_normaliser,
    _offset,
    _real_keys,
    _rows,
    _same_block,
    _softmax_step,
    _usable,
)
from lln_fairseq.ops.backends.triton.joint_kernels import (
    _balance,
    _exp_keys_of,
    _keys_of_sequence,
    _outside,
    _outside_mass,
)


@triton.jit
def _row_sums(
    b_q, b_do, b_as, unbalance, k, v, pad, b_beta, b_m, seed, i_bh, i_b, o_q, start, end, stride_n, N,
    SCALE: tl.constexpr, DROPOUT: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, HAS_PAD: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of the queries o_q over their block: log-normaliser, de = Σ_j D E, Σ_j M, Σ_j M E and the keys; each (ROWS,)."""
    b_top = tl.full([ROWS], -1e30, tl.float32)
    b_sum = tl.zeros([ROWS], tl.float32)
    b_de = tl.zeros([ROWS], tl.float32)
    b_inside = tl.zeros([ROWS], tl.float32)
    b_me = tl.zeros([ROWS], tl.float32)
    b_count = tl.zeros([ROWS], tl.int32)
    for i_r in range(0, CHUNK, ROWS):
        i_t = start + i_r
        o_k = i_t + tl.arange(0, ROWS)
        real = _real_keys(pad, i_b, o_k, end, N, HAS_PAD)
        # (keys, D)
        b_v = tl.load(_rows(v, i_t, stride_n, ROWS, D), mask=real[:, None], other=0.0)
        # (queries, keys)
        seen = _same_block(o_q[:, None], o_k[None, :], real[None, :], BLOCK, CHUNK) & (o_q[:, None] >= 0)
        b_count += tl.sum(seen.to(tl.int32), 1)
        b_e = tl.dot(b_do, tl.trans(b_v.to(DOT)), input_precision=PRECISION)
        b_k = tl.load(_rows(k, i_t, stride_n, ROWS, D), mask=real[:, None], other=0.0)
        b_w = _exp_keys_of(b_k, b_beta, b_m, real)
        b_p = tl.dot(b_as, tl.trans(b_w.to(DOT)), input_precision=PRECISION) * unbalance
        b_p = tl.where(seen, b_p, 0.0)
        b_inside += tl.sum(b_p, 1)
        b_me += tl.sum(b_p * b_e, 1)

        b_x = tl.dot(b_q, tl.trans(b_k.to(DOT)), input_precision=PRECISION) * SCALE
        b_x = tl.where(seen, b_x, float("-inf"))
        if DROPOUT > 0:
            b_e *= _dropout_scale(seed, i_bh, o_q[:, None], o_k[None, :], DROPOUT)
        b_x, b_shrink, b_top, b_sum = _softmax_step(b_x, b_top, b_sum)
        b_de = b_de * b_shrink + tl.sum(b_x * b_e, 1)
    b_de = tl.where(b_sum > 0, b_de / tl.where(b_sum > 0, b_sum, 1.0), 0.0)
    b_lse = tl.where(b_sum > 0, b_top + tl.log(tl.where(b_sum > 0, b_sum, 1.0)), 0.0)
    return b_lse, b_de, b_inside, b_me, b_count


@triton.jit(do_not_specialize=["N"])
def _joint_rows_kernel(
    q, k, v, do, pad, keys, alpha, beta, parameter, m, s, S, seed, rows, dparameter,
    stride_b, stride_h, stride_n, stride_do_b, stride_do_h, stride_do_n, stride_row, H, N,
    FORM: tl.constexpr, SCALE: tl.constexpr, DROPOUT: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, SLICE: tl.constexpr, HAS_PAD: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The numbers of each query, rows (6, B H, N) float32, and each program's sum for the parameter's gradient."""
    i_bh, i_c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_b = i_bh // H
    offset = _offset(i_bh, stride_b, stride_h, H)
    p_do = do + _offset(i_bh, stride_do_b, stride_do_h, H)
    start = i_c * CHUNK
    end = tl.minimum(start + CHUNK, N)

    b_m = tl.load(m + i_bh * D + tl.arange(0, D))
    b_dparameter = tl.zeros([ROWS], tl.float32)
    for i_r in range(0, CHUNK, ROWS):
        i_t = start + i_r
        o_q = i_t + tl.arange(0, ROWS)
        inside = o_q < end
        # (ROWS, D)
        b_q = tl.load(_rows(q + offset, i_t, stride_n, ROWS, D), mask=inside[:, None], other=0.0)
        usable = _usable(b_q, pad, i_b, o_q, end, N, HAS_PAD)
        if HAS_PAD:
            b_q = tl.where(usable[:, None], b_q, 0.0)
        b_a = _features(b_q, tl.load(alpha + i_bh), _log_normaliser(m, s, i_bh, D))
        b_da = _times_state_transposed(
            p_do + i_t.to(tl.int64) * stride_do_n, inside, S + i_bh * D * D, stride_do_n, D, ROWS, SLICE, DOT, PRECISION
        )
        b_oe = tl.sum(b_a * b_da, 1)
        tl.debug_barrier()  # what was loaded so far is loaded anew instead of kept in registers
        b_q = tl.load(_rows(q + offset, i_t, stride_n, ROWS, D), mask=usable[:, None], other=0.0)
        b_do = tl.load(_rows(p_do, i_t, stride_do_n, ROWS, D), mask=inside[:, None], other=0.0).to(DOT)
        b_a = _features(b_q, tl.load(alpha + i_bh), _log_normaliser(m, s, i_bh, D))
        smallest, b_balance = _balance(s, i_bh, D)
        b_lse, b_de, b_inside, b_me, b_count = _row_sums(
            b_q.to(DOT), b_do, (b_a * b_balance[None, :]).to(DOT), 1.0 / smallest, k + offset, v + offset, pad,
            tl.load(beta + i_bh), b_m, seed, i_bh, i_b, o_q, start, end, stride_n, N,
            SCALE, DROPOUT, BLOCK, CHUNK, D, ROWS, HAS_PAD, DOT, PRECISION,
        )  # fmt: skip
        b_oe -= b_me
        b_u = _outside_mass(b_inside)
        total = _keys_of_sequence(keys, i_b, N, HAS_PAD)
        b_c, b_by_u, b_by_t = _outside(b_u, tl.load(parameter + i_bh), b_count, total, FORM)
        b_du = b_by_u * b_oe - (b_c + b_by_u * b_u) * b_de
        b_dparameter += b_by_t * (b_oe - b_u * b_de)
        if HAS_PAD:
            b_lse = tl.where(usable, b_lse, float("inf"))  # says that the query counts as 0
        p_row = rows + i_bh * N + o_q
        tl.store(p_row, b_lse, mask=inside)
        tl.store(p_row + stride_row, b_de, mask=inside)
        tl.store(p_row + 2 * stride_row, b_c, mask=inside)
        tl.store(p_row + 3 * stride_row, 1.0 - b_c * b_u, mask=inside)
        tl.store(p_row + 4 * stride_row, b_du, mask=inside)
        tl.store(p_row + 5 * stride_row, b_c * b_oe - b_du * b_inside, mask=inside)
    tl.store(dparameter + i_bh * tl.num_programs(1) + i_c, tl.sum(b_dparameter, 0))
