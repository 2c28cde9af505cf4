"""Triton kernels of the forward pass of LLN and LLN+Diag attention, and the pieces that the backward pass shares.

Per (batch, head), with W_jd = exp(βk_jd - m_d), m_d = max_j βk_jd, s_d = Σ_j W_jd over the real keys and L = m + log s:

    _lln_state_kernel     k, v -> m, log s, S = Wᵀv / s              one program per split of the tokens
    _lln_combine_kernel   joins the splits (launched only when there are several)
    _lln_out_kernel       q (and the block's k, v) -> out = softmax_d(αq + L) S, or ½ (that + block-diagonal softmax)

k and v are read once or twice, q once, out is written once. W stays unnormalised, in [0, 1]: a normalised W is about
1/N, which half precision holds badly. Sums and everything that enters an exponential are float32; only operands of
`tl.dot` are rounded, to DOT. Reductions have a fixed order and nothing is atomic: results repeat bit for bit.

Every logarithm and exponent is to base 2, m and log s in memory too: e^x = 2^(x log2 e) is one instruction of the
device, whose `tl.exp` takes five, and α, β and the scores are scaled by log2 e in a product that is there anyway.
Without a real key m and log s are 0.

Names: b_ block in registers, p_ pointers, i_ index; bh runs over batch x head. Pointers to q, k, v share one set of
strides. Row indices are int64 before they meet a stride, so N = 2**20 with any layout is addressed right.
"""

# ruff: noqa: ANN001, ANN202 - arguments of kernels have no Python types

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _offset(i_bh, stride_b, stride_h, H):
    """Offset of the first element of (batch, head) number i_bh (int64)."""
    return i_bh // H * stride_b + i_bh % H * stride_h


@triton.jit
def _rows(p, i_t, stride_n, ROWS: tl.constexpr, D: tl.constexpr):
    """Pointers (ROWS, D) to the rows i_t, i_t + 1, ...; only the start needs 64 bits."""
    p_row = p + i_t.to(tl.int64) * stride_n
    return p_row + tl.arange(0, ROWS)[:, None] * stride_n + tl.arange(0, D)[None, :]


@triton.jit
def _real_keys(pad, i_b, rows, end, N, HAS_PAD: tl.constexpr):
    """Which of `rows` lie before `end` and are not padded."""
    real = rows < end
    if HAS_PAD:
        real = real & (tl.load(pad + i_b * N + rows, mask=real, other=1) == 0)
    return real


@triton.jit
def _key_tile(k, v, pad, i_b, i_t, end, stride_n, N, D: tl.constexpr, ROWS: tl.constexpr, HAS_PAD: tl.constexpr):
    """Of the rows i_t, i_t + 1, ...: their numbers, which are real, keys and values (ROWS, D), 0 where not real."""
    o_k = i_t + tl.arange(0, ROWS)
    real = _real_keys(pad, i_b, o_k, end, N, HAS_PAD)
    b_k = tl.load(_rows(k, i_t, stride_n, ROWS, D), mask=real[:, None], other=0.0)
    b_v = tl.load(_rows(v, i_t, stride_n, ROWS, D), mask=real[:, None], other=0.0)
    return o_k, real, b_k, b_v


@triton.jit
def _usable(b_q, pad, i_b, rows, end, N, HAS_PAD: tl.constexpr):
    """Which of the queries `rows`, b_q (ROWS, D), lie before `end` and are not padding with numbers that no computation
    survives, see ops/padding.py; to take the others as 0 keeps them out of all sums."""
    usable = rows < end
    if HAS_PAD:
        padded = tl.load(pad + i_b * N + rows, mask=usable, other=0) != 0
        usable = usable & ~(padded & (tl.sum((~(tl.abs(b_q) < 3e4)).to(tl.int32), 1) > 0))
    return usable


