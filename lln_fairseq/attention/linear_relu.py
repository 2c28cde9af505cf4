"""Linear attention with the features ReLU(x): the linear counterpart of `relu` in Figure 2 of arXiv 2311.13541."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lln_fairseq.attention.registry import Attention, register_attention
from lln_fairseq.ops import reference
from lln_fairseq.ops.linear_attention import linear_attention


@dataclass
class LinearReluConfig:
    """No options."""


class FeatureAttention(Attention):
    """P_ij = φ(q_i)·φ(k_j) / Σ_l φ(q_i)·φ(k_l), one elementwise φ for queries and keys, in linear time.

    It has no attention matrix, so attention dropout does not apply. φ here is homogeneous, so that P depends neither on
    the scale of q and k nor on a temperature. A query that has no feature in common with any key gives 0.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        return linear_attention(*self.feature_maps(q, k), v, key_padding_mask)

    def attention_matrix(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        return reference.kernel_matrix(*self.feature_maps(q, k), key_padding_mask)

    def feature_maps(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """φ(q), φ(k) (B, H, N, D) in float32 or float64."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        return self.features(q.to(dtype)), self.features(k.to(dtype))

    @staticmethod
    def features(x: Tensor) -> Tensor:
        """φ, elementwise and non-negative."""
        raise NotImplementedError


@register_attention("linear_relu", LinearReluConfig)
class LinearReluAttention(FeatureAttention):
    """φ(x) = max(x, 0)."""

    features = staticmethod(torch.relu)
