"""T2R: linear attention with a learned projection and ReLU as its feature map (Kasai et al. 2021, arXiv 2103.13076)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lln_fairseq.attention.baselines.learned_features import LearnedFeatureAttention, LearnedFeatureConfig
from lln_fairseq.attention.registry import option, register_attention


@dataclass
class T2RConfig(LearnedFeatureConfig):
    num_features: int = option(32, "features of a head", at_least=1)


@register_attention("t2r", T2RConfig)
class T2RAttention(LearnedFeatureAttention):
    """Linear attention with φ(x) = relu(W x + b), with W and b for every head, shared by queries and keys."""

    config: T2RConfig

    def __init__(self, config: T2RConfig, num_heads: int, head_dim: int, max_positions: int, dropout: float) -> None:
        super().__init__(config, num_heads, head_dim, max_positions, dropout)
        bound = 1 / math.sqrt(head_dim)  # that of torch's nn.Linear
        self.weight = nn.Parameter(torch.empty(num_heads, config.num_features, head_dim).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(num_heads, 1, config.num_features).uniform_(-bound, bound))

    def features(self, x: Tensor) -> Tensor:
        return (x @ self.weight.to(x.dtype).mT + self.bias.to(x.dtype)).relu()
