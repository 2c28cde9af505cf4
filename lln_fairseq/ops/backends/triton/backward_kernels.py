"""Triton kernels of the backward pass of LLN attention, and of the first half of the backward pass of LLN+Diag.

forward_kernels.py explains the names. Let do be the gradient of the output (½ of it for LLN+Diag), x = αq + L, y = βk:

    dA = do Sᵀ      δ_i = Σ_d A dA     dx = A (dA - δ)                  dq = α dx     dα = Σ q dx
    dS = Aᵀ do      g = Σ_i A δ / s    dy = W (v (dS / s)ᵀ - g)         dk = β dy     dβ = Σ k dy
                                       dv = W dS / s

The kernels, in the order of their launches:

    _lln_dstate_kernel     reads q and do, writes dS and g of each split; for LLN without blocks it also writes dq and
                           dα
    _lln_dcombine_kernel   adds up the splits; launched only if there are several
    _lln_dkv_kernel        reads k and v, writes dk, dv and dβ; for LLN without blocks

The second half of the backward pass of LLN+Diag is in diag_backward_kernels.py.

The argument dS of the kernels points to state_scale · dS / s, where state_scale is a power of two close to
min_d s_d / √N. This product neither overflows nor underflows in half precision at any N. dS alone grows like √N to N,
and 1 / s shrinks like 1 / N.
"""

# ruff: noqa: ANN001, ANN202 - arguments of kernels have no Python types

import triton
import triton.language as tl

from lln_fairseq.ops.backends.triton.forward_kernels import (
    LOG2E,
    _dot,
    _head_offset,
    _is_real_key,
    _is_usable_query,
    _load_log_sum,
    _query_features,
    _row_pointers,
)


@triton.jit
def _state_scale(b_log_key_sum, N):
    """Return state_scale = 2^⌊log2(min_d s_d / √N)⌋ from log_key_sum, (D,), in base 2."""
    return tl.exp2(tl.floor(tl.min(b_log_key_sum, 0) - 0.5 * tl.log2(N.to(tl.float32))))


@triton.jit
def _rounding_error(b_x, p):
    """Return x' - x in float32, where x' is x rounded to the dtype that the pointer p points to.

    The caller corrects g with this error. Σ_j dy_j = S · dS - g must equal Σ_i dx_i, otherwise dk and dβ get an error
    along the mean key. dS is rounded twice: A is rounded before the product Aᵀ do, and dS is rounded when it is stored.
    The errors that both roundings cause in S · dS are added to g.
    """
    return b_x.to(p.dtype.element_ty).to(tl.float32) - b_x


