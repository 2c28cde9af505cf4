"""Define a plain PyTorch form of softmax over the own and both neighboring blocks, to be measured before it is built.

scripts.research.decay registers it as the attention `window` while it runs. The package does not have it.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lln_fairseq.attention.context import NO_CONTEXT, Context
from lln_fairseq.attention.registry import Attention, option
from lln_fairseq.ops.formula import clear_padding

WINDOW = "window"


@dataclass
class WindowConfig:
    block_size: int = option(32, "tokens in a block", at_least=1)


class WindowAttention(Attention):
    """Softmax attention over the keys of the own block and of the blocks before and after it.

    The cost is linear in N. The output is 0 if all keys of a query are padding.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        q, k, v = clear_padding(q, k, v, context.padding)
        batch, _, length, dim = q.shape
        size = self.config.block_size
        missing = -length % size  # tokens that the last block lacks
        queries = F.pad(q, (0, 0, 0, missing)).unflatten(2, (-1, size))  # (B, H, blocks, size, D)
        real = q.new_ones(batch, length, dtype=torch.bool) if context.padding is None else ~context.padding
        real_keys = F.pad(real, (size, size + missing)).unfold(1, 3 * size, size)  # (B, blocks, 3 size)
        logits = queries @ self._neighborhoods(k).mT / math.sqrt(dim)
        logits = logits.masked_fill(~real_keys[:, None, :, None], torch.finfo(q.dtype).min)
        weights = F.dropout(logits.softmax(dim=-1), self.active_dropout)
        has_key = real_keys.any(dim=-1)[:, None, :, None, None]
        out = (weights @ self._neighborhoods(v)).masked_fill(~has_key, 0.0)
        return out.flatten(2, 3)[:, :, :length]

    def _neighborhoods(self, x: Tensor) -> Tensor:
        """Return the tokens of each block and its neighbors, (B, H, blocks, 3 size, D), with 0 beyond the ends."""
        size = self.config.block_size
        missing = -x.shape[2] % size
        return F.pad(x, (0, 0, size, size + missing)).unfold(2, 3 * size, size).mT
