"""The joint form of LLN+Diag: softmax's shape inside a query's block, LLN outside it, in rows that sum to 1.

With P = A Wᵀ the LLN matrix, D the softmax inside the blocks, u_i = 1 - Σ_{j in block(i)} P_ij the mass that LLN gives
to the keys outside the block of query i, and O_i = Σ_{j outside} P_ij v_j:

    out_i = (1 - c_i u_i) (D v)_i + c_i O_i

where a query multiplies what is outside by the weight c = 1 / max(u + (1 - u) e^-o, 1/16): the odds of the outside are
e^o times LLN's, and the offset o = 0 leaves LLN's own.

The floor gives less to what is nearly nothing. Without it the first token beyond a block would get half of all
attention, and rounding would decide over it: u and O come out as the whole less the block, with an error of 1e-7 in
float32 and 1e-3 in float16, which c multiplies. An offset up to log 16 = 2.77 never meets it.
Nothing is left to rounding where a block has all real keys of its sequence: there c = 0, which is softmax exactly. One
without a real key leaves everything to LLN, c u = 1.
"""

from typing import NamedTuple

import torch
from torch import Tensor

FLOOR = 2.0**-4  # csrc/joint.h and the Triton kernels have the same


class Blocks(NamedTuple):
    """Which blocks hold all real keys of their sequence, and which of the others none: bool, broadcast to u."""

    all: Tensor
    none: Tensor


def count_blocks(padding: Tensor) -> Blocks:
    """From the padding of keys by block, bool (..., blocks, tokens of a block); the results are (..., blocks)."""
    real = (~padding).sum(dim=-1)
    none = real == 0
    return Blocks((real == real.sum(dim=-1, keepdim=True)) & ~none, none)


def outside_mass(inside: Tensor) -> Tensor:
    """u (..., 1) from the block's part of P (..., queries, keys); rounding must not leave [0, 1]."""
    return (1 - inside.sum(dim=-1, keepdim=True)).clamp(0, 1)


def outside_weight(u: Tensor, offset: Tensor, blocks: Blocks) -> Tensor:
    """Return c of the formula above for u, and o and blocks that broadcast to it; differentiable."""
    c = 1 / _divisor(u, offset).clamp_min(FLOOR)
    return torch.where(blocks.none, 1.0, c).masked_fill(blocks.all, 0.0)


def outside_slopes(c: Tensor, u: Tensor, offset: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Return dc/du and dc/do, which are 0 at the floor and in blocks with all keys or none."""
    constant = blocks.all | blocks.none | (_divisor(u, offset) <= FLOOR)
    by_u = -c.square() * (1 - (-offset).exp())
    by_offset = c * (1 - c * u)
    return by_u.masked_fill(constant, 0.0), by_offset.masked_fill(constant, 0.0)


def _divisor(u: Tensor, offset: Tensor) -> Tensor:
    """Return the divisor of the formula above, not yet clamped."""
    return u + (1 - u) * (-offset).exp()
