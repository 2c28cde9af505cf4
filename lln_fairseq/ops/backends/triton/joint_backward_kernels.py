"""Triton kernels of the backward pass of the joint forms. Formulas: backends/pytorch/joint.py, notation of its header.

    _joint_rows_kernel     q, k, v, do -> six numbers of every query, the parameter's gradient; joint_row_kernels.py
    _joint_dq_kernel       q, k, v, do -> dq, dα
    _joint_dstate_kernel   q, do -> dS = Aᵀ (c do), g = Σ_i A δ per split of the tokens, joined by _lln_dcombine_kernel
    _joint_dkv_kernel      q, k, v, do -> dk, dv, dβ

dS and g are scaled as backward_kernels.py says.
"""

# ruff: noqa: ANN001, ANN202 - arguments of kernels have no Python types

import triton
import triton.language as tl

from lln_fairseq.ops.backends.triton.backward_kernels import (
    _exp_below_1,
    _exp_keys,
    _inverse,
    _keys_times_state,
    _rounding,
    _state_scale,
    _times_state_transposed,
)
from lln_fairseq.ops.backends.triton.forward_kernels import (
    _dropout_scale,
    _features,
    _log_normaliser,
    _offset,
    _real_keys,
    _rows,
    _same_block,
)
from lln_fairseq.ops.backends.triton.joint_kernels import (
    _balance,
    _exp_keys_of,
)


