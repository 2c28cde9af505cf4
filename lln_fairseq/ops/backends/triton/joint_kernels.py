"""Triton kernels of the joint forms of LLN+Diag, forward, and the pieces that the backward pass shares.

Formulas: ops/joint.py and backends/pytorch/joint.py; notation of forward_kernels.py, whose first two kernels made m, s
and S. M, the block's part of P, is A W_bᵀ / s: the factor min s / s goes to A, where it is at most 1, the rest to the
product, so that half precision holds both operands at any N.
"""

# ruff: noqa: ANN001, ANN202 - arguments of kernels have no Python types

import triton
import triton.language as tl

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
from lln_fairseq.ops.joint import SHARE_FLOOR

FLOOR = tl.constexpr(SHARE_FLOOR)
OFFSET = tl.constexpr(1)  # 1 + the place in joint.FORMS


@triton.jit
def _balance(s, i_bh, D: tl.constexpr):
    """min_d s_d, and min s / s (D,), 0 where there is no real key."""
    b_s = tl.load(s + i_bh * D + tl.arange(0, D))
    smallest = tl.min(tl.where(b_s > 0, b_s, 1.0), 0)
    return smallest, tl.where(b_s > 0, smallest / tl.where(b_s > 0, b_s, 1.0), 0.0)


@triton.jit
def _exp_keys_of(b_k, b_beta, b_m, real):
    """W = exp(βk - m), (ROWS, D), 0 in padded rows; what rounding has left above 0 in the exponent counts as 0."""
    b_y = b_beta * b_k.to(tl.float32) - b_m[None, :]
    return tl.exp(tl.where(real[:, None], tl.where(b_y > 0, 0.0, b_y), float("-inf")))


@triton.jit
def _keys_of_sequence(keys, i_b, N, HAS_PAD: tl.constexpr):
    """The number of real keys of a sequence."""
    if HAS_PAD:
        return tl.load(keys + i_b)
    else:
        return N


