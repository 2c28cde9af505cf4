"""Triton kernels of moment matching: σ_q and σ_k in one pass over q and k, then α and β from a table.

For each (batch, head), s = σ_q²σ_k², log σ̃² is piecewise linear in log s, α = σ̃ / (√2 σ_q) and β = σ̃ / (√2 σ_k).
The device computes everything, so the host never waits for it. device.py explains the names.
"""

# ruff: noqa: ANN001, ANN202 - arguments of kernels have no Python types

import triton
import triton.language as tl

from lln_fairseq.ops import formula
from lln_fairseq.ops.backends.triton.device import _is_real_key, _load_head, _load_rows

MIN_SIGMA = tl.constexpr(formula.MIN_SIGMA)
LOG_SIGMA2_LIMIT = tl.constexpr(formula.LOG_SIGMA2_LIMIT)


@triton.jit
def _tile_moments(b_x, b_weight, count):
    """Return the mean and Σ (x - mean)² of the numbers x of a tile, without the rows of weight 0.

    Args:
        b_x: (rows, D) numbers. Rows of weight 0 must hold finite numbers.
        b_weight: (rows, 1), 1 or 0.
        count: how many numbers the rows of weight 1 have. If it is 0, the result is 0 and 0.
    """
    mean = tl.sum(tl.sum(b_x * b_weight, 1), 0) / tl.maximum(count, 1.0)
    b_centered = (b_x - mean) * b_weight
    return mean, tl.sum(tl.sum(b_centered * b_centered, 1), 0)


@triton.jit
def _merge_moments(count, mean, square, count_2, mean_2, square_2):
    """Return the mean and Σ (x - mean)² of the union of two sets of numbers (Chan et al.).

    The arguments are the count, the mean and Σ (x - mean)² of each set. A large mean causes no cancellation.
    """
    fraction = count_2 / tl.maximum(count + count_2, 1.0)
    step = mean_2 - mean
    return mean + fraction * step, square + square_2 + step * step * count * fraction


@triton.jit
def _interpolate_table(log_s_table, log_sigma2_table, log_s, SIZE: tl.constexpr, SIZE_2: tl.constexpr):
    """Interpolate a table of SIZE >= 2 ascending points linearly at log_s. Outside, the nearest segment continues.

    Args:
        log_s_table, log_sigma2_table: pointers to the points, (SIZE,).
        log_s: a number.
        SIZE_2: the smallest power of 2 that is at least SIZE.
    """
    o_t = tl.arange(0, SIZE_2)
    b_t = tl.load(log_s_table + o_t, mask=o_t < SIZE, other=float("inf"))
    i_t = tl.sum((b_t <= log_s).to(tl.int32), 0) - 1
    i_t = tl.minimum(tl.maximum(i_t, 0), SIZE - 2)
    x_0 = tl.load(log_s_table + i_t)
    x_1 = tl.load(log_s_table + i_t + 1)
    y_0 = tl.load(log_sigma2_table + i_t)
    y_1 = tl.load(log_sigma2_table + i_t + 1)
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
    """Compute and store α and β of one (batch, head). Smaller standard deviations count as MIN_SIGMA.

    Args:
        count: the number of elements of q, and also of k.
        square_q, square_k: Σ (x - mean)² of q and of k. If one of them is NaN, so are α and β.
    """
    # On a GPU, tl.maximum returns the other number for a NaN unless it is told to propagate it.
    sigma_q = tl.maximum(tl.sqrt(square_q / tl.maximum(count, 1.0)), MIN_SIGMA, tl.PropagateNan.ALL)
    sigma_k = tl.maximum(tl.sqrt(square_k / tl.maximum(count, 1.0)), MIN_SIGMA, tl.PropagateNan.ALL)
    log_s = 2.0 * (tl.log(sigma_q) + tl.log(sigma_k))
    log_sigma2 = _interpolate_table(log_s_table, log_sigma2_table, log_s, SIZE, SIZE_2)
    log_sigma2 = tl.where(log_sigma2 > LOG_SIGMA2_LIMIT, LOG_SIGMA2_LIMIT, log_sigma2)
    half_sigma = tl.exp(0.5 * (log_sigma2 - 0.6931471805599453))  # σ̃ / √2: the constant is log 2
    tl.store(alpha + i_bh, half_sigma / sigma_q)
    tl.store(beta + i_bh, half_sigma / sigma_k)


