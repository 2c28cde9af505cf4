"""Triton kernels of the first pass over the keys. device.py defines the state that they compute, and their notation.

_state_kernel            reads k and v, writes the state of each split of the tokens
_combine_state_kernel    merges the splits; launched only if there are several
"""

# ruff: noqa: ANN001, ANN202 - arguments of kernels have no Python types

import triton
import triton.language as tl

from lln_fairseq.ops.backends.triton.device import LOG2E, LOWEST, _dot, _load_head, _load_keys, _matrix_pointers


@triton.jit
def _finish_totals(b_maximum, b_total):
    """Return maximum, log total and 1 / total. They are 0, 0 and 1 if all keys are padding, so that the total is 0."""
    has_keys = b_total > 0
    b_total = tl.where(has_keys, b_total, 1.0)
    return tl.where(has_keys, b_maximum, 0.0), tl.log2(b_total), 1.0 / b_total


@triton.jit(do_not_specialize=["N", "T"])
def _state_kernel(
    k, v, padding, beta, maximum, log_total, S, s_b, s_h, s_n, H, N, T, FINAL: tl.constexpr, META: tl.constexpr
):
    """Compute the maximum, the total and Wᵀv over the tokens [i_s T, (i_s + 1) T) in one pass.

    The sums are rescaled whenever the running maximum grows. The grid is (B H, splits).

    Args:
        maximum, log_total: outputs, (B H, splits, D) float32. Without FINAL, log_total gets the total itself.
        S: output, (B H, splits, D, D). With FINAL it gets Wᵀv / total, otherwise Wᵀv.
        FINAL: True if there is a single split.
    """
    D: tl.constexpr = META.dim
    head = _load_head(None, k, v, None, padding, None, None, None, beta, None, s_b, s_h, s_n, 0, 0, 0, H, N)
    start = tl.program_id(1) * T
    end = tl.minimum(start + T, N)
    beta_2 = head.beta * LOG2E
    b_maximum = tl.full([D], LOWEST, tl.float32)
    b_total = tl.zeros([D], tl.float32)
    b_state = tl.zeros([D, D], tl.float32)
    for i_r in range(0, end - start, META.rows):
        _, real, b_k, b_v = _load_keys(head, start + i_r, end, META)
        # (rows, D)
        b_y = tl.where(real[:, None], beta_2 * b_k.to(tl.float32), float("-inf"))
        # (D,)
        b_new_maximum = tl.maximum(b_maximum, tl.max(b_y, 0))
        b_rescale = tl.exp2(b_maximum - b_new_maximum)
        b_maximum = b_new_maximum
        # (rows, D)
        b_w = tl.exp2(b_y - b_maximum[None, :])
        # (D,)
        b_total = b_total * b_rescale + tl.sum(b_w, 0)
        # (D, D)
        b_state = _dot(tl.trans(b_w.to(META.dot)), b_v.to(META.dot), acc=b_state * b_rescale[:, None])

    if FINAL:
        b_maximum, b_total, b_inverse_total = _finish_totals(b_maximum, b_total)
        b_state = b_state * b_inverse_total[:, None]
    i_out = head.i_bh * tl.num_programs(1) + tl.program_id(1)
    o_d = tl.arange(0, D)
    tl.store(maximum + i_out * D + o_d, b_maximum)
    tl.store(log_total + i_out * D + o_d, b_total)
    tl.store(_matrix_pointers(S + i_out * D * D, META), b_state.to(S.dtype.element_ty))


@triton.jit(do_not_specialize=["SPLITS"])
def _combine_state_kernel(
    part_maximum, part_total, part_S, maximum, log_total, S, SPLITS, D: tl.constexpr, COLS: tl.constexpr
):
    """Merge the splits of _state_kernel, 16 at a time, into maximum, log_total and S without the dimension of splits.

    With the index i of a split: maximum = max_i maximum_i, total = Σ_i total_i 2^(maximum_i - maximum), and
    S = Σ_i (Wᵀv)_i 2^(maximum_i - maximum) / total. The grid is (B H, D² / COLS): a program computes COLS consecutive
    elements of the flattened S. The program with the first element of a row of S also writes the row's element of the
    vectors.
    """
    i_bh = tl.program_id(0).to(tl.int64)
    o_c = tl.program_id(1) * COLS + tl.arange(0, COLS)
    p_vector = i_bh * SPLITS * D + (o_c // D)[None, :]
    p_matrix = part_S + i_bh * SPLITS * D * D + o_c[None, :]

    b_maximum = tl.full([COLS], LOWEST, tl.float32)
    for i_s in range(0, SPLITS, 16):
        o_s = (i_s + tl.arange(0, 16))[:, None]
        b_parts = tl.load(part_maximum + p_vector + o_s * D, mask=o_s < SPLITS, other=LOWEST)
        b_maximum = tl.maximum(b_maximum, tl.max(b_parts, 0))
    b_total = tl.zeros([COLS], tl.float32)
    b_state = tl.zeros([COLS], tl.float32)
    for i_s in range(0, SPLITS, 16):
        o_s = (i_s + tl.arange(0, 16))[:, None]
        # (16, COLS)
        b_parts = tl.load(part_maximum + p_vector + o_s * D, mask=o_s < SPLITS, other=LOWEST)
        b_rescale = tl.exp2(b_parts - b_maximum[None, :])
        # (COLS,)
        b_total += tl.sum(b_rescale * tl.load(part_total + p_vector + o_s * D, mask=o_s < SPLITS, other=0.0), 0)
        b_state += tl.sum(b_rescale * tl.load(p_matrix + o_s * D * D, mask=o_s < SPLITS, other=0.0), 0)

    b_maximum, b_log_total, b_inverse_total = _finish_totals(b_maximum, b_total)
    tl.store(S + i_bh * D * D + o_c, (b_state * b_inverse_total).to(S.dtype.element_ty))
    is_first = o_c % D == 0
    tl.store(maximum + i_bh * D + o_c // D, b_maximum, mask=is_first)
    tl.store(log_total + i_bh * D + o_c // D, b_log_total, mask=is_first)
