"""Linear attention with the features x²: the linear counterpart of `quadratic` in Figure 2 of arXiv 2311.13541."""

from dataclasses import dataclass

import torch

from lln_fairseq.attention.linear_relu import FeatureAttention
from lln_fairseq.attention.registry import register_attention


@dataclass
class LinearQuadraticConfig:
    """No options."""


@register_attention("linear_quadratic", LinearQuadraticConfig)
class LinearQuadraticAttention(FeatureAttention):
    """φ(x) = x², feature by feature (the exact features of κ(s) = s² would be all D² products)."""

    features = staticmethod(torch.square)
