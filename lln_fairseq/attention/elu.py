"""Linear attention with the features elu(x) + 1 (Katharopoulos et al. 2020, arXiv 2006.16236)."""

from torch import Tensor

from lln_fairseq.attention.kernel_features import KernelFeatureAttention
from lln_fairseq.attention.registry import register_attention


@register_attention("elu")
class EluAttention(KernelFeatureAttention):
    """φ(x) = elu(x) + 1."""

    @staticmethod
    def features(x: Tensor) -> Tensor:
        # elu(x) + 1 = e^x for x < 0: written so, small values keep their digits instead of rounding to 0.
        return x.relu() + x.clamp(max=0).exp()
