"""Linear attention with the features x², the linear counterpart of `quadratic` in Figure 2 of arXiv 2311.13541."""

from torch import Tensor

from lln_fairseq.attention.kernel_features import KernelFeatureAttention
from lln_fairseq.attention.registry import register_attention


@register_attention("linear_quadratic")
class LinearQuadraticAttention(KernelFeatureAttention):
    """Linear attention with φ(x) = x², elementwise.

    P depends neither on the scale of the queries and keys nor on a temperature. This is not the same attention as
    `quadratic`: the exact features of κ(s) = s² would be all D² products of two features.
    """

    def features(self, x: Tensor) -> Tensor:
        return x.square()
