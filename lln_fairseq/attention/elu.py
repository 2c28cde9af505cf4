"""Linear attention with the features elu(x) + 1 (Katharopoulos et al. 2020, arXiv 2006.16236)."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from lln_fairseq.attention.registry import Attention, register_attention
from lln_fairseq.ops import reference
from lln_fairseq.ops.linear_attention import linear_attention


@dataclass
class EluConfig:
    """No options."""


@register_attention("elu", EluConfig)
class EluAttention(Attention):
    """φ(x) = elu(x) + 1. It has no attention matrix, so attention dropout does not apply."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        return linear_attention(self.features(q), self.features(k), v, key_padding_mask)

    def attention_matrix(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        return reference.kernel_matrix(self.features(q), self.features(k), key_padding_mask)

    def feature_maps(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.features(q), self.features(k)

    @staticmethod
    def features(x: Tensor) -> Tensor:
        # elu(x) + 1 = e^x for x < 0: written so, small values keep their digits instead of rounding to 0.
        return F.relu(x.float() if x.dtype.itemsize == 2 else x) + x.clamp(max=0).exp()
