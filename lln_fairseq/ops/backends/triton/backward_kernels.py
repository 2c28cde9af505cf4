"""Triton kernels of the backward pass of LLN attention, and the first of LLN+Diag. Notation of forward_kernels.py.

With do the incoming gradient (times ½ for LLN+Diag), A = softmax_d(αq + L), W = exp(βk - m):

    dA = do Sᵀ      δ_i = Σ_d A dA     dx = A (dA - δ)              dq = α dx     dα = Σ q dx
    dS = Aᵀ do / s  g = Σ_i A δ / s    dy = W (v dSᵀ - g)   dv = W dS   dk = β dy     dβ = Σ k dy

    _lln_dstate_kernel     q, do -> dS, g per split of the tokens; for LLN alone also dq and dα: they need nothing else
    _lln_dcombine_kernel   adds the splits (launched only when there are several)
    _lln_dkv_kernel        k, v -> dk, dv, dβ                       for LLN alone
    diag_backward_kernels.py has the second pass of LLN+Diag

dS is multiplied by c / s rather than 1 / s, c a power of two near min_d s_d / √N: the operand of the product then
neither overflows nor drowns in half precision at any N (dS alone grows like √N to N, 1 / s falls like 1 / N).
"""

# ruff: noqa: ANN001, ANN202 - arguments of kernels have no Python types

import triton
import triton.language as tl

from lln_fairseq.ops.backends.triton.forward_kernels import (
    LOG2E,
    _features,
    _log_normaliser,
    _offset,
    _real_keys,
    _rows,
    _usable,
)


@triton.jit
def _state_scale(b_log_s, N):
    """c = 2^⌊log2(min_d s_d / √N)⌋."""
    return tl.exp2(tl.floor(tl.min(b_log_s, 0) - 0.5 * tl.log2(N.to(tl.float32))))


@triton.jit
def _rounding(b_x, p):
    """What rounding to the dtype of p adds to x.

    Σ_j W (v dSᵀ - g) = S · dS - g must come out as Σ_i A (dA - δ), or dk and dβ get an error along the mean key. As dS
    is rounded twice, A on its way in and the result on its way out, g takes up what that adds to S · dS.
    """
    return b_x.to(p.dtype.element_ty).to(tl.float32) - b_x


