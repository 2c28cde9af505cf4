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

With m global tokens, the first m tokens of the sequence are keys of every block: wherever the block's keys are meant
above, they are the block's own tokens and the first min(m, s) tokens, where s is the first token of the block. No key
counts twice. Global queries are not part of this form: they attend to all keys by softmax (ops/global_tokens.py).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lln_fairseq.ops.padding import explicit_mask

FLOOR = 2.0**-4  # the minimum of the divisor; csrc/joint.h and the Triton kernels have the same


class BlockKinds(NamedTuple):
    """Marks the blocks whose c is set exactly: two bool tensors that broadcast to u, never both True."""

    all_keys: Tensor  # True for a block that holds all real keys of its sequence, at least one
    no_key: Tensor  # True for a block without a real key


def classify_blocks(padding: Tensor, global_padding: Tensor | None = None) -> BlockKinds:
    """Return the kinds of blocks, bool (..., blocks), from the padding of their keys.

    padding is bool (..., blocks, tokens of a block), True = padded. global_padding is the result of
    `global_key_padding`, (..., blocks, E), or None if there are no global tokens.
    """
    real = (~padding).sum(dim=-1)
    all_real = real.sum(dim=-1, keepdim=True)
    if global_padding is not None:
        real = real + (~global_padding).sum(dim=-1)
    no_key = real == 0
    return BlockKinds((real == all_real) & ~no_key, no_key)


def count_global_keys(max_global_tokens: int, length: int, block_size: int) -> int:
    """Return E, the number of tokens at the start of a sequence that are global keys of at least one block.

    These are the global tokens before the last block. The block size is at most the length.
    """
    if length == 0:
        return 0
    last_block = (length - 1) // block_size * block_size
    return min(max_global_tokens, last_block)


def global_key_padding(global_tokens: Tensor, mask: Tensor | None, q: Tensor, block_size: int, num_keys: int) -> Tensor:
    """Return which of the first E tokens are no global key of a block, bool (B, blocks, E).

    True marks a padded token, one that is not global, and one that does not lie before the block.

    Args:
        global_tokens: the number of global tokens of every sequence, (B,).
        mask: bool (B, N), True = padded, or None.
        q: (B, H, N, D); only its shape and device matter.
        block_size: tokens of a block, at most N.
        num_keys: E, the result of `count_global_keys`.
    """
    length = q.shape[2]
    token = torch.arange(num_keys, device=q.device)
    block_start = torch.arange(0, length, block_size, device=q.device)
    is_local = token >= global_tokens[:, None]
    excluded = explicit_mask(mask, q)[:, :num_keys] | is_local
    return excluded[:, None] | (token >= block_start[:, None])


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
