"""Device functions for the keys of a query's block: which keys these are, softmax, dropout, weights of the joint form.

The keys of a query's block are the block's own tokens, META.reach tokens on each side of it and, with global tokens,
the global tokens before these. Padding is left out. device.py explains the notation.
"""

# ruff: noqa: ANN001, ANN202 - arguments of kernels have no Python types

import triton
import triton.language as tl

from lln_fairseq.ops.backends.triton.device import LOG2E, _dot, _exp2_at_most_1, _load_keys
from lln_fairseq.ops.formula import FLOOR as _FLOOR

FLOOR = tl.constexpr(_FLOOR)


@triton.jit
def _count_key_rows(head, start, META: tl.constexpr):
    """Return the number of rows of all tiles of keys that the queries of the chunk at `start` need."""
    rows = META.chunk + 2 * META.reach
    if META.has_global:
        rows = META.chunk_rows + tl.minimum(head.num_global, _first_reached(start, META))
    return rows


@triton.jit
def _first_reached(start, META: tl.constexpr):
    """Return the first token that is a key of the chunk at `start`, apart from global tokens."""
    return tl.maximum(start - META.reach, 0)


@triton.jit
def _load_chunk_keys(head, start, end, i_r, META: tl.constexpr):
    """Load a tile of keys of the chunk [start, end), as `_load_keys` does. Tiles of global tokens come last."""
    first = _first_reached(start, META)
    end = tl.minimum(end + META.reach, head.N)
    i_t = first + i_r
    if META.has_global:
        is_global = i_r >= META.chunk_rows
        i_t = tl.where(is_global, i_r - META.chunk_rows, i_t)
        end = tl.where(is_global, tl.minimum(head.num_global, first), end)
    return _load_keys(head, i_t, end, META)


