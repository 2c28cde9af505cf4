"""Base class of linear attentions with a learned feature map, which can be averaged with block-diagonal softmax."""

import copy
import dataclasses
from dataclasses import dataclass

from torch import Tensor

from lln_fairseq.attention.block_diag import BlockDiagAttention, BlockDiagConfig
from lln_fairseq.attention.context import NO_CONTEXT, Context
from lln_fairseq.attention.kernel_features import KernelFeatureAttention
from lln_fairseq.attention.registry import Attention, option
from lln_fairseq.ops import reference
from lln_fairseq.ops.block_diag import block_diag_attention

LINEAR_ONLY = 0  # the value of block_size for linear attention without blocks


@dataclass
class LearnedFeatureConfig:
    block_size: int = option(
        LINEAR_ONLY,
        "tokens in a block of softmax, which is averaged with the linear attention; 0: no blocks",
        at_least=0,
    )


class LearnedFeatureAttention(KernelFeatureAttention):
    """Linear attention with a learned feature map, or with blocks ½ (linear attention + block-diagonal softmax).

    A subclass creates its parameters in __init__ and defines `features`. Attention dropout applies to the blocks only.
    """

    config: LearnedFeatureConfig

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        linear = super().forward(q, k, v, context)
        block_size = self.config.block_size
        if block_size == LINEAR_ONLY:
            return linear
        return (linear + block_diag_attention(q, k, v, context.padding, block_size, self.active_dropout)) / 2

    def attention_matrix(self, q: Tensor, k: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        linear = super().attention_matrix(q, k, context)
        if self.config.block_size == LINEAR_ONLY:
            return linear
        return (linear + reference.block_diag_matrix(q, k, self.config.block_size, context.padding)) / 2

    def feature_maps(self, q: Tensor, k: Tensor, context: Context = NO_CONTEXT) -> tuple[Tensor, Tensor] | None:
        """Return φ(q) and φ(k), or None if there are blocks, because P is then not φ(q) φ(k)ᵀ."""
        if self.config.block_size != LINEAR_ONLY:
            return None
        return self.linear_features(q, k, context)

    def branches(self) -> dict[str, Attention]:
        """Return both parts, each as an attention that can be called by itself, or nothing if there are no blocks.

        "Linear only" shares the parameters of this attention. "Diag only" is block-diagonal softmax, a new module in
        training mode.
        """
        if self.config.block_size == LINEAR_ONLY:
            return {}
        linear = copy.copy(self)
        linear.config = dataclasses.replace(self.config, block_size=LINEAR_ONLY)
        sizes = (self.num_heads, self.head_dim, self.max_positions, self.dropout)
        diag = BlockDiagAttention(BlockDiagConfig(self.config.block_size), *sizes)
        return {"Linear only": linear, "Diag only": diag}
