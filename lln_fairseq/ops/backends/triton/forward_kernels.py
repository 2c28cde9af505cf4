"""Triton kernels of the forward pass of LLN and LLN+Diag attention, and device functions that the other kernels share.

For each (batch, head), with features d, and maxima and sums over the tokens j whose keys are not padding:

    m_d = max_j βk_jd      W_jd = exp(βk_jd - m_d)      s_d = Σ_j W_jd      L = m + log s
    S = Wᵀv / s            A = softmax_d(αq + L)        LLN output = A S

The state of the keys is m, log_key_sum and S.

The kernels, in the order of their launches:

    _lln_state_kernel     reads k and v, writes m, log_key_sum and S; one program per split of the tokens
    _lln_combine_kernel   merges the splits; launched only if there are several
    _lln_out_kernel       reads q and, with blocks, k and v; writes A S or ½ (A S + block-diagonal softmax)

k and v are read once or twice, q is read once, and the output is written once. W is not divided by s, so that it lies
in [0, 1]: after the division it would be about 1/N, which half precision represents badly. Sums and the arguments of
exponentials are float32. Only the operands of `tl.dot` are rounded, to the dtype DOT. Reductions have a fixed order and
there are no atomics, so repeated runs give identical results, bit for bit.

All logarithms and exponentials have base 2, and m and log_key_sum are stored in base 2 too. 2^x takes one instruction,
but `tl.exp` takes five, and the factor log2 e is folded into a multiplication that is needed anyway. m and log_key_sum
are 0 for a sequence that is all padding.

Names and arguments of all kernels and device functions:

    b_, p_, o_, i_    prefixes: values in registers, a pointer, offsets along an axis, an index
    i_b, i_bh         the index of the sequence, and the index of the sequence and head, batch · H + head
    i_t               the index of the first token of a tile
    i_s, i_c          the index of a split, the index of a chunk
    T                 the number of tokens of a split: one program sums over one split of a sequence
    CHUNK             the number of tokens of a chunk: one program computes the rows of one chunk, ROWS at a time
    start, end        the first token of a program, and the token after its last one
    BLOCK             the block size; a chunk contains whole blocks
    real              bool (ROWS,), True for the tokens of a tile that exist and are not padding
    padding               a pointer to bytes (B, N) that are 1 for padding tokens, or None
    seed              a pointer to the seed of the dropout; it may be None if DROPOUT, the probability, is 0
    stride_           strides in elements; q, k and v have the same strides

Row indices are converted to int64 before they are multiplied by a stride, so that sequences of 2**20 tokens are
addressed correctly in every layout.
"""

# ruff: noqa: ANN001, ANN202 - arguments of kernels have no Python types

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# The start of a running maximum. With -inf, a tile whose keys are all padding would give 2^(-inf + inf) = NaN.
LOWEST = tl.constexpr(-1e30)


@triton.jit
def _head_offset(i_bh, stride_b, stride_h, H):
    """Return the offset, in elements, of the first element of the (batch, head) with index i_bh, an int64."""
    return i_bh // H * stride_b + i_bh % H * stride_h


@triton.jit
def _row_pointers(p, i_t, stride_n, ROWS: tl.constexpr, D: tl.constexpr):
    """Return pointers (ROWS, D) to the features of the tokens i_t, i_t + 1, ... of a head that begins at p.

    Only the offset of the first row is computed with 64 bits.
    """
    p_row = p + i_t.to(tl.int64) * stride_n
    return p_row + tl.arange(0, ROWS)[:, None] * stride_n + tl.arange(0, D)[None, :]


@triton.jit
def _dot(b_x, b_y, acc=None):
    """Return the matrix product x y in float32, plus acc if it is not None.

    Operands in float32 are multiplied as three tf32 products, with an error of 1e-6. A single tf32 product has an error
    of 4e-4, and `ieee` uses no tensor cores and spills registers.
    """
    return tl.dot(b_x, b_y, acc=acc, input_precision="tf32x3" if b_x.dtype == tl.float32 else "tf32")


