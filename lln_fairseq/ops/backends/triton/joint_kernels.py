"""Triton kernels of the joint form of LLN+Diag, forward, and the pieces that the backward pass shares.

Formulas: ops/joint.py and backends/pytorch/joint.py; notation of forward_kernels.py, whose first two kernels made m, s
and S. M, the block's part of P, is A W_bᵀ / s: the factor min s / s goes to A, where it is at most 1, the rest to the
product, so that half precision holds both operands at any N.
"""

# ruff: noqa: ANN001, ANN202 - arguments of kernels have no Python types

import triton
import triton.language as tl

from lln_fairseq.ops.backends.triton.backward_kernels import _exp_keys_of
from lln_fairseq.ops.backends.triton.forward_kernels import (
    LOG2E,
    _dropout_scale,
    _features,
    _inverse,
    _key_tile,
    _log_normaliser,
    _offset,
    _real_keys,
    _rows,
    _scores,
    _softmax_step,
    _usable,
)
from lln_fairseq.ops.joint import FLOOR as _FLOOR

FLOOR = tl.constexpr(_FLOOR)


@triton.jit
def _balance(log_s, i_bh, D: tl.constexpr):
    """1 / min_d s_d, and min s / s (D,)."""
    b_log_s = tl.load(log_s + i_bh * D + tl.arange(0, D))
    smallest = tl.min(b_log_s, 0)
    return tl.exp2(-smallest), tl.exp2(smallest - b_log_s)


