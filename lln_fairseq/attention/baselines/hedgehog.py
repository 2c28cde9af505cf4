"""Hedgehog: linear attention with a learned feature map that can be as concentrated as softmax (arXiv 2402.04347)."""

import torch
from torch import Tensor, nn

from lln_fairseq.attention.baselines.learned_features import LearnedFeatureAttention, LearnedFeatureConfig
from lln_fairseq.attention.registry import register_attention


@register_attention("hedgehog", LearnedFeatureConfig)
class HedgehogAttention(LearnedFeatureAttention):
    """Linear attention with φ(x) = [softmax(W x), softmax(-W x)], with a matrix W for every head.

    Queries and keys share W, which starts as the identity. The softmax is over the features of a token.
    """

    def __init__(
        self, config: LearnedFeatureConfig, num_heads: int, head_dim: int, max_positions: int, dropout: float
    ) -> None:
        super().__init__(config, num_heads, head_dim, max_positions, dropout)
        self.weight = nn.Parameter(torch.eye(head_dim).repeat(num_heads, 1, 1))  # (H, D, D)

    def features(self, x: Tensor) -> Tensor:
        projected = x @ self.weight.to(x.dtype).mT
        return torch.cat([projected.softmax(dim=-1), (-projected).softmax(dim=-1)], dim=-1)