@triton.jit
def _is_real_key(padding, i_b, o_k, end, N):
    """Return True for each of the tokens o_k that lies before `end` and is not padding."""
    real = o_k < end
    if padding is not None:
        real = real & (tl.load(padding + i_b * N + o_k, mask=real, other=1) == 0)
    return real


@triton.jit
def _load_keys(k, v, padding, i_b, i_t, end, stride_n, N, D: tl.constexpr, ROWS: tl.constexpr):
    """Load the keys and values of the ROWS tokens i_t, i_t + 1, ... of a head; k and v point to that head.

    Returns:
        The indices of the tokens and `real`, both (ROWS,), then the keys and the values, both (ROWS, D) in the dtype of
        k and v. Keys and values are 0 where `real` is False.
    """
    o_k = i_t + tl.arange(0, ROWS)
    real = _is_real_key(padding, i_b, o_k, end, N)
    # (ROWS, D)
    b_k = tl.load(_row_pointers(k, i_t, stride_n, ROWS, D), mask=real[:, None], other=0.0)
    b_v = tl.load(_row_pointers(v, i_t, stride_n, ROWS, D), mask=real[:, None], other=0.0)
    return o_k, real, b_k, b_v


@triton.jit
def _is_usable_query(b_q, padding, i_b, o_q, end, N):
    """Return True for each query of a tile that lies before `end` and is usable, (ROWS,).

    A padding query is not usable if one of its numbers is NaN or has a magnitude of at least 3e4, the limit of
    ops/formula.py. Callers replace queries that are not usable by 0, which keeps them out of all sums.

    Args:
        b_q: (ROWS, D) queries.
        o_q: (ROWS,) indices of the queries.
    """
    usable = o_q < end
    if padding is not None:
        padded = tl.load(padding + i_b * N + o_q, mask=usable, other=0) != 0
        usable = usable & ~(padded & (tl.sum((~(tl.abs(b_q) < 3e4)).to(tl.int32), 1) > 0))
    return usable


@triton.jit
def _load_log_sum(m, log_key_sum, i_bh, D: tl.constexpr):
    """Load m and log_key_sum of a head and return L = m + log s, (D,), in base 2."""
    o_d = i_bh * D + tl.arange(0, D)
    return tl.load(m + o_d) + tl.load(log_key_sum + o_d)


@triton.jit
def _query_features(b_q, alpha, b_l):
    """Return A, the softmax of αq + L over the features, (ROWS, D) float32.

    Args:
        b_q: (ROWS, D) queries.
        alpha: α of the head.
        b_l: (D,) L in base 2.
    """
    b_x = (alpha * LOG2E) * b_q.to(tl.float32) + b_l[None, :]
    b_e = tl.exp2(b_x - tl.max(b_x, 1)[:, None])
    return b_e * (1.0 / tl.sum(b_e, 1))[:, None]


@triton.jit
def _dropout_scale(seed, i_bh, o_q, o_k, P: tl.constexpr):
    """Return, for each pair of a query and a key, 0 with probability P and 1 / (1 - P) otherwise.

    The random numbers are those of Philox at the counter (query, key, i_bh), so every pass can compute them again.

    Args:
        o_q, o_k: indices of the queries and keys; they broadcast to the shape of the result.
    """
    c_q = (o_q + 0 * o_k).to(tl.uint32)
    c_k = (o_k + 0 * o_q).to(tl.uint32)
    c_bh = c_q * 0 + i_bh.to(tl.uint32)
    random, _, _, _ = tl.philox(tl.load(seed), c_q, c_k, c_bh, c_q * 0)
    return tl.where(tl.uint_to_uniform_float(random) >= P, 1.0 / (1.0 - P), 0.0)