@triton.jit
def _in_own_block(b_x, o_q, o_k, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """0 where a query and a key are of different blocks, which a chunk may hold."""
    return tl.where(o_q // BLOCK == o_k // BLOCK, b_x, 0.0) if CHUNK > BLOCK else b_x


@triton.jit
def _keys_in_block(pad, i_b, o_q, start, end, N, BLOCK: tl.constexpr, CHUNK: tl.constexpr, HAS_PAD: tl.constexpr):
    """The number of real keys in the block of each query, which lies in [start, end)."""
    first = o_q // BLOCK * BLOCK
    if not HAS_PAD:
        return tl.minimum(first + BLOCK, N) - first
    b_count = tl.zeros_like(o_q)
    for i_r in range(0, CHUNK, 16):
        o_k = start + i_r + tl.arange(0, 16)
        real = _real_keys(pad, i_b, o_k, end, N, HAS_PAD)[None, :]
        b_count += tl.sum((real & (first[:, None] == (o_k // BLOCK * BLOCK)[None, :])).to(tl.int32), 1)
    return b_count


@triton.jit
def _keys_of_sequence(padded, i_b, N, HAS_PAD: tl.constexpr):
    """The number of real keys of a sequence."""
    if HAS_PAD:
        return N - tl.load(padded + i_b)
    else:
        return N


@triton.jit
def _outside(b_u, b_t, b_count, total):
    """c, dc/du and dc/dparameter of rows with the mass u outside and b_count of `total` real keys inside."""
    b_e = tl.exp2(b_t * -LOG2E)
    b_d = b_u + (1.0 - b_u) * b_e
    b_c = 1.0 / tl.maximum(b_d, FLOOR)
    b_by_u = tl.where(b_d > FLOOR, -b_c * b_c * (1.0 - b_e), 0.0)
    b_by_t = tl.where(b_d > FLOOR, b_c * (1.0 - b_c * b_u), 0.0)
    none = b_count == 0
    special = none | (b_count == total)
    b_c = tl.where(none, 1.0, tl.where(special, 0.0, b_c))
    return b_c, tl.where(special, 0.0, b_by_u), tl.where(special, 0.0, b_by_t)


@triton.jit
def _outside_mass(b_inside):
    """u from the mass inside; rounding must not leave [0, 1]."""
    return tl.minimum(tl.maximum(1.0 - b_inside, 0.0), 1.0)


@triton.jit
def _joint_rows(
    b_q, b_as, b_all, unbalance, k, v, pad, b_beta, b_m, seed, i_bh, i_b, o_q, start, end, stride_n, N,
    SCALE: tl.constexpr, DROPOUT: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, HAS_PAD: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of the queries o_q over their block: Σ_j 2^(x - max) v and its normaliser, b_all - M v, Σ_j M."""
    b_top = tl.full([ROWS], -1e30, tl.float32)
    b_sum = tl.zeros([ROWS], tl.float32)
    b_inside = tl.zeros([ROWS], tl.float32)
    b_o = tl.zeros([ROWS, D], tl.float32)
    for i_r in range(0, CHUNK, ROWS):
        o_k, real, b_k, b_v = _key_tile(k, v, pad, i_b, start + i_r, end, stride_n, N, D, ROWS, HAS_PAD)
        b_v = b_v.to(DOT)
        # (queries, keys)
        b_w = _exp_keys_of(b_k, real, b_beta, b_m).to(DOT)
        b_p = tl.dot(b_as, tl.trans(b_w), input_precision=PRECISION)
        b_p = -unbalance * _in_own_block(b_p, o_q[:, None], o_k[None, :], BLOCK, CHUNK)
        b_inside -= tl.sum(b_p, 1)
        b_all = tl.dot(b_p.to(DOT), b_v, acc=b_all, input_precision=PRECISION)

        b_x = _scores(b_q.to(DOT), b_k.to(DOT), o_q, o_k, real, BLOCK, CHUNK, PRECISION)
        b_x, b_shrink, b_top, b_sum = _softmax_step(b_x, b_top, b_sum, SCALE)
        if DROPOUT > 0:
            b_x *= _dropout_scale(seed, i_bh, o_q[:, None], o_k[None, :], DROPOUT)
        if CHUNK > ROWS:  # else there is no earlier part
            b_o *= b_shrink[:, None]
        b_o = tl.dot(b_x.to(DOT), b_v, acc=b_o, input_precision=PRECISION)
    return b_o, b_sum, b_all, b_inside


@triton.jit(do_not_specialize=["N"])
def _joint_out_kernel(
    q, k, v, pad, padded, alpha, beta, parameter, m, log_s, S, seed, out,
    stride_b, stride_h, stride_n, stride_out_b, stride_out_h, stride_out_n, H, N,
    SCALE: tl.constexpr, DROPOUT: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, HAS_PAD: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out = (1 - c u) Diag + c (A S - M v), u = 1 - Σ_j M; padded: (B,) padded keys of a sequence, or None.

    grid (B H, ⌈N / CHUNK⌉): a program owns the CHUNK rows of one or more whole blocks, ROWS of them at a time.
    """
    i_bh, i_c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_b = i_bh // H
    offset = _offset(i_bh, stride_b, stride_h, H)
    offset_out = _offset(i_bh, stride_out_b, stride_out_h, H)
    start = i_c * CHUNK
    end = tl.minimum(start + CHUNK, N)

    o_d = tl.arange(0, D)
    b_alpha, b_beta = tl.load(alpha + i_bh), tl.load(beta + i_bh)
    b_l = _log_normaliser(m, log_s, i_bh, D)
    unbalance, b_balance = _balance(log_s, i_bh, D)
    b_m = tl.load(m + i_bh * D + o_d)
    total = _keys_of_sequence(padded, i_b, N, HAS_PAD)
    for i_r in range(0, CHUNK, ROWS):
        i_t = start + i_r
        o_q = i_t + tl.arange(0, ROWS)
        inside = (o_q < end)[:, None]
        # (ROWS, D)
        b_q = tl.load(_rows(q + offset, i_t, stride_n, ROWS, D), mask=inside, other=0.0)
        if HAS_PAD:
            b_q = tl.where(_usable(b_q, pad, i_b, o_q, end, N, HAS_PAD)[:, None], b_q, 0.0)
        b_a = _features(b_q, b_alpha, b_l)
        # (D, D)
        b_S = tl.load(S + i_bh * D * D + o_d[:, None] * D + o_d[None, :]).to(DOT)
        b_all = tl.dot(b_a.to(DOT), b_S, input_precision=PRECISION)
        b_o, b_sum, b_outside, b_inside = _joint_rows(
            b_q, (b_a * b_balance[None, :]).to(DOT), b_all, unbalance, k + offset, v + offset, pad, b_beta,
            b_m, seed, i_bh, i_b, o_q, start, end, stride_n, N,
            SCALE, DROPOUT, BLOCK, CHUNK, D, ROWS, HAS_PAD, DOT, PRECISION,
        )  # fmt: skip
        b_u = _outside_mass(b_inside)
        b_count = _keys_in_block(pad, i_b, o_q, start, end, N, BLOCK, CHUNK, HAS_PAD)
        b_c, _, _ = _outside(b_u, tl.load(parameter + i_bh), b_count, total)
        b_o = ((1.0 - b_c * b_u) * _inverse(b_sum))[:, None] * b_o + b_c[:, None] * b_outside
        p_out = _rows(out + offset_out, i_t, stride_out_n, ROWS, D)
        tl.store(p_out, b_o.to(out.dtype.element_ty), mask=inside)
