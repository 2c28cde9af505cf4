"""Linear attention with the features ReLU(x), the linear counterpart of `relu` in Figure 2 of arXiv 2311.13541."""

from torch import Tensor

from lln_fairseq.attention.kernel_features import KernelFeatureAttention
from lln_fairseq.attention.registry import register_attention


@register_attention("linear_relu")
class LinearReluAttention(KernelFeatureAttention):
    """Linear attention with φ(x) = max(x, 0).

    The attention matrix does not change if all queries or all keys are multiplied by a positive number, so there is no
    temperature.
    """

    def features(self, x: Tensor) -> Tensor:
        return x.relu()
