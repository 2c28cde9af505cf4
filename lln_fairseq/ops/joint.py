"""The joint form of LLN+Diag: softmax inside the query's block and LLN outside it, in rows that sum to 1.

Let P = A Wᵀ be the LLN matrix, D the matrix of softmax inside the blocks, u_i = 1 - Σ_{j in block(i)} P_ij the mass
that LLN gives to the keys outside the block of query i, and O_i = Σ_{j outside} P_ij v_j. Then

    out_i = (1 - c_i u_i) (D v)_i + c_i O_i        c = 1 / max(u + (1 - u) e^-o, 1/16)

The weight c multiplies everything outside the block. The offset o of a head shifts the log-odds of attending outside
the block: its odds are e^o times those of LLN.

The minimum of 1/16 limits the outside to 16 u. Without it, a large o could give half of all attention to the first
token after a block, and rounding would decide how much: u and O are computed as a total minus the block, with an error
of 1e-7 in float32 and 1e-3 in float16, which c multiplies. An offset of up to log 16 = 2.77 never reaches the minimum.

Two kinds of blocks are set exactly, without rounding. If a block has all real keys of its sequence, c = 0, which is
softmax attention. If it has no real key, c = 1, which is LLN attention.
"""

from typing import NamedTuple

import torch
from torch import Tensor

FLOOR = 2.0**-4  # the minimum of the divisor; csrc/joint.h and the Triton kernels have the same


class BlockKinds(NamedTuple):
    """Marks the blocks whose c is set exactly: two bool tensors that broadcast to u, never both True."""

    all_keys: Tensor  # True for a block that holds all real keys of its sequence, at least one
    no_key: Tensor  # True for a block without a real key


def classify_blocks(padding: Tensor) -> BlockKinds:
    """Return the kinds of blocks, bool (..., blocks), from the padding of their keys.

    padding is bool (..., blocks, tokens of a block), True = padded.
    """
    real = (~padding).sum(dim=-1)
    no_key = real == 0
    return BlockKinds((real == real.sum(dim=-1, keepdim=True)) & ~no_key, no_key)


def outside_mass(inside: Tensor) -> Tensor:
    """Return u (..., queries, 1), clamped to [0, 1], from the block's part of P, `inside` (..., queries, keys)."""
    return (1 - inside.sum(dim=-1, keepdim=True)).clamp(0, 1)


def outside_weight(u: Tensor, offset: Tensor, kinds: BlockKinds) -> Tensor:
    """Return the weight c, at most 1/FLOOR = 16, in the shape of u. It is differentiable.

    The offset o and the kinds must broadcast to u. c is 0 if a block has all real keys, and 1 if it has none.
    """
    c = 1 / _divisor(u, offset).clamp_min(FLOOR)
    return torch.where(kinds.no_key, 1.0, c).masked_fill(kinds.all_keys, 0.0)


def outside_weight_gradients(c: Tensor, u: Tensor, offset: Tensor, kinds: BlockKinds) -> tuple[Tensor, Tensor]:
    """Return dc/du and dc/do, in the shape of u, for c = outside_weight(u, offset, kinds).

    Both are 0 where c is constant: where the divisor is at most FLOOR, and in both kinds of blocks.
    """
    is_constant = kinds.all_keys | kinds.no_key | (_divisor(u, offset) <= FLOOR)
    by_u = -c.square() * (1 - (-offset).exp())
    by_offset = c * (1 - c * u)
    return by_u.masked_fill(is_constant, 0.0), by_offset.masked_fill(is_constant, 0.0)


def _divisor(u: Tensor, offset: Tensor) -> Tensor:
    """Return u + (1 - u) e^-o. c is 1 divided by this, or by FLOOR if that is larger."""
    return u + (1 - u) * (-offset).exp()