@triton.jit
def _exp2_at_most_1(b_x):
    """Return 2^min(x, 0), or NaN if x is NaN.

    In exact arithmetic x is at most 0. As a difference of large numbers, it can be above 0 because of rounding.
    """
    return tl.exp2(tl.minimum(b_x, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def _key_features(b_k, real, b_beta, b_m):
    """Return W = exp(βk - m) of the keys b_k, (ROWS, D) float32, with 0 where `real` is False.

    b_beta is β, and b_m is m in base 2, (D,).
    """
    b_y = (b_beta * LOG2E) * b_k.to(tl.float32) - b_m[None, :]
    return tl.where(real[:, None], _exp2_at_most_1(b_y), 0.0)


@triton.jit
def _load_key_features(p_k, o_f, real, b_beta, p_m, stride_n, ROWS: tl.constexpr):
    """Load the features o_f of the ROWS keys that begin at p_k, and return their W, (ROWS, features) float32."""
    p_k = p_k + tl.arange(0, ROWS)[:, None] * stride_n + o_f[None, :]
    return _key_features(tl.load(p_k, mask=real[:, None], other=0.0), real, b_beta, tl.load(p_m + o_f))


@triton.jit
def _add_key_features_times_state(
    b_o, p_k, real, b_beta, p_m, p_S, stride_n, D: tl.constexpr, ROWS: tl.constexpr, DOT: tl.constexpr
):
    """Return b_o + W X, (ROWS, D) float32, for the ROWS keys that begin at p_k and the matrix X (D, D) at p_S.

    The keys and X are loaded 64 features at a time, so that only a part of a wide X is in registers.
    """
    SLICE: tl.constexpr = D if D < 64 else 64
    for i_f in range(0, D, SLICE):
        o_f = i_f + tl.arange(0, SLICE)
        # (ROWS, SLICE)
        b_w = _load_key_features(p_k, o_f, real, b_beta, p_m, stride_n, ROWS)
        # (SLICE, D)
        b_state = tl.load(p_S + o_f[:, None] * D + tl.arange(0, D)[None, :]).to(DOT)
        b_o = _dot(b_w.to(DOT), b_state, acc=b_o)
    return b_o


@triton.jit
def _add_times_state_T(b_o, p_x, mask, p_S, stride_n, D: tl.constexpr, ROWS: tl.constexpr, DOT: tl.constexpr):
    """Return b_o + x Xᵀ, (ROWS, D) float32, for the ROWS tokens x that begin at p_x and the matrix X (D, D) at p_S.

    Tokens whose mask (ROWS,) is False count as 0. x and X are loaded 64 features at a time.
    """
    SLICE: tl.constexpr = D if D < 64 else 64
    for i_f in range(0, D, SLICE):
        o_f = i_f + tl.arange(0, SLICE)
        # (ROWS, SLICE)
        b_x = tl.load(p_x + tl.arange(0, ROWS)[:, None] * stride_n + o_f[None, :], mask=mask[:, None], other=0.0)
        # (D, SLICE)
        b_state = tl.load(p_S + tl.arange(0, D)[:, None] * D + o_f[None, :]).to(DOT)
        b_o = _dot(b_x.to(DOT), tl.trans(b_state), acc=b_o)
    return b_o


@triton.jit(do_not_specialize=["N", "T"])
def _lln_dstate_kernel(
    q,
    do,
    padding,
    alpha,
    m,
    log_key_sum,
    S,
    g,
    dS,
    dq,
    dalpha,
    stride_b,
    stride_h,
    stride_n,
    stride_do_b,
    stride_do_h,
    stride_do_n,
    stride_out_b,
    stride_out_h,
    stride_out_n,
    H,
    N,
    T,
    WEIGHT: tl.constexpr,
    FINAL: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Compute Aᵀ do and Σ_i A δ_i over the tokens [i_s T, (i_s + 1) T), and dq and dα if they are not None.

    The grid is (B H, splits).

    Args:
        g: output, (B H, splits, D) float32: Σ_i A δ_i; with FINAL it is multiplied by WEIGHT / s.
        dS: output, (B H, splits, D, D): Aᵀ do; with FINAL it is multiplied by WEIGHT · state_scale / s.
        dq: output, (B H, N, D), or None. It is not multiplied by WEIGHT.
        dalpha: output, (B H, splits) float32: Σ q dx of each split, not multiplied by WEIGHT; or None. It requires dq.
        FINAL: True if there is a single split. Otherwise _lln_dcombine_kernel does these multiplications.
    """
    i_bh = tl.program_id(0).to(tl.int64)
    i_s = tl.program_id(1)
    i_out = i_bh * tl.num_programs(1) + i_s
    p_q = q + _head_offset(i_bh, stride_b, stride_h, H)
    p_do = do + _head_offset(i_bh, stride_do_b, stride_do_h, H)
    start = i_s * T
    end = tl.minimum(start + T, N)

    o_d = tl.arange(0, D)
    o_dd = o_d[:, None] * D + o_d[None, :]
    b_alpha = tl.load(alpha + i_bh)
    b_l = _load_log_sum(m, log_key_sum, i_bh, D)
    # (D, D)
    if D <= 64:
        b_ST = tl.trans(tl.load(S + i_bh * D * D + o_dd)).to(DOT)
    b_dS = tl.zeros([D, D], tl.float32)
    b_g = tl.zeros([D], tl.float32)
    b_dalpha = tl.zeros([ROWS], tl.float32)
    for i_r in range(0, end - start, ROWS):
        i_t = start + i_r
        o_q = i_t + tl.arange(0, ROWS)
        in_range = (o_q < end)[:, None]
        # (ROWS, D)
        b_q = tl.load(_row_pointers(p_q, i_t, stride_n, ROWS, D), mask=in_range, other=0.0)
        if padding is not None:
            b_q = tl.where(_is_usable_query(b_q, padding, i_bh // H, o_q, end, N)[:, None], b_q, 0.0)
        b_do = tl.load(_row_pointers(p_do, i_t, stride_do_n, ROWS, D), mask=in_range, other=0.0).to(DOT)
        b_a = _query_features(b_q, b_alpha, b_l)
        if D <= 64:
            b_da = _dot(b_do, b_ST)
        else:
            p_tile = p_do + i_t.to(tl.int64) * stride_do_n
            b_da = _add_times_state_T(
                tl.zeros([ROWS, D], tl.float32), p_tile, o_q < end, S + i_bh * D * D, stride_do_n, D, ROWS, DOT
            )
        # (ROWS,)
        b_delta = tl.sum(b_a * b_da, 1)
        # (ROWS, D)
        b_dx = b_a * (b_da - b_delta[:, None])
        b_rounded_a = b_a.to(DOT)
        # (D,): A δ, plus the error of S · dS from rounding A
        b_g += tl.sum(b_rounded_a.to(tl.float32) * b_da - b_dx, 0)
        # (D, D)
        b_dS = _dot(tl.trans(b_rounded_a), b_do, acc=b_dS)
        if dq is not None:
            if dalpha is not None:
                b_dalpha += tl.sum(b_q.to(tl.float32) * b_dx, 1)
            p_dq = _row_pointers(dq + _head_offset(i_bh, stride_out_b, stride_out_h, H), i_t, stride_out_n, ROWS, D)
            tl.store(p_dq, (b_alpha * b_dx).to(dq.dtype.element_ty), mask=in_range)

    if FINAL:
        b_log_key_sum = tl.load(log_key_sum + i_bh * D + o_d)
        scale = _state_scale(b_log_key_sum, N)
        b_inverse_key_sum = tl.exp2(-b_log_key_sum)
        b_dS *= (b_inverse_key_sum * (WEIGHT * scale))[:, None]
        b_state = tl.load(S + i_bh * D * D + o_dd).to(tl.float32)
        b_g = b_g * (b_inverse_key_sum * WEIGHT) + tl.sum(b_state * _rounding_error(b_dS, dS), 1) / scale
    tl.store(g + i_out * D + o_d, b_g)
    tl.store(dS + i_out * D * D + o_dd, b_dS.to(dS.dtype.element_ty))
    if dalpha is not None:
        tl.store(dalpha + i_out, tl.sum(b_dalpha, 0))


@triton.jit(do_not_specialize=["N", "SPLITS"])
def _lln_dcombine_kernel(
    part_g,
    part_dS,
    log_key_sum,
    S,
    g,
    dS,
    N,
    SPLITS,
    WEIGHT: tl.constexpr,
    D: tl.constexpr,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Add up the splits of _lln_dstate_kernel.

    The outputs are dS = WEIGHT · state_scale / s · Σ part_dS and g = WEIGHT / s · Σ part_g over the splits. The grid
    and the tiles are those of _lln_combine_kernel. COLS must be a multiple of D.
    """
    i_bh = tl.program_id(0).to(tl.int64)
    i_c = tl.program_id(1)
    o_c = i_c * COLS + tl.arange(0, COLS)
    p_g = part_g + i_bh * SPLITS * D + (o_c // D)[None, :]
    p_dS = part_dS + i_bh * SPLITS * D * D + o_c[None, :]

    b_g = tl.zeros([COLS], tl.float32)
    b_dS = tl.zeros([COLS], tl.float32)
    for i_s in range(0, SPLITS, ROWS):
        o_s = (i_s + tl.arange(0, ROWS))[:, None]
        # (COLS,)
        b_g += tl.sum(tl.load(p_g + o_s * D, mask=o_s < SPLITS, other=0.0), 0)
        b_dS += tl.sum(tl.load(p_dS + o_s * D * D, mask=o_s < SPLITS, other=0.0), 0)

    scale = _state_scale(tl.load(log_key_sum + i_bh * D + tl.arange(0, D)), N)
    b_inverse_key_sum = tl.exp2(-tl.load(log_key_sum + i_bh * D + o_c // D))
    b_dS *= b_inverse_key_sum * (WEIGHT * scale)
    tl.store(dS + i_bh * D * D + o_c, b_dS.to(dS.dtype.element_ty))
    # All D elements of a row of b_g hold the row's g. Each takes 1 / D of it and the correction for its element of dS,
    # so that their sum is g with the corrections of the whole row.
    b_g *= b_inverse_key_sum * (WEIGHT / D)
    b_state = tl.load(S + i_bh * D * D + o_c).to(tl.float32)
    b_g += b_state * _rounding_error(b_dS, dS) / scale
    o_row = i_c * (COLS // D) + tl.arange(0, COLS // D)
    tl.store(g + i_bh * D + o_row, tl.sum(tl.reshape(b_g, (COLS // D, D)), 1))


@triton.jit(do_not_specialize=["N"])
def _lln_dkv_kernel(
    k,
    v,
    padding,
    beta,
    m,
    log_key_sum,
    g,
    dS,
    dk,
    dv,
    dbeta,
    stride_b,
    stride_h,
    stride_n,
    stride_out_b,
    stride_out_h,
    stride_out_n,
    H,
    N,
    CHUNK: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Write dk and dv, and Σ k dy of each program to dbeta if dbeta is not None.

    The grid is (B H, ⌈N / CHUNK⌉). dk and dv are (B H, N, D) with any strides of batch, heads and tokens. dbeta is
    (B H, ⌈N / CHUNK⌉) float32.
    """
    i_bh = tl.program_id(0).to(tl.int64)
    i_c = tl.program_id(1)
    offset = _head_offset(i_bh, stride_b, stride_h, H)
    offset_out = _head_offset(i_bh, stride_out_b, stride_out_h, H)
    o_d = tl.arange(0, D)
    b_beta = tl.load(beta + i_bh)
    b_g = tl.load(g + i_bh * D + o_d)
    unscale = 1.0 / _state_scale(tl.load(log_key_sum + i_bh * D + o_d), N)
    b_dbeta = tl.zeros([ROWS], tl.float32)
    for i_r in range(0, CHUNK, ROWS):
        i_t = i_c * CHUNK + i_r
        o_k = i_t + tl.arange(0, ROWS)
        real = _is_real_key(padding, i_bh // H, o_k, N, N)
        in_range = (o_k < N)[:, None]
        p_k = k + offset + i_t.to(tl.int64) * stride_n
        p_v = v + offset + i_t.to(tl.int64) * stride_n
        p_m = m + i_bh * D
        p_dS = dS + i_bh * D * D
        # (ROWS, D)
        b_zero = tl.zeros([ROWS, D], tl.float32)
        b_dv = unscale * _add_key_features_times_state(b_zero, p_k, real, b_beta, p_m, p_dS, stride_n, D, ROWS, DOT)
        p_dv = _row_pointers(dv + offset_out, i_t, stride_out_n, ROWS, D)
        tl.store(p_dv, b_dv.to(dv.dtype.element_ty), mask=in_range)
        b_dw = _add_times_state_T(b_zero, p_v, real, p_dS, stride_n, D, ROWS, DOT)
        b_w = _load_key_features(p_k, o_d, real, b_beta, p_m, stride_n, ROWS)
        b_dy = b_w * (unscale * b_dw - b_g[None, :])
        b_dk = b_beta * b_dy
        p_dk = _row_pointers(dk + offset_out, i_t, stride_out_n, ROWS, D)
        tl.store(p_dk, b_dk.to(dk.dtype.element_ty), mask=in_range)
        if dbeta is not None:
            b_k = tl.load(_row_pointers(k + offset, i_t, stride_n, ROWS, D), mask=real[:, None], other=0.0)
            b_dbeta += tl.sum(b_k.to(tl.float32) * b_dy, 1)
    if dbeta is not None:
        tl.store(dbeta + i_bh * tl.num_programs(1) + i_c, tl.sum(b_dbeta, 0))