@triton.jit
def _log_normaliser(m, log_s, i_bh, D: tl.constexpr):
    """L = m + log s, (D,)."""
    o_d = i_bh * D + tl.arange(0, D)
    return tl.load(m + o_d) + tl.load(log_s + o_d)


@triton.jit
def _features(b_q, alpha, b_l):
    """A = softmax over the features of αq + L, (ROWS, D), float32."""
    b_x = (alpha * LOG2E) * b_q.to(tl.float32) + b_l[None, :]
    b_e = tl.exp2(b_x - tl.max(b_x, 1)[:, None])
    return b_e * (1.0 / tl.sum(b_e, 1))[:, None]


@triton.jit
def _dropout_scale(seed, i_bh, i_query, i_key, P: tl.constexpr):
    """0 with probability P, else 1 / (1 - P): Philox at the counter (query, key, bh), so any pass can recompute it."""
    c_q = (i_query + 0 * i_key).to(tl.uint32)
    c_k = (i_key + 0 * i_query).to(tl.uint32)
    c_bh = c_q * 0 + i_bh.to(tl.uint32)
    r, _, _, _ = tl.philox(tl.load(seed), c_q, c_k, c_bh, c_q * 0)
    return tl.where(tl.uint_to_uniform_float(r) >= P, 1.0 / (1.0 - P), 0.0)


@triton.jit
def _softmax_step(b_x, b_top, b_sum, SCALE: tl.constexpr):
    """A softmax over keys that come in parts, of x · SCALE: 2^(x log2 e · SCALE - max) of this part (queries, keys), by
    which what was summed with earlier parts shrinks, the new maximum and the new sum (queries,)."""
    b_new = tl.maximum(b_top, tl.max(b_x, 1) * (SCALE * LOG2E))
    b_shrink = tl.exp2(b_top - b_new)
    b_x = tl.exp2(b_x * (SCALE * LOG2E) - b_new[:, None])
    return b_x, b_shrink, b_new, b_sum * b_shrink + tl.sum(b_x, 1)


@triton.jit
def _inverse(b_sum):
    """1 / Σ, and 0 where nothing was summed."""
    return tl.where(b_sum > 0, 1.0 / tl.where(b_sum > 0, b_sum, 1.0), 0.0)


@triton.jit
def _log_sum(b_top, b_sum):
    """log Σ 2^x of a softmax, 0 without a key."""
    return tl.where(b_sum > 0, b_top + tl.log2(tl.where(b_sum > 0, b_sum, 1.0)), 0.0)


@triton.jit
def _finished_state(b_m, b_s):
    """m and log s as they are kept, both 0 without a real key, and 1 / s."""
    b_some = b_s > 0
    b_s = tl.where(b_some, b_s, 1.0)
    return tl.where(b_some, b_m, 0.0), tl.log2(b_s), 1.0 / b_s