@triton.jit
def _find_pairs(head, o_q, o_k, real, META: tl.constexpr):
    """Return True where the key is real, one of the query's block and in the band; bool (rows, rows) or (1, rows)."""
    pairs = real[None, :]
    if META.band >= 0:
        pairs = pairs & (tl.abs(o_k[None, :] - o_q[:, None]) <= META.band)
    elif META.chunk > META.block:
        # The distance from the query's block to the key's block, in tokens.
        distance = (o_k[None, :] // META.block - o_q[:, None] // META.block) * META.block
        in_block = tl.abs(distance) <= META.reach
        if META.has_global:
            in_block = in_block | ((distance < -META.reach) & (o_k < head.num_global)[None, :])
        pairs = pairs & in_block
    return pairs


@triton.jit
def _clear_other_blocks(b_x, pairs, META: tl.constexpr):
    """Return b_x (queries, keys) with 0 where `pairs` is False, or b_x itself if a chunk is a block without a band."""
    if META.chunk > META.block or META.band >= 0:
        b_x = tl.where(pairs, b_x, 0.0)
    return b_x


@triton.jit
def _block_scores(b_q, b_k, pairs, META: tl.constexpr):
    """Return the scores q kᵀ of a tile, (queries, keys), without the factor 1 / √D; -inf where `pairs` is False."""
    return tl.where(pairs, _dot(b_q.to(META.dot), tl.trans(b_k.to(META.dot))), float("-inf"))


@triton.jit
def _dropout_scale(head, o_q, o_k, META: tl.constexpr):
    """Return, for each query and key, 0 with the probability of the dropout p, and otherwise 1 / (1 - p).

    The random numbers are those of Philox at the counter (query, key, i_bh), so every pass can compute them again.
    """
    c_q = (o_q[:, None] + 0 * o_k[None, :]).to(tl.uint32)
    c_k = (o_k[None, :] + 0 * o_q[:, None]).to(tl.uint32)
    c_bh = c_q * 0 + head.i_bh.to(tl.uint32)
    random, _, _, _ = tl.philox(tl.load(head.seed), c_q, c_k, c_bh, c_q * 0)
    return tl.where(tl.uint_to_uniform_float(random) >= META.dropout, 1.0 / (1.0 - META.dropout), 0.0)


@triton.jit
def _softmax_step(b_scores, b_row_max, b_row_sum, META: tl.constexpr):
    """Add a tile of keys to a running softmax of scores / √D over the keys.

    Args:
        b_scores: (queries, keys) of the tile, not yet multiplied by 1 / √D; -inf leaves a key out.
        b_row_max: (queries,) maximum of the earlier tiles in base 2, LOWEST before the first one.
        b_row_sum: (queries,) sum of 2^(score - maximum) over the earlier tiles, 0 before the first one.

    Returns:
        2^(score - new maximum) for the keys of the tile, (queries, keys), the factor by which sums over earlier tiles
        must be multiplied, the new maximum and the new sum, all three (queries,).
    """
    b_new_max = tl.maximum(b_row_max, tl.max(b_scores, 1) * (META.scale * LOG2E))
    b_rescale = tl.exp2(b_row_max - b_new_max)
    b_weights = _exp2_at_most_1(b_scores * (META.scale * LOG2E) - b_new_max[:, None])
    return b_weights, b_rescale, b_new_max, b_row_sum * b_rescale + tl.sum(b_weights, 1)


@triton.jit
def _reciprocal_or_zero(b_sum):
    """Return 1 / b_sum, or 0 where b_sum is 0 because there was nothing to add."""
    return tl.where(b_sum > 0, 1.0 / tl.where(b_sum > 0, b_sum, 1.0), 0.0)


@triton.jit
def _log_sum_exp(b_row_max, b_row_sum):
    """Return the log-normalizer, in base 2, of a running softmax after the last tile; 0 for a row without keys."""
    return tl.where(b_row_sum > 0, b_row_max + tl.log2(tl.where(b_row_sum > 0, b_row_sum, 1.0)), 0.0)


@triton.jit
def _load_inverse_total(state, META: tl.constexpr):
    """Return two factors whose product is 1 / total: 1 / min total, and min total / total, (D,), which is at most 1.

    M, the part of the LLN matrix inside the blocks, is (A / total) W_bᵀ, where W_b has the rows of W that belong to the
    block. A is multiplied by the second factor, and the product by the first one, so that half precision can represent
    both operands at any N.
    """
    b_log_total = tl.load(state.log_total + tl.arange(0, META.dim))
    least = tl.min(b_log_total, 0)
    return tl.exp2(-least), tl.exp2(least - b_log_total)


@triton.jit
def _outside_mass(b_inside):
    """Return u = 1 - b_inside, clamped to [0, 1], which u can leave by rounding.

    b_inside is Σ_j M, the mass that LLN gives to the keys of the query's block.
    """
    return tl.minimum(tl.maximum(1.0 - b_inside, 0.0), 1.0)


@triton.jit
def _outside_weight(b_u, b_offset, b_num_keys, num_keys):
    """Return the weight c of the keys outside the block and its derivatives by u and by the offset, each (queries,).

    c is 1 for a block without keys, and 0 for a block with all keys of its sequence. Both derivatives are 0 for these
    two kinds of blocks, and where the divisor of c is limited to FLOOR.

    Args:
        b_u: (queries,) mass u that LLN gives to the keys outside the block.
        b_offset: offset o of the head.
        b_num_keys: (queries,) number of keys of the query's block.
        num_keys: number of keys of the sequence that are not padding.
    """
    b_e = tl.exp2(b_offset * -LOG2E)
    b_divisor = b_u + (1.0 - b_u) * b_e
    b_c = 1.0 / tl.maximum(b_divisor, FLOOR)
    b_dc_du = tl.where(b_divisor > FLOOR, -b_c * b_c * (1.0 - b_e), 0.0)
    b_dc_doffset = tl.where(b_divisor > FLOOR, b_c * (1.0 - b_c * b_u), 0.0)
    no_keys = b_num_keys == 0
    constant = no_keys | (b_num_keys == num_keys)
    b_c = tl.where(no_keys, 1.0, tl.where(constant, 0.0, b_c))
    return b_c, tl.where(constant, 0.0, b_dc_du), tl.where(constant, 0.0, b_dc_doffset)