@triton.jit(do_not_specialize=["N"])
def _joint_dq_kernel(
    q, k, v, do, pad, alpha, beta, m, s, S, seed, rows, dq, dalpha,
    stride_b, stride_h, stride_n, stride_do_b, stride_do_h, stride_do_n, stride_out_b, stride_out_h, stride_out_n,
    stride_row, H, N,
    SCALE: tl.constexpr, DROPOUT: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, SLICE: tl.constexpr, HAS_PAD: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, and each program's Σ q dx, from the numbers of _joint_rows_kernel; grid of _joint_out_kernel."""
    i_bh, i_c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_b = i_bh // H
    offset = _offset(i_bh, stride_b, stride_h, H)
    offset_out = _offset(i_bh, stride_out_b, stride_out_h, H)
    p_do = do + _offset(i_bh, stride_do_b, stride_do_h, H)
    start = i_c * CHUNK
    end = tl.minimum(start + CHUNK, N)
    o_d = tl.arange(0, D)
    b_alpha, b_beta = tl.load(alpha + i_bh), tl.load(beta + i_bh)
    b_m = tl.load(m + i_bh * D + o_d)
    b_dalpha = tl.zeros([ROWS], tl.float32)
    for i_r in range(0, CHUNK, ROWS):
        i_t = start + i_r
        o_q = i_t + tl.arange(0, ROWS)
        inside = o_q < end
        p_row = rows + i_bh * N + o_q
        b_lse = tl.load(p_row, mask=inside, other=0.0)
        usable = inside
        if HAS_PAD:
            usable = usable & (b_lse != float("inf"))
        # (ROWS, D)
        b_q = tl.load(_rows(q + offset, i_t, stride_n, ROWS, D), mask=usable[:, None], other=0.0)
        b_do = tl.load(_rows(p_do, i_t, stride_do_n, ROWS, D), mask=inside[:, None], other=0.0).to(DOT)
        b_de = tl.load(p_row + stride_row, mask=inside, other=0.0)
        b_c = tl.load(p_row + 2 * stride_row, mask=inside, other=0.0)
        b_diag = tl.load(p_row + 3 * stride_row, mask=inside, other=0.0)
        b_du = tl.load(p_row + 4 * stride_row, mask=inside, other=0.0)
        b_dq = tl.zeros([ROWS, D], tl.float32)
        b_da = tl.zeros([ROWS, D], tl.float32)
        for i_j in range(0, CHUNK, ROWS):
            o_k = start + i_j + tl.arange(0, ROWS)
            real = _real_keys(pad, i_b, o_k, end, N, HAS_PAD)
            b_k = tl.load(_rows(k + offset, start + i_j, stride_n, ROWS, D), mask=real[:, None], other=0.0)
            b_v = tl.load(_rows(v + offset, start + i_j, stride_n, ROWS, D), mask=real[:, None], other=0.0)
            # (queries, keys)
            seen = _same_block(o_q[:, None], o_k[None, :], real[None, :], BLOCK, CHUNK) & (o_q[:, None] >= 0)
            b_e = tl.dot(b_do, tl.trans(b_v.to(DOT)), input_precision=PRECISION)
            b_x = tl.where(seen, -(b_c[:, None] * b_e + b_du[:, None]), 0.0)
            b_w = _exp_keys_of(b_k, b_beta, b_m, real)
            b_da = tl.dot(b_x.to(DOT), b_w.to(DOT), acc=b_da, input_precision=PRECISION)
            if DROPOUT > 0:
                b_e *= _dropout_scale(seed, i_bh, o_q[:, None], o_k[None, :], DROPOUT)
            b_x = tl.dot(b_q.to(DOT), tl.trans(b_k.to(DOT)), input_precision=PRECISION) * SCALE
            b_x = tl.where(seen, b_x, float("-inf"))
            b_x = _exp_below_1(b_x - b_lse[:, None]) * (b_diag[:, None] * (b_e - b_de[:, None]))
            b_dq = tl.dot(b_x.to(DOT), b_k.to(DOT), acc=b_dq, input_precision=PRECISION)
        b_da *= _inverse(tl.load(s + i_bh * D + o_d))[None, :]
        b_da += b_c[:, None] * _times_state_transposed(
            p_do + i_t.to(tl.int64) * stride_do_n, inside, S + i_bh * D * D, stride_do_n, D, ROWS, SLICE, DOT, PRECISION
        )
        b_delta = tl.load(p_row + 5 * stride_row, mask=inside, other=0.0)
        b_q = tl.load(_rows(q + offset, i_t, stride_n, ROWS, D), mask=usable[:, None], other=0.0)
        b_dx = _features(b_q, b_alpha, _log_normaliser(m, s, i_bh, D)) * (b_da - b_delta[:, None])
        b_dalpha += tl.sum(b_q.to(tl.float32) * b_dx, 1)
        p_dq = _rows(dq + offset_out, i_t, stride_out_n, ROWS, D)
        tl.store(p_dq, (b_alpha * b_dx + SCALE * b_dq).to(dq.dtype.element_ty), mask=inside[:, None])
    tl.store(dalpha + i_bh * tl.num_programs(1) + i_c, tl.sum(b_dalpha, 0))


@triton.jit(do_not_specialize=["N", "T"])
def _joint_dstate_kernel(
    q, do, alpha, m, s, S, rows, g, dS,
    stride_b, stride_h, stride_n, stride_do_b, stride_do_h, stride_do_n, stride_row, H, N, T,
    FINAL: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, HAS_PAD: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Σ_i A_id c_i do_i and Σ_i A_id δ_i over tokens [i_s T, (i_s + 1) T); grid and FINAL of _lln_dstate_kernel."""
    i_bh, i_s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_out = i_bh * tl.num_programs(1) + i_s
    p_q = q + _offset(i_bh, stride_b, stride_h, H)
    p_do = do + _offset(i_bh, stride_do_b, stride_do_h, H)
    start = i_s * T
    end = tl.minimum(start + T, N)
    o_d = tl.arange(0, D)
    o_dd = o_d[:, None] * D + o_d[None, :]
    b_alpha = tl.load(alpha + i_bh)
    b_l = _log_normaliser(m, s, i_bh, D)
    b_dS = tl.zeros([D, D], tl.float32)
    b_g = tl.zeros([D], tl.float32)
    for i_r in range(0, end - start, ROWS):
        i_t = start + i_r
        o_q = i_t + tl.arange(0, ROWS)
        inside = o_q < end
        p_row = rows + i_bh * N + o_q
        usable = inside
        if HAS_PAD:
            usable = usable & (tl.load(p_row, mask=inside, other=0.0) != float("inf"))
        b_c = tl.load(p_row + 2 * stride_row, mask=inside, other=0.0)
        b_delta = tl.load(p_row + 5 * stride_row, mask=inside, other=0.0)
        # (ROWS, D)
        b_q = tl.load(_rows(p_q, i_t, stride_n, ROWS, D), mask=usable[:, None], other=0.0)
        b_do = tl.load(_rows(p_do, i_t, stride_do_n, ROWS, D), mask=inside[:, None], other=0.0)
        b_a = _features(b_q, b_alpha, b_l)
        b_g += tl.sum(b_a * b_delta[:, None], 0)
        b_a = (b_a * b_c[:, None]).to(DOT)
        b_dS = tl.dot(tl.trans(b_a), b_do.to(DOT), acc=b_dS, input_precision=PRECISION)

    if FINAL:
        b_s = tl.load(s + i_bh * D + o_d)
        scale = _state_scale(b_s, N)
        b_dS *= (_inverse(b_s) * scale)[:, None]
        b_S = tl.load(S + i_bh * D * D + o_dd).to(tl.float32)
        b_g = b_g * _inverse(b_s) + tl.sum(b_S * _rounding(b_dS, dS), 1) / scale
    tl.store(g + i_out * D + o_d, b_g)
    tl.store(dS + i_out * D * D + o_dd, b_dS.to(dS.dtype.element_ty))


@triton.jit(do_not_specialize=["N"])
def _joint_dkv_kernel(
    q, k, v, do, pad, alpha, beta, m, s, g, dS, seed, rows, dk, dv, dbeta,
    stride_b, stride_h, stride_n, stride_do_b, stride_do_h, stride_do_n, stride_out_b, stride_out_h, stride_out_n,
    stride_row, H, N,
    SCALE: tl.constexpr, DROPOUT: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, SLICE: tl.constexpr, HAS_PAD: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk, dv and each program's Σ k dy, from dS, g and the numbers of _joint_rows_kernel; grid of _joint_out_kernel."""
    i_bh, i_c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_b = i_bh // H
    offset = _offset(i_bh, stride_b, stride_h, H)
    offset_out = _offset(i_bh, stride_out_b, stride_out_h, H)
    p_do = do + _offset(i_bh, stride_do_b, stride_do_h, H)
    start = i_c * CHUNK
    end = tl.minimum(start + CHUNK, N)
    o_d = tl.arange(0, D)
    b_alpha, b_beta = tl.load(alpha + i_bh), tl.load(beta + i_bh)
    b_l = _log_normaliser(m, s, i_bh, D)
    smallest, b_balance = _balance(s, i_bh, D)
    unbalance = 1.0 / smallest
    b_m = tl.load(m + i_bh * D + o_d)
    unscale = 1.0 / _state_scale(tl.load(s + i_bh * D + o_d), N)
    b_dbeta = tl.zeros([ROWS], tl.float32)
    for i_r in range(0, CHUNK, ROWS):
        i_t = start + i_r
        o_k = i_t + tl.arange(0, ROWS)
        inside = (o_k < end)[:, None]
        real = _real_keys(pad, i_b, o_k, end, N, HAS_PAD)
        # (keys, D)
        b_k = tl.load(_rows(k + offset, i_t, stride_n, ROWS, D), mask=real[:, None], other=0.0)
        b_v = tl.load(_rows(v + offset, i_t, stride_n, ROWS, D), mask=real[:, None], other=0.0).to(DOT)
        b_w = _exp_keys_of(b_k, b_beta, b_m, real).to(DOT)
        b_dk = tl.zeros([ROWS, D], tl.float32)
        b_dv = tl.zeros([ROWS, D], tl.float32)
        b_xa = tl.zeros([ROWS, D], tl.float32)
        for i_j in range(0, CHUNK, ROWS):
            o_q = start + i_j + tl.arange(0, ROWS)
            p_row = rows + i_bh * N + o_q
            b_lse = tl.load(p_row, mask=o_q < end, other=0.0)
            b_de = tl.load(p_row + stride_row, mask=o_q < end, other=0.0)
            b_c = tl.load(p_row + 2 * stride_row, mask=o_q < end, other=0.0)
            b_diag = tl.load(p_row + 3 * stride_row, mask=o_q < end, other=0.0)
            b_du = tl.load(p_row + 4 * stride_row, mask=o_q < end, other=0.0)
            usable = o_q < end
            if HAS_PAD:
                usable = usable & (b_lse != float("inf"))
            # (queries, D)
            b_q = tl.load(_rows(q + offset, start + i_j, stride_n, ROWS, D), mask=usable[:, None], other=0.0)
            b_do = tl.load(_rows(p_do, start + i_j, stride_do_n, ROWS, D), mask=(o_q < end)[:, None], other=0.0).to(DOT)
            # (keys, queries)
            seen = _same_block(o_q[None, :], o_k[:, None], real[:, None], BLOCK, CHUNK) & (o_q[None, :] >= 0)
            b_x = tl.dot(b_k.to(DOT), tl.trans(b_q.to(DOT)), input_precision=PRECISION) * SCALE
            b_x = tl.where(seen, b_x, float("-inf"))
            b_p = b_diag[None, :] * _exp_below_1(b_x - b_lse[None, :])
            b_e = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
            b_a = _features(b_q, b_alpha, b_l)
            b_x = tl.where(seen, -(b_c[None, :] * b_e + b_du[None, :]), 0.0)
            b_xa = tl.dot(b_x.to(DOT), b_a.to(DOT), acc=b_xa, input_precision=PRECISION)
            b_as = (b_a * b_balance[None, :]).to(DOT)
            b_x = tl.dot(b_w, tl.trans(b_as), input_precision=PRECISION) * (unbalance * b_c)[None, :]
            b_x = tl.where(seen, -b_x, 0.0)
            if DROPOUT > 0:
                b_keep = _dropout_scale(seed, i_bh, o_q[None, :], o_k[:, None], DROPOUT)
                b_e *= b_keep
                b_x += b_p * b_keep
            else:
                b_x += b_p
            b_dv = tl.dot(b_x.to(DOT), b_do, acc=b_dv, input_precision=PRECISION)
            b_p *= b_e - b_de[None, :]
            b_dk = tl.dot(b_p.to(DOT), b_q.to(DOT), acc=b_dk, input_precision=PRECISION)
        p_k = k + offset + i_t.to(tl.int64) * stride_n
        p_v = v + offset + i_t.to(tl.int64) * stride_n
        b_dv += unscale * _keys_times_state(
            p_k, real, b_beta, m + i_bh * D, dS + i_bh * D * D, stride_n, D, ROWS, SLICE, DOT, PRECISION
        )
        tl.store(_rows(dv + offset_out, i_t, stride_out_n, ROWS, D), b_dv.to(dv.dtype.element_ty), mask=inside)
        b_dw = _times_state_transposed(p_v, real, dS + i_bh * D * D, stride_n, D, ROWS, SLICE, DOT, PRECISION)
        b_inverse = _inverse(tl.load(s + i_bh * D + o_d))
        b_dw = unscale * b_dw + b_xa * b_inverse[None, :] - tl.load(g + i_bh * D + o_d)[None, :]
        b_dy = _exp_keys(p_k, o_d, real, b_beta, m + i_bh * D, stride_n, ROWS) * b_dw
        b_dk = b_beta * b_dy + SCALE * b_dk
        tl.store(_rows(dk + offset_out, i_t, stride_out_n, ROWS, D), b_dk.to(dk.dtype.element_ty), mask=inside)
        b_k = tl.load(_rows(k + offset, i_t, stride_n, ROWS, D), mask=real[:, None], other=0.0)
        b_dbeta += tl.sum(b_k.to(tl.float32) * b_dy, 1)
    tl.store(dbeta + i_bh * tl.num_programs(1) + i_c, tl.sum(b_dbeta, 0))
