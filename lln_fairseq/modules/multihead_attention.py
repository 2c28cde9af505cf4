"""fairseq's multi-head self-attention with the mechanism taken out and put in by name."""

from typing import Any

from fairseq.modules import MultiheadAttention
from torch import Tensor

from lln_fairseq.attention import build_attention


class LLNMultiheadAttention(MultiheadAttention):
    """Self-attention with fairseq's projections and parameter names, so that stock checkpoints load both ways.

    A subclass because fairseq recognises its own class when it initialises and prunes.
    """

    def __init__(self, embed_dim: int, num_heads: int, attention: str, options: dict[str, Any], max_positions: int,
                 dropout: float = 0.0, q_noise: float = 0.0, qn_block_size: int = 8) -> None:  # fmt: skip
        if embed_dim % num_heads:
            raise ValueError(f"embedding dimension {embed_dim} is not divisible by {num_heads} attention heads")
        super().__init__(
            embed_dim, num_heads, dropout=dropout, self_attention=True, q_noise=q_noise, qn_block_size=qn_block_size
        )
        self.attention = build_attention(
            attention,
            num_heads=num_heads,
            head_dim=embed_dim // num_heads,
            max_positions=max_positions,
            dropout=dropout,
            **options,
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """query (T, B, C), mask (B, T) with True = padded -> (T, B, C) and no weights.

        Raises: ValueError for a mask of pairs and for weights, which an encoder's self-attention never asks for.
        """
        if need_weights or attn_mask is not None:
            raise ValueError("an encoder's attention takes no attention mask and returns no weights")
        q, k, v = (self._split_heads(proj(query)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        mask = None if key_padding_mask is None else key_padding_mask.bool()
        out = self.attention(q, k, v, mask)
        # (B, H, T, D) -> (T, B, H · D); free when the mechanism keeps the memory layout of q
        out = out.permute(2, 0, 1, 3).flatten(2)
        return self.out_proj(out), None

    def _split_heads(self, x: Tensor) -> Tensor:
        """(T, B, H · D) -> (B, H, T, D): a view on a GPU; on a CPU one copy is cheaper than many strided reads"""
        heads = x.unflatten(-1, (self.num_heads, self.head_dim)).permute(1, 2, 0, 3)
        return heads if heads.is_cuda else heads.contiguous()
