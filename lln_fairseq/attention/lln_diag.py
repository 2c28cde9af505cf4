"""LLN+Diag: Linear Log-Normal attention mixed with block-diagonal softmax (arXiv 2311.13541, section 4.2)."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lln_fairseq.attention.block_diag import BlockDiagAttention, BlockDiagConfig
from lln_fairseq.attention.lln import LLNAttention, LLNConfig, MomentMatched
from lln_fairseq.attention.registry import Attention, option, register_attention
from lln_fairseq.ops import reference
from lln_fairseq.ops.block_diag import block_diag_attention
from lln_fairseq.ops.checks import check_block_size
from lln_fairseq.ops.lln import head_offsets, lln_attention, lln_diag_attention

# The learned parameters of the mixes: ratio and scale have them per head and feature, joint_offset per head.
PARAMETERS: dict[str, tuple[str, ...]] = {
    "average": (),
    "ratio": ("ratio",),
    "scale": ("ratio", "diag_scale"),
    "joint": (),
    "joint_offset": ("offset",),
}
PER_FEATURE = ("ratio", "scale")
SUMS = ("average", *PER_FEATURE)  # of the two parts, each computed for itself


@dataclass
class LLNDiagConfig(LLNConfig):
    block_size: int | None = option(None, "tokens in a block; default: the head dimension", at_least=1)
    mix: str = option(
        "average",
        "½ LLN + ½ Diag; learned per head and feature: r, 1-r (ratio) or r, p (scale); Diag in the block, LLN outside, "
        "in proportions that are LLN's (joint) or with odds learned per head (joint_offset)",
        tuple(PARAMETERS),
    )


@register_attention("lln_diag", LLNDiagConfig)
class LLNDiagAttention(MomentMatched):
    """½ (LLN + block-diagonal softmax), the paper's layer, or another mix of both (ops/joint.py has the joint ones).

    Attention dropout applies to the block-diagonal part.
    """

    config: LLNDiagConfig
    ratio: nn.Parameter
    diag_scale: nn.Parameter
    offset: nn.Parameter

    def __init__(
        self, config: LLNDiagConfig, num_heads: int, head_dim: int, max_positions: int, dropout: float
    ) -> None:
        super().__init__(config, num_heads, head_dim, max_positions, dropout)
        self.block_size = check_block_size(config.block_size, head_dim)
        self.shard_multiple = self.block_size if config.mix in SUMS else None
        # Those weigh the features of the output, so one attention matrix cannot express them.
        self.has_matrix = self.stochastic_rows = config.mix not in PER_FEATURE
        for name in PARAMETERS[config.mix]:
            start = torch.full((num_heads, 1, head_dim), 0.5) if config.mix in PER_FEATURE else torch.zeros(num_heads)
            self.register_parameter(name, nn.Parameter(start))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        matching = self.matching(q, k, key_padding_mask)
        if self.config.mix not in PER_FEATURE:
            return lln_diag_attention(
                q, k, v, key_padding_mask=key_padding_mask, block_size=self.block_size, dropout_p=self.active_dropout,
                mix=self.config.mix, mix_parameter=self._mix_parameter(), **matching,
            )  # fmt: skip
        lln = lln_attention(q, k, v, key_padding_mask=key_padding_mask, **matching)
        diag = block_diag_attention(q, k, v, key_padding_mask, self.block_size, self.active_dropout)
        return self._mix(lln, diag)

    def attention_matrix(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """P of the average and of the joint mixes. A mix per feature has a matrix for each: ValueError."""
        mix = self.config.mix
        if mix in PER_FEATURE:
            raise ValueError(f"mix '{mix}' has no single attention matrix")
        inputs = (q, k, *self.alpha_beta(q, k, key_padding_mask), self.block_size)
        offset = head_offsets(mix, self._mix_parameter(), q)
        if offset is None:
            return reference.lln_diag_matrix(*inputs, key_padding_mask)
        return reference.joint_matrix(*inputs, offset, key_padding_mask)

    def branches(self) -> dict[str, Attention]:
        sizes = (self.num_heads, self.head_dim, self.max_positions, self.dropout)
        fields = {field.name: getattr(self.config, field.name) for field in dataclasses.fields(LLNConfig)}
        lln = LLNAttention(LLNConfig(**fields), *sizes)
        lln.log_gain = self.log_gain
        return {"LLN only": lln, "Diag only": BlockDiagAttention(BlockDiagConfig(self.block_size), *sizes)}

    def _mix_parameter(self) -> Tensor | None:
        """Return the learned offset of each head, (H,), if there is one."""
        if self.config.mix == "joint_offset":
            return self.offset
        return None

    def _mix(self, lln: Tensor, diag: Tensor) -> Tensor:
        ratio = self.ratio.to(lln.dtype)
        other = 1 - ratio if self.config.mix == "ratio" else self.diag_scale.to(lln.dtype)
        return ratio * lln + other * diag
