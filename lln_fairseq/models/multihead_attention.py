"""fairseq's multi-head self-attention with a pluggable attention mechanism."""

from typing import Any

import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from lln_fairseq.attention import Context, build_attention
from lln_fairseq.models.packed_linear.layer import PackedWeights
from lln_fairseq.ops.formula import compute_dtype
from lln_fairseq.ops.rotary import BASE, rotary_factors, rotate


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
        rotary_base: the base of its frequencies.

    Attributes:
        packed_projections: computes q, k and v as one product, for inference on a CPU; None until
            `pack.pack_linear_layers` sets it.
    """

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
        rotary_base: float = BASE,
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
        self.rotary_base = rotary_base
        self.attention = build_attention(
            attention,
            num_heads=num_heads,
            head_dim=head_dim,
            max_positions=max_positions,
            dropout=dropout,
            **options,
        )

    def forward(self, x: Tensor, context: Context) -> Tensor:
        packed = self.packed_projections
        if packed is not None and packed.can_multiply(x):
            q, k, v = packed.multiply(x).chunk(3, dim=-1)
        else:
            q = self.q_proj(x)
            k = self.k_proj(x)
            v = self.v_proj(x)
        heads = (self.num_heads, self.head_dim)
        q = q.unflatten(-1, heads)
        k = k.unflatten(-1, heads)
        v = v.unflatten(-1, heads)
        if self.rotary:
            factors = self._rotary_factors(x, context)
            q = rotate(q, factors)
            k = rotate(k, factors)
        # (T, B, H, D) -> (B, H, T, D)
        q = q.permute(1, 2, 0, 3)
        k = k.permute(1, 2, 0, 3)
        v = v.permute(1, 2, 0, 3)
        if torch.is_grad_enabled() and not x.is_cuda:
            # q, k and v are also read in a backward pass: on a CPU, one copy is cheaper than many strided reads.
            q = q.contiguous()
            k = k.contiguous()
            v = v.contiguous()
        out = self.attention(q, k, v, context)
        # (B, H, T, D) -> (T, B, H · D). Nothing is copied if the mechanism preserves the memory layout of q.
        return self.out_proj(out.permute(2, 0, 1, 3).flatten(2))

    @property
    def projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return (self.q_proj, self.k_proj, self.v_proj)

    def train(self, mode: bool = True) -> "LLNMultiheadAttention":
        """Set training or evaluation mode, and drop the packed copy, since an optimizer may change the weights."""
        if self.packed_projections is not None:
            self.packed_projections.forget()
        super().train(mode)
        return self

    def _rotary_factors(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Return the factors that rotate the heads (T, B, H, D) of tokens x (T, B, C)."""
        if context.padding is not None:
            positions = (~context.padding).cumsum(dim=1) - 1
        else:
            positions = torch.arange(len(x), device=x.device)[None]
        dtype = compute_dtype(x.dtype)
        return rotary_factors(positions.T[:, :, None], self.head_dim, dtype, self.rotary_base)
