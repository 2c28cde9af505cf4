"""Longformer: a sliding window of softmax attention and one global token (Beltagy et al. 2020, arXiv 2004.05150)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lln_fairseq.attention.context import NO_CONTEXT, Context
from lln_fairseq.attention.registry import Attention, option, register_attention
from lln_fairseq.ops.formula import clear_padding, explicit_mask, softmax_attention


@dataclass
class LongformerConfig:
    one_sided_window: int = option(256, "tokens attended on each side; half of the paper's window of 512", at_least=1)


@register_attention("longformer", LongformerConfig)
class LongformerAttention(Attention):
    """Softmax over the keys at most w = `one_sided_window` tokens away, and over the first token of the sequence.

    The first token that is not padding attends to all tokens, and all tokens attend to it. It is <s>, whose output is
    used for classification. The result is exact and costs O(N w): each block of w queries is multiplied by its own
    block of keys, by both neighboring blocks and by the first token. Keys outside the window are masked. The first
    token is also masked within the window, since it would otherwise count twice.

    In the paper, global attention has its own projections. Here global and local attention share the projections of the
    caller. The paper's training starts with shared projections, too.
    """

    config: LongformerConfig

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        q, k, v = clear_padding(q, k, v, context.padding)
        length = q.shape[2]
        padding = explicit_mask(context.padding, q)
        first = (~padding).to(torch.uint8).argmax(dim=1)  # (B,): first real token, 0 if there is none
        is_first = torch.arange(length, device=q.device) == first[:, None]
        # In a sequence that is all padding the first token remains a key. The softmax would otherwise be 0/0.
        excluded = padding & ~is_first
        if length <= 3 * self.config.one_sided_window + 1:
            # The windows would contain as many keys as there are tokens, so full attention with a mask is cheaper.
            allowed = self._is_attended(is_first) & ~excluded[:, None, :]
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed[:, None], dropout_p=self.active_dropout)
        else:
            index = first[:, None, None, None].expand(-1, self.num_heads, 1, self.head_dim)
            local = self._local_attention(q, k, v, k.gather(2, index), v.gather(2, index), excluded | is_first)
            from_first = softmax_attention(q.gather(2, index), k, v, context.padding, self.active_dropout)
            out = torch.where(is_first[:, None, :, None], from_first, local)
        return out.masked_fill(padding.all(dim=1)[:, None, None, None], 0.0)

    def _is_attended(self, is_first: Tensor) -> Tensor:
        """Return bool (B, N, N), True where a query (row) attends to a key. Padding is not taken into account."""
        index = torch.arange(is_first.shape[1], device=is_first.device)
        in_window = (index[:, None] - index).abs() <= self.config.one_sided_window
        return in_window | is_first[:, :, None] | is_first[:, None, :]

    def _local_attention(
        self, q: Tensor, k: Tensor, v: Tensor, k_first: Tensor, v_first: Tensor, excluded: Tensor
    ) -> Tensor:
        """Compute the attention of every query to its window and to the first token, (B, H, N, D).

        The first token itself attends only to its window here, so the caller replaces its output. `k_first` and
        `v_first` are (B, H, 1, D). `excluded` (B, N) is True for keys that no window contains: padding and the first
        token.
        """
        batch, heads, length, dim = q.shape
        width = self.config.one_sided_window
        num_blocks = -(-length // width)
        tail = num_blocks * width - length

        def windows(x: Tensor, x_first: Tensor) -> Tensor:
            """Return the keys or values of every block, (B · blocks, H, 3 w + 1, D). The first token's comes last."""
            x = F.pad(x, (0, 0, width, width + tail)).transpose(1, 2).unflatten(1, (num_blocks + 2, width))
            near = torch.cat([x[:, i : num_blocks + i] for i in range(3)], dim=2)
            x_first = x_first.transpose(1, 2)[:, None].expand(-1, num_blocks, -1, -1, -1)
            return torch.cat([near, x_first], dim=2).flatten(0, 1).transpose(1, 2)

        # Each block of queries becomes an entry of the batch.
        queries = F.pad(q, (0, 0, 0, tail)).transpose(1, 2).unflatten(1, (num_blocks, width))
        queries = queries.flatten(0, 1).transpose(1, 2)
        offset = torch.arange(3 * width, device=q.device) - torch.arange(width, device=q.device)[:, None]
        band = (offset >= 0) & (offset <= 2 * width)
        near = F.pad(~excluded, (width, width + tail)).unfold(1, 3 * width, width)  # (B, blocks, 3 w)
        allowed = F.pad(near[:, :, None, :] & band, (0, 1), value=True)
        out = F.scaled_dot_product_attention(
            queries,
            windows(k, k_first),
            windows(v, v_first),
            attn_mask=allowed.flatten(0, 1)[:, None],
            dropout_p=self.active_dropout,
        )
        return out.transpose(1, 2).reshape(batch, num_blocks * width, heads, dim)[:, :length].transpose(1, 2)