@triton.jit(do_not_specialize=["N", "T"])
def _moments_kernel(
    q,
    k,
    padding,
    log_s_table,
    log_sigma2_table,
    part,
    alpha,
    beta,
    s_b,
    s_h,
    s_n,
    H,
    N,
    T,
    SIZE: tl.constexpr,
    SIZE_2: tl.constexpr,
    FINAL: tl.constexpr,
    META: tl.constexpr,
):
    """Compute the mean and Σ (x - mean)² of q and of k over the tokens [i_s T, (i_s + 1) T) that are not padding.

    The grid is (B H, splits).

    Args:
        part: output, (5, B H, splits) float32: the number of elements, the means of q and k, and Σ (x - mean)² of q and
            k. It is not used with FINAL.
        alpha, beta: outputs, (B H,) float32, which are written only with FINAL.
        FINAL: True if there is a single split.
    """
    head = _load_head(q, k, None, None, padding, None, None, None, None, None, s_b, s_h, s_n, 0, 0, 0, H, N)
    start = tl.program_id(1) * T
    end = tl.minimum(start + T, N)
    count = 0.0
    mean_q = 0.0
    mean_k = 0.0
    square_q = 0.0
    square_k = 0.0
    for i_r in range(0, end - start, META.rows):
        i_t = start + i_r
        real = _is_real_key(head, i_t + tl.arange(0, META.rows), end, META)
        b_weight = real.to(tl.float32)[:, None]
        # (rows, D)
        b_q = _load_rows(head.q, i_t, s_n, real, META).to(tl.float32)
        b_k = _load_rows(head.k, i_t, s_n, real, META).to(tl.float32)
        tile_count = tl.sum(real.to(tl.float32), 0) * META.dim
        mean, square = _tile_moments(b_q, b_weight, tile_count)
        mean_q, square_q = _merge_moments(count, mean_q, square_q, tile_count, mean, square)
        mean, square = _tile_moments(b_k, b_weight, tile_count)
        mean_k, square_k = _merge_moments(count, mean_k, square_k, tile_count, mean, square)
        count += tile_count
    if FINAL:
        _store_matched(alpha, beta, head.i_bh, count, square_q, square_k, log_s_table, log_sigma2_table, SIZE, SIZE_2)
    else:
        p_part = part + head.i_bh * tl.num_programs(1) + tl.program_id(1)
        stride = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
        tl.store(p_part, count)
        tl.store(p_part + stride, mean_q)
        tl.store(p_part + 2 * stride, mean_k)
        tl.store(p_part + 3 * stride, square_q)
        tl.store(p_part + 4 * stride, square_k)


@triton.jit
def _merge_squares(b_count, count, b_mean, b_square):
    """Return Σ (x - mean)² over the union of all splits.

    Args:
        b_count, b_mean, b_square: (splits,) count, mean and Σ (x - mean)² of each split.
        count: the sum of b_count.
    """
    mean = tl.sum(b_count * b_mean, 0) / tl.maximum(count, 1.0)
    b_step = b_mean - mean
    return tl.sum(b_square + b_count * b_step * b_step, 0)


@triton.jit(do_not_specialize=["SPLITS"])
def _moments_combine_kernel(
    part,
    log_s_table,
    log_sigma2_table,
    alpha,
    beta,
    SPLITS,
    SPLITS_2: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_2: tl.constexpr,
):
    """Compute and store α and β of one (batch, head) from the output `part` of _moments_kernel.

    The grid is (B H,). SPLITS is the number of splits, and SPLITS_2 the smallest power of 2 that is at least SPLITS.
    """
    i_bh = tl.program_id(0).to(tl.int64)
    o_s = tl.arange(0, SPLITS_2)
    p_part = part + i_bh * SPLITS + o_s
    stride = tl.num_programs(0).to(tl.int64) * SPLITS
    # (SPLITS_2,)
    b_count = tl.load(p_part, mask=o_s < SPLITS, other=0.0)
    count = tl.sum(b_count, 0)
    b_mean = tl.load(p_part + stride, mask=o_s < SPLITS, other=0.0)
    b_square = tl.load(p_part + 3 * stride, mask=o_s < SPLITS, other=0.0)
    square_q = _merge_squares(b_count, count, b_mean, b_square)
    b_mean = tl.load(p_part + 2 * stride, mask=o_s < SPLITS, other=0.0)
    b_square = tl.load(p_part + 4 * stride, mask=o_s < SPLITS, other=0.0)
    square_k = _merge_squares(b_count, count, b_mean, b_square)
    _store_matched(alpha, beta, i_bh, count, square_q, square_k, log_s_table, log_sigma2_table, SIZE, SIZE_2)
