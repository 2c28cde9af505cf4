"""fairseq's multi-head self-attention with a pluggable attention mechanism."""

from collections.abc import Sequence
from typing import Any

import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from lln_fairseq.attention import build_attention
from lln_fairseq.models.packed_linear import PackedWeights
from lln_fairseq.ops.dtypes import compute_dtype
from lln_fairseq.ops.rotary import rotary_factors, rotate


class LLNMultiheadAttention(MultiheadAttention):
    """Self-attention with fairseq's projections and parameter names, so that stock checkpoints load in both directions.

    It is a subclass because fairseq recognizes its own class when it initializes and prunes parameters. Raises
    ValueError if num_heads does not divide embed_dim, if the attention cannot be built, or if heads with an odd number
    of features are to be rotated.

    Args:
        embed_dim: number of features C of a token.
        num_heads: number of heads H, a divisor of embed_dim.
        attention: the registered name of the attention.
        options: the options of the attention.
        max_positions: number of tokens of the longest sequence.
        dropout: probability of dropping an attention weight during training.
        q_noise, qn_block_size: fairseq's quantization noise of the projections.
        rotary: apply the rotary position embedding to queries and keys, before the attention.

    Attributes:
        positions: the positions (B, T) of the tokens in the next forward passes, for a shard of longer sequences. None
            counts the tokens of a sequence that are not padded, from 0.
        packed_projections: computes q, k and v as one product, for inference on a CPU; None until
            `packing.pack_linear_layers` sets it.
    """

    positions: Tensor | None = None
    packed_projections: PackedWeights | None = None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        attention: str,
        options: dict[str, Any],
        max_positions: int,
        dropout: float = 0.0,
        q_noise: float = 0.0,
        qn_block_size: int = 8,
        rotary: bool = False,
    ) -> None:
        if embed_dim % num_heads:
            raise ValueError(f"embedding dimension {embed_dim} is not divisible by {num_heads} attention heads")
        head_dim = embed_dim // num_heads
        if rotary and head_dim % 2:
            raise ValueError(f"rotary positions need heads with an even number of features, got {head_dim}")
        super().__init__(
            embed_dim, num_heads, dropout=dropout, self_attention=True, q_noise=q_noise, qn_block_size=qn_block_size
        )
        self.rotary = rotary
        self.attention = build_attention(
            attention,
            num_heads=num_heads,
            head_dim=head_dim,
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
        """Compute self-attention.

        Args:
            query: (T, B, C).
            key, value: ignored, since queries, keys and values are projections of the same tokens.
            key_padding_mask: (B, T), True or nonzero = padded, or None.
            need_weights, attn_mask: must be False and None, otherwise ValueError is raised.

        Returns:
            The output (T, B, C), and None in place of attention weights.
        """
        if need_weights or attn_mask is not None:
            raise ValueError("the attention of an encoder takes no attn_mask and returns no attention weights")
        mask = None
        if key_padding_mask is not None:
            mask = key_padding_mask.bool()
        q, k, v = (self._split_heads(x) for x in self._project(query))
        if self.rotary:
            factors = self._rotary_factors(query, mask)
            q = rotate(q, factors)
            k = rotate(k, factors)
        out = self.attention(self._heads_first(q), self._heads_first(k), self._heads_first(v), mask)
        # (B, H, T, D) -> (T, B, H · D). Nothing is copied if the mechanism preserves the memory layout of q.
        out = out.permute(2, 0, 1, 3).flatten(2)
        return self.out_proj(out), None

    @property
    def projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        """Return the layers that compute q, k and v."""
        return (self.q_proj, self.k_proj, self.v_proj)

    def train(self, mode: bool = True) -> "LLNMultiheadAttention":
        """Set training or evaluation mode, and drop the packed copy, since an optimizer may change the weights."""
        if self.packed_projections is not None:
            self.packed_projections.forget()
        super().train(mode)
        return self

    def _project(self, query: Tensor) -> Sequence[Tensor]:
        """Return the projections (T, B, C) of query (T, B, C) to queries, keys and values."""
        packed = self.packed_projections
        if packed is not None and packed.can_multiply(query):
            return packed.multiply(query).chunk(3, dim=-1)
        return [projection(query) for projection in self.projections]

    def _split_heads(self, x: Tensor) -> Tensor:
        """Split the features of (T, B, H · D) into heads, (T, B, H, D)."""
        return x.unflatten(-1, (self.num_heads, self.head_dim))

    def _rotary_factors(self, query: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the factors that rotate the heads (T, B, H, D) of tokens (T, B, C) with the padding mask (B, T)."""
        if self.positions is not None:
            positions = self.positions
        elif mask is not None:
            positions = (~mask).cumsum(dim=1) - 1
        else:
            positions = torch.arange(len(query), device=query.device)[None]
        return rotary_factors(positions.T[:, :, None], self.head_dim, compute_dtype(query.dtype))

    def _heads_first(self, x: Tensor) -> Tensor:
        """Move the heads of (T, B, H, D) to the front, (B, H, T, D): contiguous in training on a CPU, otherwise a view.

        Where q, k and v are also read in a backward pass on a CPU, one copy is cheaper than many strided reads.
        """
        heads = x.permute(1, 2, 0, 3)
        if heads.is_cuda or not torch.is_grad_enabled():
            return heads
        return heads.contiguous()
