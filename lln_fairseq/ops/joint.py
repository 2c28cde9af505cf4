"""The joint forms of LLN+Diag: softmax's shape inside a query's block, LLN outside it, in rows that sum to 1.

With P = A Wᵀ the LLN matrix, D the softmax inside the blocks, u_i = 1 - Σ_{j in block(i)} P_ij the mass that LLN gives
to the keys outside the block of query i, and O_i = Σ_{j outside} P_ij v_j:

    out_i = (1 - c_i u_i) (D v)_i + c_i O_i

where the form says by which weight c a query multiplies what is outside:

    offset: c = e^o / (1 - u + e^o u)    the odds of the outside are e^o times LLN's; o = 0 leaves LLN's own
    share:  c = (1 - g) / max(u, 1/16)    the outside gets 1 - g whatever its mass, less where that is nearly nothing

Without the floor the first token beyond a block would get half of all attention, and rounding would decide over what
is nearly nothing: u and O come out as the whole less the block, with an error of 1e-7 in float32 and 1e-3 in float16.
Nothing is left to rounding where a block has all real keys of its sequence: there c = 0, which is softmax exactly. One
without a real key leaves everything to LLN, c u = 1.
"""

from typing import NamedTuple

import torch
from torch import Tensor

FORMS = ("offset", "share")
SHARE_FLOOR = 2.0**-4  # csrc/joint.h and the Triton kernels have the same


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


def outside_weight(u: Tensor, form: str, parameter: Tensor, blocks: Blocks) -> Tensor:
    """c of the formulas above for u, o or g, and blocks that broadcast to it; differentiable."""
    offset = form == "offset"
    c = 1 / (u + (1 - u) * (-parameter).exp()) if offset else (1 - parameter) / u.clamp_min(SHARE_FLOOR)
    return torch.where(blocks.none, 1.0, c).masked_fill(blocks.all, 0.0)


def outside_slopes(c: Tensor, u: Tensor, form: str, parameter: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """dc/du and dc/do or dc/dg, 0 in blocks with all keys or none."""
    if form == "offset":
        slopes = -c.square() * (1 - (-parameter).exp()), c * (1 - c * u)
    else:
        floored = u.clamp_min(SHARE_FLOOR)
        slopes = torch.where(u > SHARE_FLOOR, -c / floored, 0.0), -1 / floored
    special = blocks.all | blocks.none
    return slopes[0].masked_fill(special, 0.0), slopes[1].masked_fill(special, 0.0)