@triton.jit
def _outside(b_u, b_t, b_count, total, FORM: tl.constexpr):
    """c, dc/du and dc/dparameter of rows with the mass u outside and b_count of `total` real keys inside."""
    if FORM == OFFSET:
        b_e = tl.exp(-b_t)
        b_c = 1.0 / (b_u + (1.0 - b_u) * b_e)
        b_by_u = -b_c * b_c * (1.0 - b_e)
        b_by_t = b_c * (1.0 - b_c * b_u)
    else:
        b_f = tl.maximum(b_u, FLOOR)
        b_c = (1.0 - b_t) / b_f
        b_by_u = tl.where(b_u > FLOOR, -b_c / b_f, 0.0)
        b_by_t = -1.0 / b_f
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
    b_q, b_as, unbalance, k, v, pad, b_beta, b_m, seed, i_bh, i_b, o_q, start, end, stride_n, N,
    SCALE: tl.constexpr, DROPOUT: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, HAS_PAD: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of the queries o_q: softmax v and M v over their own block (ROWS, D), Σ_j M and the number of keys (ROWS,)."""
    b_top = tl.full([ROWS], -1e30, tl.float32)
    b_sum = tl.zeros([ROWS], tl.float32)
    b_inside = tl.zeros([ROWS], tl.float32)
    b_count = tl.zeros([ROWS], tl.int32)
    b_o = tl.zeros([ROWS, D], tl.float32)
    b_mo = tl.zeros([ROWS, D], tl.float32)
    for i_r in range(0, CHUNK, ROWS):
        i_t = start + i_r
        o_k = i_t + tl.arange(0, ROWS)
        real = _real_keys(pad, i_b, o_k, end, N, HAS_PAD)
        # (keys, D)
        b_k = tl.load(_rows(k, i_t, stride_n, ROWS, D), mask=real[:, None], other=0.0)
        b_v = tl.load(_rows(v, i_t, stride_n, ROWS, D), mask=real[:, None], other=0.0).to(DOT)
        # (queries, keys)
        # with the last condition, which always holds, of the whole shape: its rows are counted
        seen = _same_block(o_q[:, None], o_k[None, :], real[None, :], BLOCK, CHUNK) & (o_q[:, None] >= 0)
        b_count += tl.sum(seen.to(tl.int32), 1)
        b_w = _exp_keys_of(b_k, b_beta, b_m, real)
        b_p = tl.dot(b_as, tl.trans(b_w.to(DOT)), input_precision=PRECISION) * unbalance
        b_p = tl.where(seen, b_p, 0.0)
        b_inside += tl.sum(b_p, 1)
        b_mo = tl.dot(b_p.to(DOT), b_v, acc=b_mo, input_precision=PRECISION)

        b_x = tl.dot(b_q.to(DOT), tl.trans(b_k.to(DOT)), input_precision=PRECISION) * SCALE
        b_x = tl.where(seen, b_x, float("-inf"))
        b_x, b_shrink, b_top, b_sum = _softmax_step(b_x, b_top, b_sum)
        if DROPOUT > 0:
            b_x *= _dropout_scale(seed, i_bh, o_q[:, None], o_k[None, :], DROPOUT)
        b_o = tl.dot(b_x.to(DOT), b_v, acc=b_o * b_shrink[:, None], input_precision=PRECISION)
    b_o *= tl.where(b_sum > 0, 1.0 / tl.where(b_sum > 0, b_sum, 1.0), 0.0)[:, None]
    return b_o, b_mo, b_inside, b_count


@triton.jit(do_not_specialize=["N"])
def _joint_out_kernel(
    q, k, v, pad, keys, alpha, beta, parameter, m, s, S, seed, out,
    stride_b, stride_h, stride_n, stride_out_b, stride_out_h, stride_out_n, H, N,
    FORM: tl.constexpr, SCALE: tl.constexpr, DROPOUT: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, HAS_PAD: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out = (1 - c u) Diag + c (A S - M v), u = 1 - Σ_j M; keys: (B,) real keys of a sequence, with padding.

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
    b_l = _log_normaliser(m, s, i_bh, D)
    smallest, b_balance = _balance(s, i_bh, D)
    b_m = tl.load(m + i_bh * D + o_d)
    total = _keys_of_sequence(keys, i_b, N, HAS_PAD)
    for i_r in range(0, CHUNK, ROWS):
        i_t = start + i_r
        o_q = i_t + tl.arange(0, ROWS)
        inside = (o_q < end)[:, None]
        # (ROWS, D)
        b_q = tl.load(_rows(q + offset, i_t, stride_n, ROWS, D), mask=inside, other=0.0)
        if HAS_PAD:
            b_q = tl.where(_usable(b_q, pad, i_b, o_q, end, N, HAS_PAD)[:, None], b_q, 0.0)
        b_a = _features(b_q, b_alpha, b_l)
        b_o, b_mo, b_inside, b_count = _joint_rows(
            b_q, (b_a * b_balance[None, :]).to(DOT), 1.0 / smallest, k + offset, v + offset, pad, b_beta, b_m, seed,
            i_bh, i_b, o_q, start, end, stride_n, N,
            SCALE, DROPOUT, BLOCK, CHUNK, D, ROWS, HAS_PAD, DOT, PRECISION,
        )  # fmt: skip
        b_u = _outside_mass(b_inside)
        b_c, _, _ = _outside(b_u, tl.load(parameter + i_bh), b_count, total, FORM)
        # (D, D)
        b_S = tl.load(S + i_bh * D * D + o_d[:, None] * D + o_d[None, :]).to(DOT)
        b_all = tl.dot(b_a.to(DOT), b_S, input_precision=PRECISION)
        b_o = (1.0 - b_c * b_u)[:, None] * b_o + b_c[:, None] * (b_all - b_mo)
        p_out = _rows(out + offset_out, i_t, stride_out_n, ROWS, D)
        tl.store(p_out, b_o.to(out.dtype.element_ty), mask=inside)
