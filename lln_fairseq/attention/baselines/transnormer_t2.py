"""TransNormer T2: softmax within blocks in early layers, normalized linear attention with φ = 1 + elu in later ones.

Qin et al. 2022, "The Devil in Linear Transformer", arXiv 2210.10340.
"""

from torch import Tensor

from lln_fairseq.attention.baselines.elu import elu_plus_one
from lln_fairseq.attention.baselines.transnormer_t1 import TransNormerAttention, TransNormerConfig
from lln_fairseq.attention.context import NO_CONTEXT, Context
from lln_fairseq.attention.registry import register_attention
from lln_fairseq.ops import reference
from lln_fairseq.ops.block_diag import block_diag_attention


@register_attention("transnormer_t2", TransNormerConfig)
class TransNormerT2Attention(TransNormerAttention):
    """TransNormer with φ = 1 + elu. Its DiagAttention is block-diagonal softmax.

    The output of DiagAttention is not divided by its root mean square, so it has an attention matrix.
    """

    local_has_matrix = True

    def features(self, x: Tensor) -> Tensor:
        return elu_plus_one(x)

    def local_attention(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> Tensor:
        return block_diag_attention(q, k, v, padding, self.config.block_size, self.active_dropout)

    def attention_matrix(self, q: Tensor, k: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        if not self.is_local:
            return super().attention_matrix(q, k, context)
        return reference.block_diag_matrix(q, k, self.config.block_size, context.padding)