@triton.jit(do_not_specialize=["N", "T"])
def _lln_dstate_kernel(
    q, do, pad, alpha, m, log_s, S, g, dS, dq, dalpha,
    stride_b, stride_h, stride_n, stride_do_b, stride_do_h, stride_do_n, stride_out_b, stride_out_h, stride_out_n,
    H, N, T,
    SHARE: tl.constexpr, WRITE_DQ: tl.constexpr, WRITE_DALPHA: tl.constexpr, FINAL: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, SLICE: tl.constexpr, HAS_PAD: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Σ_i A_id do_i and Σ_i A_id δ_i over tokens [i_s T, (i_s + 1) T); WRITE_DQ: also dq = α A (dA - δ) and Σ q dx.

    grid (B H, splits); g: (B H, splits, D) float32; dS: (B H, splits, D, D); dalpha: (B H, splits) float32.
    FINAL (one split): times SHARE c / s and SHARE / s, as _lln_dcombine_kernel would do.
    """
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
    # (D, D)
    if SLICE == D:
        b_ST = tl.trans(tl.load(S + i_bh * D * D + o_dd)).to(DOT)
    b_dS = tl.zeros([D, D], tl.float32)
    b_g = tl.zeros([D], tl.float32)
    b_dalpha = tl.zeros([ROWS], tl.float32)
    for i_r in range(0, end - start, ROWS):
        i_t = start + i_r
        o_q = i_t + tl.arange(0, ROWS)
        inside = (o_q < end)[:, None]
        # (ROWS, D)
        b_q = tl.load(_rows(p_q, i_t, stride_n, ROWS, D), mask=inside, other=0.0)
        if HAS_PAD:
            b_q = tl.where(_usable(b_q, pad, i_bh // H, o_q, end, N, HAS_PAD)[:, None], b_q, 0.0)
        b_do = tl.load(_rows(p_do, i_t, stride_do_n, ROWS, D), mask=inside, other=0.0).to(DOT)
        b_a = _features(b_q, b_alpha, b_l)
        if SLICE == D:
            b_da = tl.dot(b_do, b_ST, input_precision=PRECISION)
        else:
            p_tile = p_do + i_t.to(tl.int64) * stride_do_n
            b_da = _times_state_transposed(
                tl.zeros([ROWS, D], tl.float32), p_tile, i_t + tl.arange(0, ROWS) < end, S + i_bh * D * D, stride_do_n,
                D, ROWS, SLICE, DOT, PRECISION,
            )  # fmt: skip
        # (ROWS,)
        b_delta = tl.sum(b_a * b_da, 1)
        b_dx = b_a * (b_da - b_delta[:, None])
        b_rounded = b_a.to(DOT)
        b_g += tl.sum(b_rounded.to(tl.float32) * b_da - b_dx, 0)  # A δ, and what rounding A adds to dS
        b_dS = tl.dot(tl.trans(b_rounded), b_do, acc=b_dS, input_precision=PRECISION)
        if WRITE_DQ:
            if WRITE_DALPHA:
                b_dalpha += tl.sum(b_q.to(tl.float32) * b_dx, 1)
            p_dq = _rows(dq + _offset(i_bh, stride_out_b, stride_out_h, H), i_t, stride_out_n, ROWS, D)
            tl.store(p_dq, (b_alpha * b_dx).to(dq.dtype.element_ty), mask=inside)

    if FINAL:
        b_log_s = tl.load(log_s + i_bh * D + o_d)
        scale, b_inverse = _state_scale(b_log_s, N), tl.exp2(-b_log_s)
        b_dS *= (b_inverse * (SHARE * scale))[:, None]
        b_S = tl.load(S + i_bh * D * D + o_dd).to(tl.float32)
        b_g = b_g * (b_inverse * SHARE) + tl.sum(b_S * _rounding(b_dS, dS), 1) / scale
    tl.store(g + i_out * D + o_d, b_g)
    tl.store(dS + i_out * D * D + o_dd, b_dS.to(dS.dtype.element_ty))
    if WRITE_DALPHA:
        tl.store(dalpha + i_out, tl.sum(b_dalpha, 0))


@triton.jit(do_not_specialize=["N", "SPLITS"])
def _lln_dcombine_kernel(
    part_g, part_dS, log_s, S, g, dS, N, SPLITS,
    SHARE: tl.constexpr, D: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dS = SHARE c / s Σ_i dS_i and g = SHARE / s Σ_i g_i over the splits i; grid and tiles of _lln_combine_kernel."""
    i_bh, i_c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_c = i_c * COLS + tl.arange(0, COLS)
    p_g = part_g + i_bh * SPLITS * D + (o_c // D)[None, :]
    p_dS = part_dS + i_bh * SPLITS * D * D + o_c[None, :]

    b_g = tl.zeros([COLS], tl.float32)
    b_dS = tl.zeros([COLS], tl.float32)
    for i_s in range(0, SPLITS, ROWS):
        o_s = (i_s + tl.arange(0, ROWS))[:, None]
        b_g += tl.sum(tl.load(p_g + o_s * D, mask=o_s < SPLITS, other=0.0), 0)
        b_dS += tl.sum(tl.load(p_dS + o_s * D * D, mask=o_s < SPLITS, other=0.0), 0)

    c = _state_scale(tl.load(log_s + i_bh * D + tl.arange(0, D)), N)
    b_inverse = tl.exp2(-tl.load(log_s + i_bh * D + o_c // D))
    b_dS *= b_inverse * (SHARE * c)
    tl.store(dS + i_bh * D * D + o_c, b_dS.to(dS.dtype.element_ty))
    # every element of a row of S holds that row's g: their mean, plus the sum of what rounding adds
    b_g = b_g * (b_inverse * (SHARE / D)) + tl.load(S + i_bh * D * D + o_c).to(tl.float32) * _rounding(b_dS, dS) / c
    o_r = i_c * (COLS // D) + tl.arange(0, COLS // D)
    tl.store(g + i_bh * D + o_r, tl.sum(tl.reshape(b_g, (COLS // D, D)), 1))


@triton.jit
def _exp_below_1(b_x):
    """2^x of x <= 0; what rounding has left above 0, where x is a difference of large numbers, counts as 0."""
    return tl.exp2(tl.minimum(b_x, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def _exp_keys_of(b_k, real, b_beta, b_m):
    """W = exp(βk - m), float32, 0 in padded rows."""
    b_y = (b_beta * LOG2E) * b_k.to(tl.float32) - b_m[None, :]
    return tl.where(real[:, None], _exp_below_1(b_y), 0.0)


@triton.jit
def _exp_keys(p_k, o_f, real, b_beta, p_m, stride_n, ROWS: tl.constexpr):
    """W of a tile's features o_f."""
    p_k = p_k + tl.arange(0, ROWS)[:, None] * stride_n + o_f[None, :]
    return _exp_keys_of(tl.load(p_k, mask=real[:, None], other=0.0), real, b_beta, tl.load(p_m + o_f))


@triton.jit
def _keys_times_state(
    b_o, p_k, real, b_beta, p_m, p_S, stride_n,
    D: tl.constexpr, ROWS: tl.constexpr, SLICE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """b_o + W S, (ROWS, D) float32, SLICE features of W at a time: of a wide state only a part is in registers."""
    for i_f in range(0, D, SLICE):
        o_f = i_f + tl.arange(0, SLICE)
        b_w = _exp_keys(p_k, o_f, real, b_beta, p_m, stride_n, ROWS)
        b_S = tl.load(p_S + o_f[:, None] * D + tl.arange(0, D)[None, :]).to(DOT)
        b_o = tl.dot(b_w.to(DOT), b_S, acc=b_o, input_precision=PRECISION)
    return b_o


@triton.jit
def _times_state_transposed(
    b_o, p_x, real, p_S, stride_n,
    D: tl.constexpr, ROWS: tl.constexpr, SLICE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """b_o + x Sᵀ, (ROWS, D) float32, SLICE features of x at a time."""
    for i_f in range(0, D, SLICE):
        o_f = i_f + tl.arange(0, SLICE)
        b_x = tl.load(p_x + tl.arange(0, ROWS)[:, None] * stride_n + o_f[None, :], mask=real[:, None], other=0.0)
        b_S = tl.load(p_S + tl.arange(0, D)[:, None] * D + o_f[None, :]).to(DOT)
        b_o = tl.dot(b_x.to(DOT), tl.trans(b_S), acc=b_o, input_precision=PRECISION)
    return b_o


@triton.jit(do_not_specialize=["N"])
def _lln_dkv_kernel(
    k, v, pad, beta, m, log_s, g, dS, dk, dv, dbeta,
    stride_b, stride_h, stride_n, stride_out_b, stride_out_h, stride_out_n, H, N,
    WRITE_DBETA: tl.constexpr, CHUNK: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, SLICE: tl.constexpr, HAS_PAD: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk = β W (v dSᵀ - g), dv = W dS, Σ k dy; grid (B H, ⌈N / CHUNK⌉); dbeta: (B H, programs) float32."""
    i_bh, i_c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offset = _offset(i_bh, stride_b, stride_h, H)
    offset_out = _offset(i_bh, stride_out_b, stride_out_h, H)
    o_d = tl.arange(0, D)
    b_beta = tl.load(beta + i_bh)
    b_g = tl.load(g + i_bh * D + o_d)
    unscale = 1.0 / _state_scale(tl.load(log_s + i_bh * D + o_d), N)
    b_dbeta = tl.zeros([ROWS], tl.float32)
    for i_r in range(0, CHUNK, ROWS):
        i_t = i_c * CHUNK + i_r
        o_k = i_t + tl.arange(0, ROWS)
        real = _real_keys(pad, i_bh // H, o_k, N, N, HAS_PAD)
        inside = (o_k < N)[:, None]
        p_k = k + offset + i_t.to(tl.int64) * stride_n
        p_v = v + offset + i_t.to(tl.int64) * stride_n
        b_zero = tl.zeros([ROWS, D], tl.float32)
        b_dv = unscale * _keys_times_state(
            b_zero, p_k, real, b_beta, m + i_bh * D, dS + i_bh * D * D, stride_n, D, ROWS, SLICE, DOT, PRECISION
        )
        tl.store(_rows(dv + offset_out, i_t, stride_out_n, ROWS, D), b_dv.to(dv.dtype.element_ty), mask=inside)
        # (ROWS, D)
        b_dw = _times_state_transposed(b_zero, p_v, real, dS + i_bh * D * D, stride_n, D, ROWS, SLICE, DOT, PRECISION)
        b_dy = _exp_keys(p_k, o_d, real, b_beta, m + i_bh * D, stride_n, ROWS) * (unscale * b_dw - b_g[None, :])
        b_dk = b_beta * b_dy
        tl.store(_rows(dk + offset_out, i_t, stride_out_n, ROWS, D), b_dk.to(dk.dtype.element_ty), mask=inside)
        if WRITE_DBETA:
            b_k = tl.load(_rows(k + offset, i_t, stride_n, ROWS, D), mask=real[:, None], other=0.0)
            b_dbeta += tl.sum(b_k.to(tl.float32) * b_dy, 1)
    if WRITE_DBETA:
        tl.store(dbeta + i_bh * tl.num_programs(1) + i_c, tl.sum(b_dbeta, 0))
