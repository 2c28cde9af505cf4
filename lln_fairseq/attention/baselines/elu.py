"""Linear attention with the features elu(x) + 1 (Katharopoulos et al. 2020, arXiv 2006.16236)."""

from torch import Tensor

from lln_fairseq.attention.kernel_features import KernelFeatureAttention
from lln_fairseq.attention.registry import register_attention


@register_attention("elu")
class EluAttention(KernelFeatureAttention):
    def features(self, x: Tensor) -> Tensor:
        return elu_plus_one(x)


def elu_plus_one(x: Tensor) -> Tensor:
    # For x < 0 this is e^x. Computing e^x directly keeps the digits of small values, which (e^x - 1) + 1 rounds away.
    return x.relu() + x.clamp(max=0).exp()
