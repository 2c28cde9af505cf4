"""LLN+Diag: Linear Log-Normal attention combined with block-diagonal softmax (arXiv 2311.13541, section 4.2)."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lln_fairseq.attention.block_diag import BlockDiagAttention, BlockDiagConfig
from lln_fairseq.attention.context import NO_CONTEXT, Context
from lln_fairseq.attention.lln import LLNAttention, LLNConfig, MomentMatchedAttention
from lln_fairseq.attention.registry import Attention, option, register_attention
from lln_fairseq.ops import reference
from lln_fairseq.ops.dispatch import check_block_size
from lln_fairseq.ops.lln import MIXES, lln_diag_attention

NO_GLOBAL_TOKENS = "none"
FIRST_SEGMENT = "first_segment"
# A first segment has at most this many global tokens, so that the cost stays linear in the length of the sequence.
MAX_GLOBAL_TOKENS = 128
# With this offset, the weight outside the block is below 1e-34 of the weight inside.
ONLY_INSIDE = -80.0


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
        f"first_segment (the first text of a pair, at most {MAX_GLOBAL_TOKENS} tokens), a number of tokens, or none",
    )


def check_global_setting(text: str, mix: str) -> None:
    """Raise ValueError if `text` is not a value of the option global_tokens, or if this mix does not support it."""
    if text == NO_GLOBAL_TOKENS:
        return
    if text != FIRST_SEGMENT and not (text.isdecimal() and int(text) > 0):
        raise ValueError(f"global_tokens must be none, first_segment or a positive number, got '{text}'")
    if mix != "joint_offset":
        raise ValueError(f"global_tokens={text} needs the mix joint_offset, got mix '{mix}'")


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
            self.shard_multiple = None
            self.offset = nn.Parameter(torch.zeros(num_heads))
        else:
            self.shard_multiple = self.block_size
            self.register_parameter("offset", None)
        self.global_tokens = str(config.global_tokens)  # benchmarks and configurations may state a number
        check_global_setting(self.global_tokens, config.mix)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        config = self.config
        alpha: float | Tensor | None = config.alpha
        beta: float | Tensor | None = config.beta
        if self.log_gain is not None:
            alpha, beta = self.alpha_beta(q, k, context)
        return lln_diag_attention(
            q,
            k,
            v,
            alpha,
            beta,
            context.padding,
            block_size=self.block_size,
            dropout_p=self.dropout if self.training else 0.0,
            scope=config.scope,
            constants=config.constants,
            mix=config.mix,
            mix_parameter=self.offset,
            group=context.group,
            global_tokens=self._count_global_tokens(context),
        )

    def attention_matrix(self, q: Tensor, k: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        alpha, beta = self.alpha_beta(q, k, context)
        if self.offset is None:
            return reference.lln_diag_matrix(q, k, alpha, beta, self.block_size, context.padding)
        global_tokens = self._count_global_tokens(context)
        return reference.joint_matrix(q, k, alpha, beta, self.block_size, self.offset, context.padding, global_tokens)

    def branches(self) -> dict[str, Attention]:
        """Return the two parts of LLN+Diag, each as a new attention in training mode that can be called by itself.

        "LLN only" is LLN attention; it uses this attention's parameter for the learned gain. "Diag only" is
        block-diagonal softmax. With global tokens, "Diag only" also has the softmax from and to them.
        """
        sizes = (self.num_heads, self.head_dim, self.max_positions, self.dropout)
        lln_options = {field.name: getattr(self.config, field.name) for field in dataclasses.fields(LLNConfig)}
        lln = LLNAttention(LLNConfig(**lln_options), *sizes)
        lln.log_gain = self.log_gain
        diag: Attention = BlockDiagAttention(BlockDiagConfig(self.block_size), *sizes)
        if self.global_tokens != NO_GLOBAL_TOKENS:
            diag = LLNDiagAttention(self.config, *sizes)
            diag.log_gain = self.log_gain
            nn.init.constant_(diag.get_parameter("offset"), ONLY_INSIDE).requires_grad_(False)
        return {"LLN only": lln, "Diag only": diag}

    def _count_global_tokens(self, context: Context) -> int | Tensor | None:
        """Return the number of global tokens: None, an int, or for "first_segment" at most 128 per sequence, (B,).

        For "first_segment", ValueError is raised if the context does not have the lengths of the first segments.
        """
        if self.global_tokens == NO_GLOBAL_TOKENS:
            return None
        if self.global_tokens != FIRST_SEGMENT:
            return int(self.global_tokens)
        if context.first_lengths is None:
            raise ValueError(
                f"global_tokens={FIRST_SEGMENT} needs the lengths of the first segments: pass "
                "Context(first_lengths=...), as the encoder does"
            )
        return context.first_lengths.clamp(max=MAX_GLOBAL_TOKENS)
