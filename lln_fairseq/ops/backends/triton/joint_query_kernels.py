"""Triton kernel of the first backward launch of the joint form: q, k, v, do -> dq, dα, the parameter's gradient, and
what the other launches need of every query, six numbers.

They are the log-normaliser of the block's softmax, de, c, 1 - c u, du and δ = Σ_d A dA = c oe - du Σ_j M. As rows of P
sum to 1, δ needs no dA. Formulas: backends/pytorch/joint.py.
"""

# ruff: noqa: ANN001, ANN202 - arguments of kernels have no Python types

import triton
import triton.language as tl

from lln_fairseq.ops.backends.triton.backward_kernels import _exp_below_1, _exp_keys_of, _times_state_transposed
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
from lln_fairseq.ops.backends.triton.joint_kernels import (
    _balance,
    _in_own_block,
    _keys_in_block,
    _keys_of_sequence,
    _outside,
    _outside_mass,
)


@triton.jit
def _row_sums(
    b_q, b_do, b_as, k, v, pad, b_beta, b_m, seed, i_bh, i_b, o_q, start, end, stride_n, N,
    SCALE: tl.constexpr, DROPOUT: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, HAS_PAD: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of the queries o_q over their block: log-normaliser, de = Σ_j D E, and over min s Σ_j M and Σ_j M E; (ROWS,)."""
    b_top = tl.full([ROWS], -1e30, tl.float32)
    b_sum = tl.zeros([ROWS], tl.float32)
    b_de = tl.zeros([ROWS], tl.float32)
    b_inside = tl.zeros([ROWS], tl.float32)
    b_me = tl.zeros([ROWS], tl.float32)
    for i_r in range(0, CHUNK, ROWS):
        o_k, real, b_k, b_v = _key_tile(k, v, pad, i_b, start + i_r, end, stride_n, N, D, ROWS, HAS_PAD)
        # (queries, keys)
        b_e = tl.dot(b_do, tl.trans(b_v.to(DOT)), input_precision=PRECISION)
        b_w = _exp_keys_of(b_k, real, b_beta, b_m).to(DOT)
        b_p = tl.dot(b_as, tl.trans(b_w), input_precision=PRECISION)
        b_p = _in_own_block(b_p, o_q[:, None], o_k[None, :], BLOCK, CHUNK)
        b_inside += tl.sum(b_p, 1)
        b_me += tl.sum(b_p * b_e, 1)

        b_x = _scores(b_q, b_k.to(DOT), o_q, o_k, real, BLOCK, CHUNK, PRECISION)
        if DROPOUT > 0:
            b_e *= _dropout_scale(seed, i_bh, o_q[:, None], o_k[None, :], DROPOUT)
        b_x, b_shrink, b_top, b_sum = _softmax_step(b_x, b_top, b_sum, SCALE)
        b_de = b_de * b_shrink + tl.sum(b_x * b_e, 1)
    return _log_sum(b_top, b_sum), b_de * _inverse(b_sum), b_inside, b_me


@triton.jit
def _row_gradients(
    b_q, b_do, b_da, b_lse, b_de, b_c, b_diag, b_du, k, v, pad, b_beta, b_m, seed, i_bh, i_b, o_q, start, end,
    stride_n, N,
    SCALE: tl.constexpr, DROPOUT: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, HAS_PAD: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of the queries o_q over their block: what the softmax gives to dq, over SCALE, and b_da + X W; (ROWS, D)."""
    b_dq = tl.zeros([ROWS, D], tl.float32)
    for i_r in range(0, CHUNK, ROWS):
        o_k, real, b_k, b_v = _key_tile(k, v, pad, i_b, start + i_r, end, stride_n, N, D, ROWS, HAS_PAD)
        # (queries, keys)
        b_e = tl.dot(b_do, tl.trans(b_v.to(DOT)), input_precision=PRECISION)
        b_w = _exp_keys_of(b_k, real, b_beta, b_m).to(DOT)
        b_x = _in_own_block(-b_c[:, None] * b_e - b_du[:, None], o_q[:, None], o_k[None, :], BLOCK, CHUNK)
        b_da = tl.dot(b_x.to(DOT), b_w, acc=b_da, input_precision=PRECISION)

        b_x = _scores(b_q, b_k.to(DOT), o_q, o_k, real, BLOCK, CHUNK, PRECISION)
        if DROPOUT > 0:
            b_e *= _dropout_scale(seed, i_bh, o_q[:, None], o_k[None, :], DROPOUT)
        b_p = _exp_below_1(b_x * (SCALE * LOG2E) - b_lse[:, None])
        b_x = b_p * (b_diag[:, None] * (b_e - b_de[:, None]))
        b_dq = tl.dot(b_x.to(DOT), b_k.to(DOT), acc=b_dq, input_precision=PRECISION)
    return b_dq, b_da


@triton.jit(do_not_specialize=["N"])
def _joint_dq_kernel(
    q, k, v, do, pad, padded, alpha, beta, parameter, m, log_s, S, seed, rows, dq, dalpha, dparameter,
    stride_b, stride_h, stride_n, stride_do_b, stride_do_h, stride_do_n, stride_out_b, stride_out_h, stride_out_n,
    stride_row, H, N,
    SCALE: tl.constexpr, DROPOUT: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, SLICE: tl.constexpr, HAS_PAD: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, the numbers of each query, rows (6, B H, N) float32, and each program's sums for dα and the parameter.

    grid of _joint_out_kernel: a program has whole blocks, so it finds the numbers itself.
    """
    i_bh, i_c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_b = i_bh // H
    offset = _offset(i_bh, stride_b, stride_h, H)
    offset_out = _offset(i_bh, stride_out_b, stride_out_h, H)
    p_do = do + _offset(i_bh, stride_do_b, stride_do_h, H)
    start = i_c * CHUNK
    end = tl.minimum(start + CHUNK, N)

    o_d = tl.arange(0, D)
    b_alpha, b_beta = tl.load(alpha + i_bh), tl.load(beta + i_bh)
    total = _keys_of_sequence(padded, i_b, N, HAS_PAD)
    b_dparameter = tl.zeros([ROWS], tl.float32)
    b_dalpha = tl.zeros([ROWS], tl.float32)
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
        b_a = _features(b_q, b_alpha, _log_normaliser(m, log_s, i_bh, D))
        b_m = tl.load(m + i_bh * D + o_d)
        unbalance, b_balance = _balance(log_s, i_bh, D)
        b_lse, b_de, b_inside, b_me = _row_sums(
            b_q.to(DOT), b_do, (b_a * b_balance[None, :]).to(DOT), k + offset, v + offset, pad, b_beta, b_m, seed,
            i_bh, i_b, o_q, start, end, stride_n, N,
            SCALE, DROPOUT, BLOCK, CHUNK, D, ROWS, HAS_PAD, DOT, PRECISION,
        )  # fmt: skip
        b_da = _times_state_transposed(
            tl.zeros([ROWS, D], tl.float32), p_do + i_t.to(tl.int64) * stride_do_n, inside, S + i_bh * D * D,
            stride_do_n, D, ROWS, SLICE, DOT, PRECISION,
        )  # fmt: skip
        # (ROWS,)
        b_inside *= unbalance
        b_oe = tl.sum(b_a * b_da, 1) - unbalance * b_me
        b_u = _outside_mass(b_inside)
        b_count = _keys_in_block(pad, i_b, o_q, start, end, N, BLOCK, CHUNK, HAS_PAD)
        b_c, b_by_u, b_by_t = _outside(b_u, tl.load(parameter + i_bh), b_count, total)
        b_diag = 1.0 - b_c * b_u
        b_du = b_by_u * b_oe - (b_c + b_by_u * b_u) * b_de
        b_delta = b_c * b_oe - b_du * b_inside
        b_dparameter += b_by_t * (b_oe - b_u * b_de)
        if HAS_PAD:
            b_lse = tl.where(usable, b_lse, float("inf"))  # says that the query counts as 0

        # dA = (c s do Sᵀ + X W) / s
        p_log_s = log_s + i_bh * D + o_d
        b_dq, b_da = _row_gradients(
            b_q.to(DOT), b_do, b_c[:, None] * tl.exp2(tl.load(p_log_s))[None, :] * b_da, b_lse, b_de, b_c, b_diag, b_du,
            k + offset, v + offset, pad, b_beta, b_m, seed, i_bh, i_b, o_q, start, end, stride_n, N,
            SCALE, DROPOUT, BLOCK, CHUNK, D, ROWS, HAS_PAD, DOT, PRECISION,
        )  # fmt: skip
        p_row = rows + i_bh * N + o_q
        tl.store(p_row, b_lse, mask=inside)
        tl.store(p_row + stride_row, b_de, mask=inside)
        tl.store(p_row + 2 * stride_row, b_c, mask=inside)
        tl.store(p_row + 3 * stride_row, b_diag, mask=inside)
        tl.store(p_row + 4 * stride_row, b_du, mask=inside)
        tl.store(p_row + 5 * stride_row, b_delta, mask=inside)
        b_q = tl.load(_rows(q + offset, i_t, stride_n, ROWS, D), mask=usable[:, None], other=0.0)  # anew: not kept
        b_dx = b_a * (tl.exp2(-tl.load(p_log_s))[None, :] * b_da - b_delta[:, None])
        b_dalpha += tl.sum(b_q.to(tl.float32) * b_dx, 1)
        p_dq = _rows(dq + offset_out, i_t, stride_out_n, ROWS, D)
        tl.store(p_dq, (b_alpha * b_dx + SCALE * b_dq).to(dq.dtype.element_ty), mask=inside[:, None])
    i_program = i_bh * tl.num_programs(1) + i_c
    tl.store(dalpha + i_program, tl.sum(b_dalpha, 0))
    tl.store(dparameter + i_program, tl.sum(b_dparameter, 0))
