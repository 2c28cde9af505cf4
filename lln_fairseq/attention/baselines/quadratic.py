"""Kernel attention with κ(s) = s² at quadratic cost, one of the kernels in Figure 2 of arXiv 2311.13541."""

from torch import Tensor

from lln_fairseq.attention.baselines.relu import ScoreKernelAttention
from lln_fairseq.attention.registry import register_attention


@register_attention("quadratic")
class QuadraticAttention(ScoreKernelAttention):
    """Kernel attention with κ(s) = s². A key and its negative get the same weight."""

    def kernel(self, scores: Tensor) -> Tensor:
        return scores.square()
