"""LLN+Diag: Linear Log-Normal attention combined with block-diagonal softmax (arXiv 2311.13541, section 4.2)."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lln_fairseq.attention.block_diag import BlockDiagAttention, BlockDiagConfig
from lln_fairseq.attention.context import NO_CONTEXT, Context
from lln_fairseq.attention.global_tokens import NO_GLOBAL_TOKENS, VALUES, parse_global_tokens, select_global_tokens
from lln_fairseq.attention.lln import LLNAttention, LLNConfig, MomentMatchedAttention
from lln_fairseq.attention.registry import Attention, option, register_attention
from lln_fairseq.ops import reference
from lln_fairseq.ops.dispatch import check_block_size
from lln_fairseq.ops.lln import MIXES, lln_diag_attention


@dataclass
class LLNDiagConfig(LLNConfig):
    block_size: int | None = option(None, "tokens in a block; default: the head dimension", at_least=1)
    mix: str = option(
        "average",
        "average: ½ LLN + ½ Diag; joint_offset: Diag within the block and LLN outside it, with odds learned per head",
        MIXES,
    )
    global_tokens: str = option(
        NO_GLOBAL_TOKENS,
        "with mix joint_offset, the first tokens that attend to all tokens by softmax, and that all tokens attend to: "
        + VALUES,
    )


@register_attention("lln_diag", LLNDiagConfig)
class LLNDiagAttention(MomentMatchedAttention):
    """LLN+Diag: ½ (LLN + block-diagonal softmax), as in the paper, or the joint form of ops/formula.py.

    Attention dropout applies to the block-diagonal part and to the softmax from and to global tokens.
    """

    linearize_options: ClassVar[Mapping[str, Any]] = {"mix": "joint_offset", "gain": "learned", "block_size": 64}
    config: LLNDiagConfig
    offset: nn.Parameter | None  # (H,); None with mix average

    def __init__(
        self, config: LLNDiagConfig, num_heads: int, head_dim: int, max_positions: int, dropout: float
    ) -> None:
        super().__init__(config, num_heads, head_dim, max_positions, dropout)
        self.block_size = check_block_size(config.block_size, head_dim)
        if config.mix == "joint_offset":
            self.offset = nn.Parameter(torch.zeros(num_heads))
        else:
            self.register_parameter("offset", None)
        self.global_tokens = parse_global_tokens(config.global_tokens)
        if self.global_tokens is not None and config.mix != "joint_offset":
            raise ValueError(f"global_tokens={self.global_tokens} needs the mix joint_offset, got mix '{config.mix}'")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        config = self.config
        alpha: float | Tensor | None = config.alpha
        beta: float | Tensor | None = config.beta
        if self.log_gain is not None:
            alpha, beta = self.alpha_beta(q, k, context)
        counts = None
        bound = None
        if self.global_tokens is not None:
            counts, bound = select_global_tokens(self.global_tokens, context)
        return lln_diag_attention(
            q,
            k,
            v,
            alpha,
            beta,
            context.padding,
            block_size=self.block_size,
            dropout_p=self.active_dropout,
            scope=config.scope,
            constants=config.constants,
            mix=config.mix,
            mix_parameter=self.offset,
            global_tokens=counts,
            max_global_tokens=bound,
        )

    def attention_matrix(self, q: Tensor, k: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        alpha, beta = self.alpha_beta(q, k, context)
        if self.offset is None:
            return reference.lln_diag_matrix(q, k, alpha, beta, self.block_size, context.padding)
        counts, _ = select_global_tokens(self.global_tokens, context)
        return reference.joint_matrix(q, k, alpha, beta, self.block_size, self.offset, context.padding, counts)

    def branches(self) -> dict[str, Attention]:
        """Return the two parts of LLN+Diag, each as a new attention in training mode that can be called by itself.

        "LLN only" is LLN attention; it uses this attention's parameter for the learned gain. "Diag only" is
        block-diagonal softmax. With global tokens, "Diag only" also has the softmax from and to them.
        """
        sizes = (self.num_heads, self.head_dim, self.max_positions, self.dropout)
        lln_options = {field.name: getattr(self.config, field.name) for field in dataclasses.fields(LLNConfig)}
        lln = LLNAttention(LLNConfig(**lln_options), *sizes)
        lln.log_gain = self.log_gain
        diag = BlockDiagAttention(BlockDiagConfig(self.block_size, self.config.global_tokens), *sizes)
        return {"LLN only": lln, "Diag only": diag}
