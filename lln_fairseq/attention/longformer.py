"""Longformer: a sliding window of softmax attention and one global token (Beltagy et al. 2020, arXiv 2004.05150)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lln_fairseq.attention.registry import Attention, option, register_attention
from lln_fairseq.ops import reference
from lln_fairseq.ops.padding import clear_padding, explicit_mask
from lln_fairseq.ops.softmax import softmax_attention


@dataclass
class LongformerConfig:
    one_sided_window: int = option(256, "tokens attended on each side; half of the paper's window of 512", at_least=1)


@register_attention("longformer", LongformerConfig)
class LongformerAttention(Attention):
    """Softmax over the keys at most `one_sided_window` w tokens away and the first real token, which attends to all.

    Exact in O(N w): blocks of w queries meet their own block of keys and both neighbours, the keys outside the window
    masked, and besides the first token, which is therefore left out of the windows. The first token is <s>, the one
    that classifies. The paper gives global attention projections of its own; projections are the caller's, so here
    both kinds share them, as where the paper's training starts.
    """

    config: LongformerConfig

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        q, k, v = clear_padding(q, k, v, key_padding_mask)
        length = q.shape[2]
        padding = explicit_mask(key_padding_mask, q)
        first = (~padding).to(torch.uint8).argmax(dim=1)  # (B,): 0 where all is padding
        is_first = torch.arange(length, device=q.device) == first[:, None]
        # The first token stays usable where all is padding: the softmax would otherwise be 0/0.
        usable = ~padding | is_first
        if length <= 3 * self.config.one_sided_window + 1:  # all keys are no more than the windows would hold
            allowed = self._pairs(is_first) & usable[:, None, :]
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed[:, None], dropout_p=self.active_dropout)
        else:
            rows = first[:, None, None, None].expand(-1, self.num_heads, 1, self.head_dim)
            local = self._local(q, k, v, k.gather(2, rows), v.gather(2, rows), usable & ~is_first)
            from_first = softmax_attention(q.gather(2, rows), k, v, key_padding_mask, self.active_dropout)
            out = torch.where(is_first[:, None, :, None], from_first, local)
        return out.masked_fill(padding.all(dim=1)[:, None, None, None], 0.0)

    def _pairs(self, is_first: Tensor) -> Tensor:
        """(B, N, N): in the window, or with the first token."""
        index = torch.arange(is_first.shape[1], device=is_first.device)
        near = (index[:, None] - index).abs() <= self.config.one_sided_window
        return near | is_first[:, :, None] | is_first[:, None, :]

    def _local(self, q: Tensor, k: Tensor, v: Tensor, k_first: Tensor, v_first: Tensor, usable: Tensor) -> Tensor:
        """Every query over the usable keys (B, N) of its window and the first token; blocks lie in the batch."""
        batch, heads, length, dim = q.shape
        width = self.config.one_sided_window
        blocks = -(-length // width)
        tail = blocks * width - length

        def windows(x: Tensor, x_first: Tensor) -> Tensor:
            """(B, H, N, D), (B, H, 1, D) -> (B · blocks, H, 3 w + 1, D)"""
            x = F.pad(x, (0, 0, width, width + tail)).transpose(1, 2).unflatten(1, (blocks + 2, width))
            near = torch.cat([x[:, i : blocks + i] for i in range(3)], dim=2)
            x_first = x_first.transpose(1, 2)[:, None].expand(-1, blocks, -1, -1, -1)
            return torch.cat([near, x_first], dim=2).flatten(0, 1).transpose(1, 2)

        queries = F.pad(q, (0, 0, 0, tail)).transpose(1, 2).unflatten(1, (blocks, width)).flatten(0, 1).transpose(1, 2)
        offset = torch.arange(3 * width, device=q.device) - torch.arange(width, device=q.device)[:, None]
        band = (offset >= 0) & (offset <= 2 * width)
        near = F.pad(usable, (width, width + tail)).unfold(1, 3 * width, width)  # (B, blocks, 3 w)
        allowed = F.pad(near[:, :, None, :] & band, (0, 1), value=True)
        out = F.scaled_dot_product_attention(
            queries,
            windows(k, k_first),
            windows(v, v_first),
            attn_mask=allowed.flatten(0, 1)[:, None],
            dropout_p=self.active_dropout,
        )
        return out.transpose(1, 2).reshape(batch, blocks * width, heads, dim)[:, :length].transpose(1, 2)

    def attention_matrix(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        real = ~explicit_mask(key_padding_mask, q)
        is_first = real & (real.cumsum(dim=1) == 1)
        return reference.softmax_matrix(q, k, key_padding_mask, self._pairs(is_first)[:, None])