@triton.jit
def _softmax_step(b_scores, b_row_max, b_row_sum, SCALE: tl.constexpr):
    """Add a tile of keys to a running softmax of scores · SCALE over the keys.

    Args:
        b_scores: (queries, keys) of the tile, not yet multiplied by SCALE; -inf leaves a key out.
        b_row_max: (queries,) maximum of the earlier tiles in base 2, LOWEST before the first one.
        b_row_sum: (queries,) sum of 2^(score - maximum) over the earlier tiles, 0 before the first one.

    Returns:
        2^(score - new maximum) for the keys of the tile, (queries, keys), the factor by which sums over earlier tiles
        must be multiplied, the new maximum and the new sum, all three (queries,).
    """
    b_new_max = tl.maximum(b_row_max, tl.max(b_scores, 1) * (SCALE * LOG2E))
    b_rescale = tl.exp2(b_row_max - b_new_max)
    b_weights = tl.exp2(b_scores * (SCALE * LOG2E) - b_new_max[:, None])
    return b_weights, b_rescale, b_new_max, b_row_sum * b_rescale + tl.sum(b_weights, 1)


@triton.jit
def _reciprocal_or_zero(b_sum):
    """Return 1 / b_sum, or 0 where b_sum is 0 because there was nothing to add."""
    return tl.where(b_sum > 0, 1.0 / tl.where(b_sum > 0, b_sum, 1.0), 0.0)


@triton.jit
def _log_sum_exp(b_row_max, b_row_sum):
    """Return the log-normalizer, in base 2, of a running softmax after the last tile.

    It is 0 for a row whose keys are all padding. The arguments are the last maximum and sum of `_softmax_step`.
    """
    return tl.where(b_row_sum > 0, b_row_max + tl.log2(tl.where(b_row_sum > 0, b_row_sum, 1.0)), 0.0)


@triton.jit
def _finish_key_sums(b_m, b_key_sum):
    """Return m, log s and 1 / s from m and s. If all keys are padding, s = 0, and the result is 0, 0 and 1."""
    has_keys = b_key_sum > 0
    b_key_sum = tl.where(has_keys, b_key_sum, 1.0)
    return tl.where(has_keys, b_m, 0.0), tl.log2(b_key_sum), 1.0 / b_key_sum


