"""Kernel attention with κ(s) = s², of quadratic cost: one of the kernels of Figure 2 of arXiv 2311.13541."""

from torch import Tensor

from lln_fairseq.attention.registry import register_attention
from lln_fairseq.attention.relu import ScoreKernelAttention


@register_attention("quadratic")
class QuadraticAttention(ScoreKernelAttention):
    """κ(s) = s²: opposite keys count like equal ones."""

    @staticmethod
    def kernel(scores: Tensor) -> Tensor:
        return scores.square()
