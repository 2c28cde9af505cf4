"""Triton kernels of the backward pass of the joint form. Formulas: backends/pytorch/joint.py, notation of its header.

    _joint_dq_kernel       q, k, v, do -> dq, dα, and six numbers of every query; joint_query_kernels.py
    _joint_dstate_kernel   q, do -> dS = Aᵀ (c do), g = Σ_i A δ per split of the tokens, joined by _lln_dcombine_kernel
    _joint_dkv_kernel      q, k, v, do -> dk, dv, dβ

dS and g are scaled as backward_kernels.py says.
"""

# ruff: noqa: ANN001, ANN202 - arguments of kernels have no Python types

import triton
import triton.language as tl

from lln_fairseq.ops.backends.triton.backward_kernels import (
    _exp_below_1,
    _exp_keys_of,
    _keys_times_state,
    _rounding,
    _state_scale,
    _times_state_transposed,
)
from lln_fairseq.ops.backends.triton.forward_kernels import (
    LOG2E,
    _dropout_scale,
    _features,
    _key_tile,
    _log_normaliser,
    _offset,
    _rows,
)
from lln_fairseq.ops.backends.triton.joint_kernels import _balance, _in_own_block


@triton.jit(do_not_specialize=["N", "T"])
def _joint_dstate_kernel(
    q, do, alpha, m, log_s, S, rows, g, dS,
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
    b_l = _log_normaliser(m, log_s, i_bh, D)
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
        b_log_s = tl.load(log_s + i_bh * D + o_d)
        scale, b_inverse = _state_scale(b_log_s, N), tl.exp2(-b_log_s)
        b_dS *= (b_inverse * scale)[:, None]
        b_S = tl.load(S + i_bh * D * D + o_dd).to(tl.float32)
        b_g = b_g * b_inverse + tl.sum(b_S * _rounding(b_dS, dS), 1) / scale
    tl.store(g + i_out * D + o_d, b_g)
    tl.store(dS + i_out * D * D + o_dd, b_dS.to(dS.dtype.element_ty))


@triton.jit
def _block_gradients(
    b_k, b_v, b_w, q, p_do, p_rows, b_alpha, m, log_s, seed, i_bh, o_k, start, end, stride_n, stride_do_n, stride_row,
    SCALE: tl.constexpr, DROPOUT: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, HAS_PAD: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of the keys o_k, (ROWS, D): ((1 - c u) D - c M)ᵀ do, what the softmax gives to dk, over SCALE, and Xᵀ A.

    In the rows of padded keys stands anything finite.
    """
    b_dv = tl.zeros([ROWS, D], tl.float32)
    b_dk = tl.zeros([ROWS, D], tl.float32)
    b_xa = tl.zeros([ROWS, D], tl.float32)
    for i_j in range(0, CHUNK, ROWS):
        o_q = start + i_j + tl.arange(0, ROWS)
        inside = o_q < end
        b_lse = tl.load(p_rows + o_q, mask=inside, other=0.0)
        b_de = tl.load(p_rows + stride_row + o_q, mask=inside, other=0.0)
        b_c = tl.load(p_rows + 2 * stride_row + o_q, mask=inside, other=0.0)
        b_diag = tl.load(p_rows + 3 * stride_row + o_q, mask=inside, other=0.0)
        b_du = tl.load(p_rows + 4 * stride_row + o_q, mask=inside, other=0.0)
        usable = inside & (b_lse != float("inf")) if HAS_PAD else inside
        # (queries, D)
        b_q = tl.load(_rows(q, start + i_j, stride_n, ROWS, D), mask=usable[:, None], other=0.0)
        b_do = tl.load(_rows(p_do, start + i_j, stride_do_n, ROWS, D), mask=inside[:, None], other=0.0).to(DOT)
        b_a = _features(b_q, b_alpha, _log_normaliser(m, log_s, i_bh, D))
        unbalance, b_balance = _balance(log_s, i_bh, D)
        # (queries, keys), not transposed: then a thread needs the numbers of few queries
        b_x = tl.dot(b_q.to(DOT), tl.trans(b_k), input_precision=PRECISION)
        b_p = b_diag[:, None] * _exp_below_1(b_x * (SCALE * LOG2E) - b_lse[:, None])
        b_as = (b_a * b_balance[None, :]).to(DOT)
        b_m = tl.dot(b_as, tl.trans(b_w), input_precision=PRECISION) * (unbalance * b_c)[:, None]
        b_keep = 1.0
        if DROPOUT > 0:
            b_keep = _dropout_scale(seed, i_bh, o_q[:, None], o_k[None, :], DROPOUT)
        b_x = _in_own_block(b_p * b_keep - b_m, o_q[:, None], o_k[None, :], BLOCK, CHUNK)
        b_dv = tl.dot(tl.trans(b_x.to(DOT)), b_do, acc=b_dv, input_precision=PRECISION)

        b_e = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        b_x = _in_own_block(-b_c[:, None] * b_e - b_du[:, None], o_q[:, None], o_k[None, :], BLOCK, CHUNK)
        b_xa = tl.dot(tl.trans(b_x.to(DOT)), b_a.to(DOT), acc=b_xa, input_precision=PRECISION)
        b_x = _in_own_block(b_p * (b_e * b_keep - b_de[:, None]), o_q[:, None], o_k[None, :], BLOCK, CHUNK)
        b_dk = tl.dot(tl.trans(b_x.to(DOT)), b_q.to(DOT), acc=b_dk, input_precision=PRECISION)
    return b_dv, b_dk, b_xa


@triton.jit(do_not_specialize=["N"])
def _joint_dkv_kernel(
    q, k, v, do, pad, alpha, beta, m, log_s, g, dS, seed, rows, dk, dv, dbeta,
    stride_b, stride_h, stride_n, stride_do_b, stride_do_h, stride_do_n, stride_out_b, stride_out_h, stride_out_n,
    stride_row, H, N,
    SCALE: tl.constexpr, DROPOUT: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, SLICE: tl.constexpr, HAS_PAD: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk, dv and each program's Σ k dy, from dS, g and the numbers of _joint_dq_kernel; grid of _joint_out_kernel."""
    i_bh, i_c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_b = i_bh // H
    offset = _offset(i_bh, stride_b, stride_h, H)
    offset_out = _offset(i_bh, stride_out_b, stride_out_h, H)
    p_do = do + _offset(i_bh, stride_do_b, stride_do_h, H)
    p_rows = rows + i_bh * N
    start = i_c * CHUNK
    end = tl.minimum(start + CHUNK, N)
    o_d = tl.arange(0, D)
    b_alpha, b_beta = tl.load(alpha + i_bh), tl.load(beta + i_bh)
    p_m, p_log_s = m + i_bh * D + o_d, log_s + i_bh * D + o_d
    scale = _state_scale(tl.load(p_log_s), N)
    unscale = 1.0 / scale
    b_dbeta = tl.zeros([ROWS], tl.float32)
    for i_r in range(0, CHUNK, ROWS):
        i_t = start + i_r
        o_k, real, b_k, b_v = _key_tile(k + offset, v + offset, pad, i_b, i_t, end, stride_n, N, D, ROWS, HAS_PAD)
        inside = (o_k < end)[:, None]
        p_k = k + offset + i_t.to(tl.int64) * stride_n
        p_v = v + offset + i_t.to(tl.int64) * stride_n
        # (ROWS, D)
        b_w = _exp_keys_of(b_k, real, b_beta, tl.load(p_m)).to(DOT)
        b_dv, b_dk, b_dw = _block_gradients(
            b_k.to(DOT), b_v.to(DOT), b_w, q + offset, p_do, p_rows, b_alpha, m, log_s, seed, i_bh, o_k,
            start, end, stride_n, stride_do_n, stride_row,
            SCALE, DROPOUT, BLOCK, CHUNK, D, ROWS, HAS_PAD, DOT, PRECISION,
        )  # fmt: skip
        b_dv = _keys_times_state(
            scale * b_dv, p_k, real, b_beta, m + i_bh * D, dS + i_bh * D * D, stride_n, D, ROWS, SLICE, DOT, PRECISION
        )
        b_dv = tl.where(real[:, None], unscale * b_dv, 0.0)
        tl.store(_rows(dv + offset_out, i_t, stride_out_n, ROWS, D), b_dv.to(dv.dtype.element_ty), mask=inside)
        # v dSᵀ + Xᵀ A / s
        b_dw = _times_state_transposed(
            b_dw * (scale * tl.exp2(-tl.load(p_log_s)))[None, :], p_v, real, dS + i_bh * D * D, stride_n,
            D, ROWS, SLICE, DOT, PRECISION,
        )  # fmt: skip
        b_k = tl.load(_rows(k + offset, i_t, stride_n, ROWS, D), mask=real[:, None], other=0.0)
        b_dw = unscale * b_dw - tl.load(g + i_bh * D + o_d)[None, :]
        b_dy = _exp_keys_of(b_k, real, b_beta, tl.load(p_m)) * b_dw
        b_dbeta += tl.sum(b_k.to(tl.float32) * b_dy, 1)
        b_dk = tl.where(real[:, None], b_beta * b_dy + SCALE * b_dk, 0.0)
        tl.store(_rows(dk + offset_out, i_t, stride_out_n, ROWS, D), b_dk.to(dk.dtype.element_ty), mask=inside)
    tl.store(dbeta + i_bh * tl.num_programs(1) + i_c, tl.sum(b_dbeta, 0))
