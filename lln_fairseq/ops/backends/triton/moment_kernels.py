"""Triton kernels of moment matching: σ_q, σ_k in one pass over q and k, then α, β from a table, all on the device.

Per (batch, head): s = σ_q²σ_k², log σ̃² = piecewise linear in log s, α = σ̃ / (√2 σ_q), β = σ̃ / (√2 σ_k).
"""

# ruff: noqa: ANN001, ANN202 - arguments of kernels have no Python types

import triton
import triton.language as tl

from lln_fairseq.ops.backends.triton.forward_kernels import _offset, _real_keys, _rows


@triton.jit
def _tile_moments(b_x, weight, count):
    """Mean and Σ (x - mean)² of the elements of a tile whose weight is 1; `count` of them."""
    mean = tl.sum(tl.sum(b_x * weight, 1), 0) / tl.maximum(count, 1.0)
    b_c = (b_x - mean) * weight
    return mean, tl.sum(tl.sum(b_c * b_c, 1), 0)


@triton.jit
def _merge(count, mean, square, count_2, mean_2, square_2):
    """Mean and Σ (x - mean)² of two sets together (Chan et al.): no cancellation whatever the mean."""
    share = count_2 / tl.maximum(count + count_2, 1.0)
    step = mean_2 - mean
    return mean + share * step, square + square_2 + step * step * count * share


@triton.jit
def _look_up(log_s_table, log_sigma2_table, log_s, SIZE: tl.constexpr, SIZE_2: tl.constexpr):
    """Linear interpolation of an increasing table with SIZE knots; the end slopes continue. SIZE_2: next power of 2."""
    o_t = tl.arange(0, SIZE_2)
    b_t = tl.load(log_s_table + o_t, mask=o_t < SIZE, other=float("inf"))
    i_t = tl.sum((b_t <= log_s).to(tl.int32), 0) - 1
    i_t = tl.minimum(tl.maximum(i_t, 0), SIZE - 2)
    x_0, x_1 = tl.load(log_s_table + i_t), tl.load(log_s_table + i_t + 1)
    y_0, y_1 = tl.load(log_sigma2_table + i_t), tl.load(log_sigma2_table + i_t + 1)
    return y_0 + (y_1 - y_0) * ((log_s - x_0) / (x_1 - x_0))


@triton.jit
def _store_matched(
    alpha,
    beta,
    i_bh,
    count,
    square_q,
    square_k,
    log_s_table,
    log_sigma2_table,
    SIZE: tl.constexpr,
    SIZE_2: tl.constexpr,
):
    """α and β of one (batch, head) from the count and the sums of squares about the means."""
    sigma_q = tl.maximum(tl.sqrt(square_q / tl.maximum(count, 1.0)), 1e-6)
    sigma_k = tl.maximum(tl.sqrt(square_k / tl.maximum(count, 1.0)), 1e-6)
    log_s = 2.0 * (tl.log(sigma_q) + tl.log(sigma_k))
    log_sigma2 = _look_up(log_s_table, log_sigma2_table, log_s, SIZE, SIZE_2)
    log_sigma2 = tl.where(log_sigma2 > 24.0, 24.0, log_sigma2)  # moment_matching.LOG_SIGMA2_LIMIT
    half_sigma = tl.exp(0.5 * (log_sigma2 - 0.6931471805599453))
    tl.store(alpha + i_bh, half_sigma / sigma_q)
    tl.store(beta + i_bh, half_sigma / sigma_k)


@triton.jit(do_not_specialize=["N", "T"])
def _moments_kernel(
    q, k, pad, log_s_table, log_sigma2_table, part, alpha, beta, stride_b, stride_h, stride_n, H, N, T,
    SIZE: tl.constexpr, SIZE_2: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, HAS_PAD: tl.constexpr,
    FINAL: tl.constexpr,
):  # fmt: skip
    """Count, mean and Σ (x - mean)² of q and of k over the real tokens of [i_s T, (i_s + 1) T); grid (B H, splits).

    FINAL (one split): α and β right away. Else part, float32 (5, B H, splits): count, means of q, k, squares of q, k.
    """
    i_bh, i_s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offset = _offset(i_bh, stride_b, stride_h, H)
    start = i_s * T
    end = tl.minimum(start + T, N)
    count = 0.0
    mean_q = 0.0
    mean_k = 0.0
    square_q = 0.0
    square_k = 0.0
    for i_r in range(0, end - start, ROWS):
        i_t = start + i_r
        real = _real_keys(pad, i_bh // H, i_t + tl.arange(0, ROWS), end, N, HAS_PAD)
        weight = real.to(tl.float32)[:, None]
        # (ROWS, D)
        b_q = tl.load(_rows(q + offset, i_t, stride_n, ROWS, D), mask=real[:, None], other=0.0).to(tl.float32)
        b_k = tl.load(_rows(k + offset, i_t, stride_n, ROWS, D), mask=real[:, None], other=0.0).to(tl.float32)
        here = tl.sum(real.to(tl.float32), 0) * D
        mean, square = _tile_moments(b_q, weight, here)
        mean_q, square_q = _merge(count, mean_q, square_q, here, mean, square)
        mean, square = _tile_moments(b_k, weight, here)
        mean_k, square_k = _merge(count, mean_k, square_k, here, mean, square)
        count += here
    if FINAL:
        _store_matched(alpha, beta, i_bh, count, square_q, square_k, log_s_table, log_sigma2_table, SIZE, SIZE_2)
    else:
        p_part = part + i_bh * tl.num_programs(1) + i_s
        stride = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
        tl.store(p_part, count)
        tl.store(p_part + stride, mean_q)
        tl.store(p_part + 2 * stride, mean_k)
        tl.store(p_part + 3 * stride, square_q)
        tl.store(p_part + 4 * stride, square_k)


@triton.jit
def _joined_squares(b_count, count, b_mean, b_square):
    """Σ (x - mean)² of all splits from the counts, means and sums of squares of each."""
    mean = tl.sum(b_count * b_mean, 0) / tl.maximum(count, 1.0)
    step = b_mean - mean
    return tl.sum(b_square + b_count * step * step, 0)


@triton.jit(do_not_specialize=["SPLITS"])
def _moments_combine_kernel(
    part, log_s_table, log_sigma2_table, alpha, beta, SPLITS,
    SPLITS_2: tl.constexpr, SIZE: tl.constexpr, SIZE_2: tl.constexpr,
):  # fmt: skip
    """α and β of one (batch, head) from the splits of _moments_kernel; grid (B H,), SPLITS_2 >= SPLITS a power of 2."""
    i_bh = tl.program_id(0).to(tl.int64)
    o_s = tl.arange(0, SPLITS_2)
    p_part = part + i_bh * SPLITS + o_s
    stride = tl.num_programs(0).to(tl.int64) * SPLITS
    b_count = tl.load(p_part, mask=o_s < SPLITS, other=0.0)
    count = tl.sum(b_count, 0)
    b_mean = tl.load(p_part + stride, mask=o_s < SPLITS, other=0.0)
    b_square = tl.load(p_part + 3 * stride, mask=o_s < SPLITS, other=0.0)
    square_q = _joined_squares(b_count, count, b_mean, b_square)
    b_mean = tl.load(p_part + 2 * stride, mask=o_s < SPLITS, other=0.0)
    b_square = tl.load(p_part + 4 * stride, mask=o_s < SPLITS, other=0.0)
    square_k = _joined_squares(b_count, count, b_mean, b_square)
    _store_matched(alpha, beta, i_bh, count, square_q, square_k, log_s_table, log_sigma2_table, SIZE, SIZE_2)
