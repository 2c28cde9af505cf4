"""Linear attention with the features x², the linear counterpart of `quadratic` in Figure 2 of arXiv 2311.13541."""

from torch import Tensor

from lln_fairseq.attention.kernel_features import KernelFeatureAttention
from lln_fairseq.attention.registry import register_attention


@register_attention("linear_quadratic")
class LinearQuadraticAttention(KernelFeatureAttention):
    """Linear attention with φ(x) = x², elementwise.

    The attention matrix does not change if all queries or all keys are multiplied by a nonzero number, so there is no
    temperature. This is not the same attention as `quadratic`, whose kernel κ(s) = s² has D² exact features: all
    products of two of the D features.
    """

    def features(self, x: Tensor) -> Tensor:
        return x.square()
