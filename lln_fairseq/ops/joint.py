"""The joint form of LLN+Diag: softmax inside the query's block and LLN outside it, in rows that sum to 1.

Let P = A Wᵀ be the LLN matrix (ops/lln.py) and Diag the matrix of the softmax inside the blocks. For query i, LLN gives
the mass u_i = 1 - Σ_{j in block(i)} P_ij to the keys outside the query's block. These keys contribute
O_i = Σ_{j outside} P_ij v_j to the LLN output. The joint form is

    out_i = (1 - c_i u_i) (Diag v)_i + c_i O_i        c = 1 / max(u + (1 - u) e^-o, 1/16)

The weight c multiplies everything outside the block. The offset o of a head shifts the log-odds of attending outside
the block: the odds are e^o times the odds of LLN.

The minimum of 1/16 in the divisor limits the mass outside the block to 16 u. Without this limit, a large o could give
half of all attention to the first token after a block, and rounding would decide how much: u and O are computed as a
total minus the block's part, with an error of 1e-7 in float32 and 1e-3 in float16, and c multiplies this error. Offsets
up to log 16 = 2.77 never reach the minimum.

For two kinds of blocks, c is set exactly, so that rounding has no influence. If all keys of the sequence that are not
padding lie in the block, c = 0, which is softmax attention. If all keys of the block are padding, c = 1, which is LLN
attention.

With m global tokens, the first m tokens of the sequence are keys of every block. In the definitions above, "the block"
then stands for the block's own tokens and the first min(m, s) tokens of the sequence, where s is the position of the
block's first token. So no key counts twice. The rows of global queries are not part of this form: global queries attend
to all keys by softmax (softmax.py).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lln_fairseq.ops.padding import explicit_mask

FLOOR = 2.0**-4  # the minimum of the divisor; csrc/joint.h and the Triton kernels have the same


class BlockKinds(NamedTuple):
    """Marks the blocks whose weight c is set exactly. Both tensors are bool and broadcast to u, and never both True."""

    all_keys: Tensor  # True for a block with all keys of its sequence that are not padding, and at least one such key
    no_key: Tensor  # True for a block whose keys are all padding


def classify_blocks(padding: Tensor, global_padding: Tensor | None = None) -> BlockKinds:
    """Return the kind of every block from the padding of its keys.

    Args:
        padding: bool (..., blocks, tokens of a block), True = padded.
        global_padding: the result of `global_key_padding`, bool (..., blocks, E), or None without global tokens.

    Returns: two tensors, bool (..., blocks).
    """
    real = (~padding).sum(dim=-1)
    all_real = real.sum(dim=-1, keepdim=True)
    if global_padding is not None:
        real = real + (~global_padding).sum(dim=-1)
    no_key = real == 0
    return BlockKinds((real == all_real) & ~no_key, no_key)


def count_global_keys(max_global: int, length: int, block_size: int) -> int:
    """Return E, the number of tokens at the start of a sequence that are global keys of at least one block.

    These are the global tokens before the last block.

    Args:
        max_global: an upper bound of the global tokens of a sequence.
        length: N, the number of tokens.
        block_size: tokens of a block, at most N.
    """
    if length == 0:
        return 0
    last_block = (length - 1) // block_size * block_size
    return min(max_global, last_block)


def global_key_padding(
    global_counts: Tensor, padding: Tensor | None, q: Tensor, block_size: int, num_keys: int
) -> Tensor:
    """Return, for every block, which of the first E tokens of the sequence are not global keys of that block.

    Args:
        global_counts: the number of global tokens of every sequence, (B,).
        padding: bool (B, N), True = padded, or None.
        q: (B, H, N, D); only its shape and device matter.
        block_size: tokens of a block, at most N.
        num_keys: E, the result of `count_global_keys`.

    Returns: bool (B, blocks, E). True marks a token that is padding, is not global, or does not lie before the block.
    """
    length = q.shape[2]
    token = torch.arange(num_keys, device=q.device)
    block_start = torch.arange(0, length, block_size, device=q.device)
    is_local = token >= global_counts[:, None]
    excluded = explicit_mask(padding, q)[:, :num_keys] | is_local
    return excluded[:, None] | (token >= block_start[:, None])


def outside_mass(inside: Tensor) -> Tensor:
    """Return u, the mass that LLN gives to the keys outside the block, clamped to [0, 1].

    Args:
        inside: the part of P inside the block, (..., queries, keys).

    Returns: (..., queries, 1).
    """
    return (1 - inside.sum(dim=-1, keepdim=True)).clamp(0, 1)


def outside_weight(u: Tensor, offset: Tensor, kinds: BlockKinds) -> Tensor:
    """Return the weight c of the keys outside the block, in the shape of u. It is differentiable.

    Args:
        u: the mass that LLN gives to the keys outside the block.
        offset: o, broadcasts to u.
        kinds: tensors that broadcast to u. c is 0 where all_keys is True, and 1 where no_key is True. In all other
            blocks c is at most 1/FLOOR = 16.
    """
    c = 1 / _divisor(u, offset).clamp_min(FLOOR)
    return torch.where(kinds.no_key, 1.0, c).masked_fill(kinds.all_keys, 0.0)


def outside_weight_gradients(c: Tensor, u: Tensor, offset: Tensor, kinds: BlockKinds) -> tuple[Tensor, Tensor]:
    """Return the derivatives of c = outside_weight(u, offset, kinds) by u and by the offset, both in the shape of u.

    Both are 0 where c is constant: where the divisor of c is at most FLOOR, and where one of the kinds is True.
    """
    is_constant = kinds.all_keys | kinds.no_key | (_divisor(u, offset) <= FLOOR)
    by_u = -c.square() * (1 - (-offset).exp())
    by_offset = c * (1 - c * u)
    return by_u.masked_fill(is_constant, 0.0), by_offset.masked_fill(is_constant, 0.0)


def _divisor(u: Tensor, offset: Tensor) -> Tensor:
    """Return u + (1 - u) e^-o, the divisor of c before it is limited to at least FLOOR."""
    return u + (1 - u) * (-offset).exp()
