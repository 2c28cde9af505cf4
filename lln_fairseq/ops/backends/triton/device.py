"""Device functions that the Triton kernels of all forms share, and the notation of the kernels.

For each (batch, head), with features d, and maxima and sums over the tokens j whose keys are not padding:

    maximum_d = max_j βk_jd      W_jd = exp(βk_jd - maximum_d)      total_d = Σ_j W_jd      L = maximum + log total
    S = Wᵀv / total              A = softmax_d(αq + L)              LLN output = A S

The state of the keys is maximum, log_total and S. W is not divided by the total, so that it lies in [0, 1]: after the
division it would be about 1/N, which half precision represents badly. Sums and the arguments of exponentials are
float32. Only the operands of `tl.dot` are rounded, to META.dot. Reductions have a fixed order and there are no atomics,
so repeated runs give identical results, bit for bit.

All logarithms and exponentials have base 2, and maximum and log_total are stored in base 2 too. 2^x takes one
instruction, but `tl.exp` takes five, and the factor log2 e is folded into a multiplication that is needed anyway.
maximum and log_total are 0 for a sequence that is all padding.

One program computes the rows of one chunk, META.rows at a time. A chunk contains whole blocks. With global tokens
(ops/formula.py), the keys of a chunk are its own tokens and the global tokens before it.

Names and arguments of all kernels and device functions:

    b_, p_, o_, i_    prefixes: values in registers, a pointer, offsets along an axis, an index
    META              the `Settings` of launch.py
    i_b, i_bh         the index of the sequence, and the index of the sequence and head, batch · H + head
    i_t               the index of the first token of a tile
    i_s, i_c          the index of a split, the index of a chunk
    i_r               the position of a tile in a chunk or in a split
    T                 the number of tokens of a split: one program sums over one split of a sequence
    start, end        the first token of a program, and the token after its last one
    o_q, o_k          the indices of the queries and keys of a tile, (rows,)
    real              bool (rows,), True for the tokens of a tile that exist and are not padding
    padding           a pointer to bytes (B, N) that are 1 for padding tokens, or None
    num_padding       a pointer to the number of padding tokens of every sequence, (B,), or None
    num_global        a pointer to the number of global tokens of every sequence, (B,), or None
    seed              a pointer to the seed of the dropout; it may be None without dropout
    s_b, s_h, s_n     strides of batch, heads and tokens, in elements, of q, k and v; s_do_, s_out_: of do and outputs

Row indices are converted to int64 before they are multiplied by a stride, so that sequences of 2**20 tokens are
addressed correctly in every layout.
"""

# ruff: noqa: ANN001, ANN202 - arguments of kernels have no Python types

from typing import Any, NamedTuple

import triton
import triton.language as tl

from lln_fairseq.ops import formula

LOG2E = tl.constexpr(1.4426950408889634)
# The start of a running maximum. With -inf, a tile whose keys are all padding would give 2^(-inf + inf) = NaN.
LOWEST = tl.constexpr(-1e30)
LLN = tl.constexpr(formula.LLN)
DIAG = tl.constexpr(formula.DIAG)
PADDED_QUERY_LIMIT = tl.constexpr(formula.PADDED_QUERY_LIMIT)
JOINT = tl.constexpr(formula.JOINT)


class Head(NamedTuple):
    """The inputs of one (batch, head). q, k, v and do are pointers to its first token, do is the output's gradient."""

    q: Any
    k: Any
    v: Any
    do: Any
    stride: Any  # of the tokens of q, k and v
    stride_do: Any  # of the tokens of do
    padding: Any  # a pointer to the first token of the sequence, if META.has_padding
    alpha: Any
    beta: Any
    seed: Any
    i_bh: Any
    N: Any
    num_keys: Any  # the keys of the sequence that are not padding, if num_padding was given
    num_global: Any  # the global tokens of the sequence


class State(NamedTuple):
    """Pointers to the state of the keys of a head."""

    maximum: Any  # (D,)
    log_total: Any  # (D,)
    S: Any  # (D, D)


@triton.jit
def _head_offset(i_bh, s_b, s_h, H):
    """Return the offset, in elements, of the first element of the (batch, head) with index i_bh, an int64."""
    return i_bh // H * s_b + i_bh % H * s_h


@triton.jit
def _load_head(
    q, k, v, do, padding, num_padding, num_global, alpha, beta, seed, s_b, s_h, s_n, s_do_b, s_do_h, s_do_n, H, N
):
    """Return the `Head` of the program. Arguments that it does not need are None, or any number for a stride.

    Triton 3.6 cannot compile a device function that returns None, also inside a tuple. So a missing pointer becomes 0.
    """
    i_bh = tl.program_id(0).to(tl.int64)
    i_b = i_bh // H
    offset = _head_offset(i_bh, s_b, s_h, H)
    num_keys = N
    if num_padding is not None:
        num_keys = N - tl.load(num_padding + i_b)
    b_num_global = 0
    if num_global is not None:
        b_num_global = tl.load(num_global + i_b).to(tl.int32)
    return Head(
        q=0 if q is None else q + offset,
        k=0 if k is None else k + offset,
        v=0 if v is None else v + offset,
        do=0 if do is None else do + _head_offset(i_bh, s_do_b, s_do_h, H),
        stride=s_n,
        stride_do=s_do_n,
        padding=0 if padding is None else padding + i_b * N,
        alpha=0.0 if alpha is None else tl.load(alpha + i_bh),
        beta=0.0 if beta is None else tl.load(beta + i_bh),
        seed=0 if seed is None else seed,
        i_bh=i_bh,
        N=N,
        num_keys=num_keys,
        num_global=b_num_global,
    )


