"""Kernel attention with κ = ReLU, of quadratic cost: one of the kernels of Figure 2 of arXiv 2311.13541."""

from torch import Tensor

from lln_fairseq.attention.registry import Attention, register_attention
from lln_fairseq.ops import reference
from lln_fairseq.ops.padding import clear_padding
from lln_fairseq.ops.score_kernel import score_kernel_attention


class ScoreKernelAttention(Attention):
    """P_ij = κ(q_i·k_j) / Σ_l κ(q_i·k_l), written out: N x N, for comparison and analysis.

    κ here is homogeneous, so that P depends neither on the scale of q and k nor on a temperature.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        q, k, v = clear_padding(q, k, v, key_padding_mask)
        return score_kernel_attention(q, k, v, self.kernel, key_padding_mask, self.active_dropout)

    def attention_matrix(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        return reference.normalised(self.kernel(q @ k.transpose(-2, -1)), key_padding_mask)

    @staticmethod
    def kernel(scores: Tensor) -> Tensor:
        """κ, elementwise and non-negative."""
        raise NotImplementedError


@register_attention("relu")
class ReluAttention(ScoreKernelAttention):
    """κ(s) = max(s, 0); a query without a positive score attends to all tokens alike."""

    @staticmethod
    def kernel(scores: Tensor) -> Tensor:
        return scores.relu()
