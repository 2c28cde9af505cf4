"""LLN+Diag: Linear Log-Normal attention mixed with block-diagonal softmax (arXiv 2311.13541, section 4.2)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lln_fairseq.attention.lln import LLNConfig, MomentMatched
from lln_fairseq.attention.registry import option, register_attention
from lln_fairseq.ops import reference
from lln_fairseq.ops.block_diag import block_diag_attention
from lln_fairseq.ops.checks import check_block_size
from lln_fairseq.ops.lln import lln_attention, lln_diag_attention

MIXES = ("average", "ratio", "scale")


@dataclass
class LLNDiagConfig(LLNConfig):
    block_size: int | None = option(None, "tokens in a block; default: the head dimension", at_least=1)
    mix: str = option(
        "average", "½ LLN + ½ Diag, or learned per head and feature: r, 1-r (ratio) or r, p (scale)", MIXES
    )


@register_attention("lln_diag", LLNDiagConfig)
class LLNDiagAttention(MomentMatched):
    """½ (LLN + block-diagonal softmax), the paper's layer; attention dropout applies to the block-diagonal part."""

    config: LLNDiagConfig
    ratio: nn.Parameter
    diag_scale: nn.Parameter

    def __init__(
        self, config: LLNDiagConfig, num_heads: int, head_dim: int, max_positions: int, dropout: float
    ) -> None:
        super().__init__(config, num_heads, head_dim, max_positions, dropout)
        self.block_size = check_block_size(config.block_size, head_dim)
        # A learned mix weighs the features of the output, so one attention matrix cannot express it.
        self.has_matrix = self.stochastic_rows = config.mix == "average"
        for name in {"average": (), "ratio": ("ratio",), "scale": ("ratio", "diag_scale")}[config.mix]:
            self.register_parameter(name, nn.Parameter(torch.full((num_heads, 1, head_dim), 0.5)))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        if self.config.mix == "average":
            return lln_diag_attention(
                q, k, v, key_padding_mask=key_padding_mask, block_size=self.block_size, dropout_p=self.active_dropout,
                **self.matching,
            )  # fmt: skip
        lln = lln_attention(q, k, v, key_padding_mask=key_padding_mask, **self.matching)
        diag = block_diag_attention(q, k, v, key_padding_mask, self.block_size, self.active_dropout)
        return self._mix(lln, diag)

    def attention_matrix(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """P of the average. A learned mix has one matrix for every feature: ValueError."""
        if self.config.mix != "average":
            raise ValueError(f"mix '{self.config.mix}' has no single attention matrix")
        alpha, beta = self.alpha_beta(q, k, key_padding_mask)
        return reference.lln_diag_matrix(q, k, alpha, beta, self.block_size, key_padding_mask)

    def _mix(self, lln: Tensor, diag: Tensor) -> Tensor:
        ratio = self.ratio.to(lln.dtype)
        other = 1 - ratio if self.config.mix == "ratio" else self.diag_scale.to(lln.dtype)
        return ratio * lln + other * diag
