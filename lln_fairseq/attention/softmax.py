"""Softmax attention, the baseline. It uses PyTorch's fused kernel and computes the same as fairseq's own RoBERTa."""

from torch import Tensor

from lln_fairseq.attention.context import NO_CONTEXT, Context
from lln_fairseq.attention.registry import Attention, register_attention
from lln_fairseq.ops import reference
from lln_fairseq.ops.formula import attend_to_all_keys


@register_attention("softmax")
class SoftmaxAttention(Attention):
    """Compute softmax(q kᵀ / √D) v (Vaswani et al. 2017). The output is 0 for a sequence that contains only padding."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        return attend_to_all_keys(q, k, v, context.padding, self.active_dropout)

    def attention_matrix(self, q: Tensor, k: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        return reference.softmax_matrix(q, k, context.padding)