@triton.jit
def _scores(b_q, b_k, o_q, o_k, real, BLOCK: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """q kᵀ, (queries, keys), and -inf for a key that is not real or, where a chunk holds several, of another block."""
    b_x = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    seen = real[None, :]
    if CHUNK > BLOCK:
        seen = seen & (o_q[:, None] // BLOCK == o_k[None, :] // BLOCK)
    return tl.where(seen, b_x, float("-inf"))


@triton.jit(do_not_specialize=["N", "T"])
def _lln_state_kernel(
    k, v, pad, beta, m, log_s, S, stride_b, stride_h, stride_n, H, N, T,
    D: tl.constexpr, ROWS: tl.constexpr, HAS_PAD: tl.constexpr, FINAL: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """m_d = max_j βk_jd, s_d = Σ_j W_jd and Wᵀv over tokens [i_s T, (i_s + 1) T), the maximum rescaled online.

    grid (B H, splits); m, s: (B H, splits, D) float32; S: (B H, splits, D, D). FINAL (one split): log s, and S / s.
    """
    i_bh, i_s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_out = i_bh * tl.num_programs(1) + i_s
    offset = _offset(i_bh, stride_b, stride_h, H)
    b_beta = tl.load(beta + i_bh) * LOG2E
    start = i_s * T
    end = tl.minimum(start + T, N)

    # -1e30 and not -inf: a tile without a real key must give 2^(-inf - m) = 0 and not 2^(-inf + inf)
    b_m = tl.full([D], -1e30, tl.float32)
    b_s = tl.zeros([D], tl.float32)
    b_S = tl.zeros([D, D], tl.float32)
    for i_r in range(0, end - start, ROWS):
        _, real, b_k, b_v = _key_tile(
            k + offset, v + offset, pad, i_bh // H, start + i_r, end, stride_n, N, D, ROWS, HAS_PAD
        )
        # (ROWS, D)
        b_y = tl.where(real[:, None], b_beta * b_k.to(tl.float32), float("-inf"))
        # (D,)
        b_new = tl.maximum(b_m, tl.max(b_y, 0))
        b_shrink = tl.exp2(b_m - b_new)
        b_m = b_new
        b_w = tl.exp2(b_y - b_m[None, :])
        b_s = b_s * b_shrink + tl.sum(b_w, 0)
        # (D, D)
        b_S = tl.dot(tl.trans(b_w.to(DOT)), b_v.to(DOT), acc=b_S * b_shrink[:, None], input_precision=PRECISION)

    o_d = tl.arange(0, D)
    if FINAL:
        b_m, b_s, b_inverse = _finished_state(b_m, b_s)
        b_S = b_S * b_inverse[:, None]
    tl.store(m + i_out * D + o_d, b_m)
    tl.store(log_s + i_out * D + o_d, b_s)
    tl.store(S + i_out * D * D + o_d[:, None] * D + o_d[None, :], b_S.to(S.dtype.element_ty))


@triton.jit(do_not_specialize=["SPLITS"])
def _lln_combine_kernel(
    part_m, part_s, part_S, m, log_s, S, SPLITS,
    D: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """m = max m_i, s = Σ s_i 2^{m_i - m}, S = Σ S_i 2^{m_i - m} / s over the splits i, ROWS of them at a time.

    grid (B H, D² / COLS): a program owns COLS neighbouring elements of the flattened S, with the m and s of their rows.
    """
    i_bh, i_c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_c = i_c * COLS + tl.arange(0, COLS)
    p_vector = i_bh * SPLITS * D + (o_c // D)[None, :]
    p_matrix = part_S + i_bh * SPLITS * D * D + o_c[None, :]

    b_m = tl.full([COLS], -1e30, tl.float32)
    for i_s in range(0, SPLITS, ROWS):
        o_s = (i_s + tl.arange(0, ROWS))[:, None]
        b_m = tl.maximum(b_m, tl.max(tl.load(part_m + p_vector + o_s * D, mask=o_s < SPLITS, other=-1e30), 0))
    b_s = tl.zeros([COLS], tl.float32)
    b_S = tl.zeros([COLS], tl.float32)
    for i_s in range(0, SPLITS, ROWS):
        o_s = (i_s + tl.arange(0, ROWS))[:, None]
        # (ROWS, COLS)
        b_shrink = tl.exp2(tl.load(part_m + p_vector + o_s * D, mask=o_s < SPLITS, other=-1e30) - b_m[None, :])
        b_s += tl.sum(b_shrink * tl.load(part_s + p_vector + o_s * D, mask=o_s < SPLITS, other=0.0), 0)
        b_S += tl.sum(b_shrink * tl.load(p_matrix + o_s * D * D, mask=o_s < SPLITS, other=0.0), 0)

    b_m, b_log, b_inverse = _finished_state(b_m, b_s)
    tl.store(S + i_bh * D * D + o_c, (b_S * b_inverse).to(S.dtype.element_ty))
    first = o_c % D == 0
    tl.store(m + i_bh * D + o_c // D, b_m, mask=first)
    tl.store(log_s + i_bh * D + o_c // D, b_log, mask=first)


@triton.jit
def _diag_rows(
    b_q, k, v, pad, seed, i_bh, i_b, o_q, start, end, stride_n, N,
    SCALE: tl.constexpr, DROPOUT: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, HAS_PAD: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """softmax(q kᵀ · SCALE) v of the queries o_q over the keys of their own block, softmax online; (ROWS, D)."""
    b_m = tl.full([ROWS], -1e30, tl.float32)
    b_l = tl.zeros([ROWS], tl.float32)
    b_o = tl.zeros([ROWS, D], tl.float32)
    for i_r in range(0, CHUNK, ROWS):
        o_k, real, b_k, b_v = _key_tile(k, v, pad, i_b, start + i_r, end, stride_n, N, D, ROWS, HAS_PAD)
        # (queries, keys)
        b_x = _scores(b_q.to(DOT), b_k.to(DOT), o_q, o_k, real, BLOCK, CHUNK, PRECISION)
        b_p, b_shrink, b_m, b_l = _softmax_step(b_x, b_m, b_l, SCALE)
        if DROPOUT > 0:
            b_p *= _dropout_scale(seed, i_bh, o_q[:, None], o_k[None, :], DROPOUT)
        if CHUNK > ROWS:  # else there is no earlier part
            b_o *= b_shrink[:, None]
        b_o = tl.dot(b_p.to(DOT), b_v.to(DOT), acc=b_o, input_precision=PRECISION)
    return b_o * _inverse(b_l)[:, None]


@triton.jit(do_not_specialize=["N"])
def _lln_out_kernel(
    q, k, v, pad, alpha, m, log_s, S, seed, out,
    stride_b, stride_h, stride_n, stride_out_b, stride_out_h, stride_out_n, H, N,
    SCALE: tl.constexpr, DROPOUT: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, HAS_PAD: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out = A S (BLOCK = 0), or ½ (A S + block-diagonal softmax): A = softmax_d(αq + L).

    grid (B H, ⌈N / CHUNK⌉): a program owns the CHUNK rows of one or more whole blocks, ROWS of them at a time.
    """
    i_bh, i_c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_b = i_bh // H
    offset = _offset(i_bh, stride_b, stride_h, H)
    offset_out = _offset(i_bh, stride_out_b, stride_out_h, H)
    start = i_c * CHUNK
    end = tl.minimum(start + CHUNK, N)

    o_d = tl.arange(0, D)
    b_alpha = tl.load(alpha + i_bh)
    b_l = _log_normaliser(m, log_s, i_bh, D)
    # (D, D)
    b_S = tl.load(S + i_bh * D * D + o_d[:, None] * D + o_d[None, :]).to(DOT)
    for i_r in range(0, CHUNK, ROWS):
        i_t = start + i_r
        o_q = i_t + tl.arange(0, ROWS)
        inside = (o_q < end)[:, None]
        # (ROWS, D)
        b_q = tl.load(_rows(q + offset, i_t, stride_n, ROWS, D), mask=inside, other=0.0)
        if HAS_PAD:
            b_q = tl.where(_usable(b_q, pad, i_b, o_q, end, N, HAS_PAD)[:, None], b_q, 0.0)
        b_o = tl.dot(_features(b_q, b_alpha, b_l).to(DOT), b_S, input_precision=PRECISION)
        if BLOCK > 0:
            b_o += _diag_rows(
                b_q, k + offset, v + offset, pad, seed, i_bh, i_b, o_q, start, end, stride_n, N,
                SCALE, DROPOUT, BLOCK, CHUNK, D, ROWS, HAS_PAD, DOT, PRECISION,
            )  # fmt: skip
            b_o *= 0.5
        p_out = _rows(out + offset_out, i_t, stride_out_n, ROWS, D)
        tl.store(p_out, b_o.to(out.dtype.element_ty), mask=inside)