@triton.jit
def _state_of_head(maximum, log_total, S, i_bh, META: tl.constexpr):
    """Return the `State` of a head from pointers to the states of all heads, which are None in the form DIAG."""
    if META.form == DIAG:
        return State(0, 0, 0)
    else:
        return State(maximum + i_bh * META.dim, log_total + i_bh * META.dim, S + i_bh * META.dim * META.dim)


@triton.jit
def _row_pointers(p, i_t, stride, META: tl.constexpr):
    """Return pointers (rows, D) to the features of the tokens i_t, i_t + 1, ... of a head that begins at p.

    Only the offset of the first row is computed with 64 bits.
    """
    p_row = p + i_t.to(tl.int64) * stride
    return p_row + tl.arange(0, META.rows)[:, None] * stride + tl.arange(0, META.dim)[None, :]


@triton.jit
def _load_rows(p, i_t, stride, mask, META: tl.constexpr):
    """Load the tokens i_t, i_t + 1, ... of a head that begins at p, (rows, D); 0 where mask (rows,) is False."""
    return tl.load(_row_pointers(p, i_t, stride, META), mask=mask[:, None], other=0.0)


@triton.jit
def _store_rows(p, i_t, stride, b_x, mask, META: tl.constexpr):
    """Store b_x (rows, D) like `_load_rows` loads it, in the dtype of p."""
    tl.store(_row_pointers(p, i_t, stride, META), b_x.to(p.dtype.element_ty), mask=mask[:, None])


@triton.jit
def _matrix_pointers(p, META: tl.constexpr):
    """Return pointers (D, D) to the elements of the matrix at p."""
    o_d = tl.arange(0, META.dim)
    return p + o_d[:, None] * META.dim + o_d[None, :]


@triton.jit
def _is_real_key(head, o_k, end, META: tl.constexpr):
    """Return True for each of the tokens o_k that lies before `end` and is not padding."""
    real = o_k < end
    if META.has_padding:
        real = real & (tl.load(head.padding + o_k, mask=real, other=1) == 0)
    return real


@triton.jit
def _has_row(head, o_q, end, META: tl.constexpr):
    """Return True for each of the queries o_q that lies before `end` and is not global: see global_rows.py."""
    has_row = o_q < end
    if META.has_global_rows:
        has_row = has_row & (o_q >= head.num_global)
    return has_row


@triton.jit
def _load_keys(head, i_t, end, META: tl.constexpr):
    """Load the keys and values of the tokens i_t, i_t + 1, ...

    Returns: o_k and `real`, then the keys and the values, both (rows, D); they are 0 where `real` is False.
    """
    o_k = i_t + tl.arange(0, META.rows)
    real = _is_real_key(head, o_k, end, META)
    b_k = _load_rows(head.k, i_t, head.stride, real, META)
    b_v = _load_rows(head.v, i_t, head.stride, real, META)
    return o_k, real, b_k, b_v


@triton.jit
def _load_queries(head, i_t, end, META: tl.constexpr):
    """Load the queries i_t, i_t + 1, ...

    A padding query is not usable if one of its numbers is NaN or has a magnitude of at least PADDED_QUERY_LIMIT. Its
    features are replaced by 0, which keeps it out of all sums.

    Returns: o_q and True for each query that lies before `end` and is usable, both (rows,), and the queries, (rows, D).
    """
    o_q = i_t + tl.arange(0, META.rows)
    usable = o_q < end
    b_q = _load_rows(head.q, i_t, head.stride, usable, META)
    if META.has_padding:
        padded = tl.load(head.padding + o_q, mask=usable, other=0) != 0
        usable = usable & ~(padded & (tl.sum((~(tl.abs(b_q) < PADDED_QUERY_LIMIT)).to(tl.int32), 1) > 0))
        b_q = tl.where(usable[:, None], b_q, 0.0)
    return o_q, usable, b_q


@triton.jit
def _dot(b_x, b_y, acc=None):
    """Return the matrix product x y in float32, plus acc if it is not None.

    Operands in float32 are multiplied as three tf32 products, with an error of 1e-6. A single tf32 product has an error
    of 4e-4, and `ieee` uses no tensor cores and spills registers.
    """
    return tl.dot(b_x, b_y, acc=acc, input_precision="tf32x3" if b_x.dtype == tl.float32 else "tf32")


@triton.jit
def _load_log_sum(state, META: tl.constexpr):
    """Load L = maximum + log total, (D,), in base 2."""
    o_d = tl.arange(0, META.dim)
    return tl.load(state.maximum + o_d) + tl.load(state.log_total + o_d)


@triton.jit
def _query_features(b_q, alpha, b_l):
    """Return A, the softmax of αq + L over the features, (rows, D) float32. b_l is L in base 2, (D,)."""
    b_x = (alpha * LOG2E) * b_q.to(tl.float32) + b_l[None, :]
    b_e = tl.exp2(b_x - tl.max(b_x, 1)[:, None])
    return b_e * (1.0 / tl.sum(b_e, 1))[:, None]


@triton.jit
def _exp2_at_most_1(b_x):
    """Return 2^min(x, 0), or NaN if x is NaN.

    In exact arithmetic x is at most 0. As a difference of large numbers, it can be above 0: a GPU rounds the maximum,
    but not a product that it subtracts the maximum from.
    """
    return tl.exp2(tl.minimum(b_x, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def _key_features(b_k, real, beta, b_maximum):
    """Return W = exp(βk - maximum), (rows, features) float32, with 0 where `real` is False.

    b_maximum is the maximum in base 2, (features,).
    """
    b_y = (beta * LOG2E) * b_k.to(tl.float32) - b_maximum[None, :]
    return tl.where(real[:, None], _exp2_at_most_1(b_y), 0.0)
