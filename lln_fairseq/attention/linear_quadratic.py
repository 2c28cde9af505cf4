"""Linear attention with the features x²: the linear counterpart of `quadratic` in Figure 2 of arXiv 2311.13541."""

from torch import Tensor

from lln_fairseq.attention.kernel_features import KernelFeatureAttention
from lln_fairseq.attention.registry import register_attention


@register_attention("linear_quadratic")
class LinearQuadraticAttention(KernelFeatureAttention):
    """φ(x) = x² feature by feature: P depends neither on the scale of q and k nor on a temperature.

    The exact features of `quadratic`, κ(s) = s², would be all D² products.
    """

    @staticmethod
    def features(x: Tensor) -> Tensor:
        return x.square()