@triton.jit
def _block_scores(b_q, b_k, o_q, o_k, real, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Return the scores q kᵀ of a tile, (queries, keys), without the factor 1 / √D.

    The score is -inf where `real` is False, or where the query and the key lie in different blocks.
    """
    b_scores = _dot(b_q, tl.trans(b_k))
    visible = real[None, :]
    if CHUNK > BLOCK:
        visible = visible & (o_q[:, None] // BLOCK == o_k[None, :] // BLOCK)
    return tl.where(visible, b_scores, float("-inf"))


@triton.jit(do_not_specialize=["N", "T"])
def _lln_state_kernel(
    k,
    v,
    padding,
    beta,
    m,
    log_key_sum,
    S,
    stride_b,
    stride_h,
    stride_n,
    H,
    N,
    T,
    FINAL: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Compute m, s and Wᵀv over the tokens [i_s T, (i_s + 1) T) in one pass.

    The sums are rescaled whenever the running maximum grows. The grid is (B H, splits).

    Args:
        m, log_key_sum: outputs, (B H, splits, D) float32. With FINAL, log_key_sum gets log s, otherwise s.
        S: output, (B H, splits, D, D). With FINAL it gets Wᵀv / s, otherwise Wᵀv.
        FINAL: True if there is a single split.
    """
    i_bh = tl.program_id(0).to(tl.int64)
    i_s = tl.program_id(1)
    i_out = i_bh * tl.num_programs(1) + i_s
    offset = _head_offset(i_bh, stride_b, stride_h, H)
    b_beta = tl.load(beta + i_bh) * LOG2E
    start = i_s * T
    end = tl.minimum(start + T, N)

    b_m = tl.full([D], LOWEST, tl.float32)
    b_key_sum = tl.zeros([D], tl.float32)
    b_state = tl.zeros([D, D], tl.float32)
    for i_r in range(0, end - start, ROWS):
        _, real, b_k, b_v = _load_keys(
            k + offset, v + offset, padding, i_bh // H, start + i_r, end, stride_n, N, D, ROWS
        )
        # (ROWS, D)
        b_y = tl.where(real[:, None], b_beta * b_k.to(tl.float32), float("-inf"))
        # (D,)
        b_new_max = tl.maximum(b_m, tl.max(b_y, 0))
        b_rescale = tl.exp2(b_m - b_new_max)
        b_m = b_new_max
        # (ROWS, D)
        b_w = tl.exp2(b_y - b_m[None, :])
        # (D,)
        b_key_sum = b_key_sum * b_rescale + tl.sum(b_w, 0)
        # (D, D)
        b_state = _dot(tl.trans(b_w.to(DOT)), b_v.to(DOT), acc=b_state * b_rescale[:, None])

    o_d = tl.arange(0, D)
    if FINAL:
        b_m, b_key_sum, b_inverse_key_sum = _finish_key_sums(b_m, b_key_sum)
        b_state = b_state * b_inverse_key_sum[:, None]
    tl.store(m + i_out * D + o_d, b_m)
    tl.store(log_key_sum + i_out * D + o_d, b_key_sum)
    tl.store(S + i_out * D * D + o_d[:, None] * D + o_d[None, :], b_state.to(S.dtype.element_ty))


@triton.jit(do_not_specialize=["SPLITS"])
def _lln_combine_kernel(
    part_m, part_s, part_S, m, log_key_sum, S, SPLITS, D: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr
):
    """Merge the splits of _lln_state_kernel, ROWS splits at a time, and write m, log_key_sum and S.

    With m_i, s_i and (Wᵀv)_i of the splits i, the results are m = max_i m_i, s = Σ_i s_i 2^(m_i - m) and
    S = Σ_i (Wᵀv)_i 2^(m_i - m) / s. The grid is (B H, D² / COLS): a program computes COLS consecutive elements of the
    flattened S. The m and log_key_sum of a row of S are written by the program that has the first element of the row.

    Args:
        part_m, part_s, part_S: the outputs m, log_key_sum and S of _lln_state_kernel.
        m, log_key_sum, S: outputs, without the dimension of the splits.
        SPLITS: the number of splits.
    """
    i_bh = tl.program_id(0).to(tl.int64)
    i_c = tl.program_id(1)
    o_c = i_c * COLS + tl.arange(0, COLS)
    p_vector = i_bh * SPLITS * D + (o_c // D)[None, :]
    p_matrix = part_S + i_bh * SPLITS * D * D + o_c[None, :]

    b_m = tl.full([COLS], LOWEST, tl.float32)
    for i_s in range(0, SPLITS, ROWS):
        o_s = (i_s + tl.arange(0, ROWS))[:, None]
        b_m = tl.maximum(b_m, tl.max(tl.load(part_m + p_vector + o_s * D, mask=o_s < SPLITS, other=LOWEST), 0))
    b_key_sum = tl.zeros([COLS], tl.float32)
    b_state = tl.zeros([COLS], tl.float32)
    for i_s in range(0, SPLITS, ROWS):
        o_s = (i_s + tl.arange(0, ROWS))[:, None]
        # (ROWS, COLS)
        b_rescale = tl.exp2(tl.load(part_m + p_vector + o_s * D, mask=o_s < SPLITS, other=LOWEST) - b_m[None, :])
        # (COLS,)
        b_key_sum += tl.sum(b_rescale * tl.load(part_s + p_vector + o_s * D, mask=o_s < SPLITS, other=0.0), 0)
        b_state += tl.sum(b_rescale * tl.load(p_matrix + o_s * D * D, mask=o_s < SPLITS, other=0.0), 0)

    b_m, b_log_key_sum, b_inverse_key_sum = _finish_key_sums(b_m, b_key_sum)
    tl.store(S + i_bh * D * D + o_c, (b_state * b_inverse_key_sum).to(S.dtype.element_ty))
    is_first = o_c % D == 0
    tl.store(m + i_bh * D + o_c // D, b_m, mask=is_first)
    tl.store(log_key_sum + i_bh * D + o_c // D, b_log_key_sum, mask=is_first)


@triton.jit
def _block_attention(
    b_q,
    k,
    v,
    padding,
    seed,
    i_bh,
    i_b,
    o_q,
    start,
    end,
    stride_n,
    N,
    SCALE: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Return softmax(q kᵀ · SCALE) v over the keys in the block of each query, (ROWS, D) float32.

    Padding keys are left out. A row is 0 if all keys of its block are padding. k and v point to the head of the
    queries. The keys of the chunk [start, end) are loaded ROWS at a time.

    Args:
        b_q: (ROWS, D) queries.
        o_q: (ROWS,) indices of the queries.
    """
    b_row_max = tl.full([ROWS], LOWEST, tl.float32)
    b_row_sum = tl.zeros([ROWS], tl.float32)
    b_o = tl.zeros([ROWS, D], tl.float32)
    for i_r in range(0, CHUNK, ROWS):
        o_k, real, b_k, b_v = _load_keys(k, v, padding, i_b, start + i_r, end, stride_n, N, D, ROWS)
        # (queries, keys)
        b_scores = _block_scores(b_q.to(DOT), b_k.to(DOT), o_q, o_k, real, BLOCK, CHUNK)
        b_p, b_rescale, b_row_max, b_row_sum = _softmax_step(b_scores, b_row_max, b_row_sum, SCALE)
        if DROPOUT > 0:
            b_p *= _dropout_scale(seed, i_bh, o_q[:, None], o_k[None, :], DROPOUT)
        # (queries, D)
        if CHUNK > ROWS:  # a single tile has no earlier sum to rescale
            b_o *= b_rescale[:, None]
        b_o = _dot(b_p.to(DOT), b_v.to(DOT), acc=b_o)
    return b_o * _reciprocal_or_zero(b_row_sum)[:, None]


@triton.jit(do_not_specialize=["N"])
def _lln_out_kernel(
    q,
    k,
    v,
    padding,
    alpha,
    m,
    log_key_sum,
    S,
    seed,
    out,
    stride_b,
    stride_h,
    stride_n,
    stride_out_b,
    stride_out_h,
    stride_out_n,
    H,
    N,
    SCALE: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Write A S if BLOCK = 0, otherwise ½ (A S + block-diagonal softmax).

    The grid is (B H, ⌈N / CHUNK⌉). m, log_key_sum and S are the state of the keys. `out` is (B, H, N, D), the output.
    """
    i_bh = tl.program_id(0).to(tl.int64)
    i_c = tl.program_id(1)
    i_b = i_bh // H
    offset = _head_offset(i_bh, stride_b, stride_h, H)
    offset_out = _head_offset(i_bh, stride_out_b, stride_out_h, H)
    start = i_c * CHUNK
    end = tl.minimum(start + CHUNK, N)

    o_d = tl.arange(0, D)
    b_alpha = tl.load(alpha + i_bh)
    b_l = _load_log_sum(m, log_key_sum, i_bh, D)
    # (D, D)
    b_state = tl.load(S + i_bh * D * D + o_d[:, None] * D + o_d[None, :]).to(DOT)
    for i_r in range(0, CHUNK, ROWS):
        i_t = start + i_r
        o_q = i_t + tl.arange(0, ROWS)
        in_range = (o_q < end)[:, None]
        # (ROWS, D)
        b_q = tl.load(_row_pointers(q + offset, i_t, stride_n, ROWS, D), mask=in_range, other=0.0)
        if padding is not None:
            b_q = tl.where(_is_usable_query(b_q, padding, i_b, o_q, end, N)[:, None], b_q, 0.0)
        b_o = _dot(_query_features(b_q, b_alpha, b_l).to(DOT), b_state)
        if BLOCK > 0:
            b_o += _block_attention(
                b_q,
                k + offset,
                v + offset,
                padding,
                seed,
                i_bh,
                i_b,
                o_q,
                start,
                end,
                stride_n,
                N,
                SCALE,
                DROPOUT,
                BLOCK,
                CHUNK,
                D,
                ROWS,
                DOT,
            )
            b_o *= 0.5
        p_out = _row_pointers(out + offset_out, i_t, stride_out_n, ROWS, D)
        tl.store(p_out, b_o.to(out.dtype.element_ty), mask=in_range)
