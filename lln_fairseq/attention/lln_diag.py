"""LLN+Diag: Linear Log-Normal attention combined with block-diagonal softmax (arXiv 2311.13541, section 4.2)."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lln_fairseq.attention.block_diag import BlockDiagAttention, BlockDiagConfig
from lln_fairseq.attention.lln import LLNAttention, LLNConfig, MomentMatchedAttention
from lln_fairseq.attention.registry import Attention, option, register_attention
from lln_fairseq.ops import reference
from lln_fairseq.ops.block_diag import block_diag_attention
from lln_fairseq.ops.checks import check_block_size
from lln_fairseq.ops.lln import head_offsets, lln_attention, lln_diag_attention

MIX_OPTIONS = ("average", "ratio", "scale", "joint", "joint_offset")
PER_FEATURE_MIXES = ("ratio", "scale")  # these weigh every feature of the output separately
SUM_MIXES = ("average", "ratio", "scale")  # these add two parts, each of which has its own normalizer


@dataclass
class LLNDiagConfig(LLNConfig):
    """The options of LLN+Diag, which include those of LLN attention."""

    block_size: int | None = option(None, "tokens in a block; default: the head dimension", at_least=1)
    mix: str = option(
        "average",
        "average: ½ LLN + ½ Diag; ratio: r LLN + (1-r) Diag; scale: r LLN + p Diag, with r and p learned per head and "
        "feature; joint: Diag within the block and LLN outside it, weighted as in LLN; joint_offset: as joint, with "
        "the odds of both learned per head",
        MIX_OPTIONS,
    )


@register_attention("lln_diag", LLNDiagConfig)
class LLNDiagAttention(MomentMatchedAttention):
    """LLN+Diag: ½ (LLN + block-diagonal softmax), as in the paper, or another mix of the two.

    ops/joint.py defines the mixes joint and joint_offset. Attention dropout applies to the block-diagonal part.
    """

    config: LLNDiagConfig
    ratio: nn.Parameter  # (H, 1, D), only in the mixes ratio and scale
    diag_scale: nn.Parameter  # (H, 1, D), only in the mix scale
    offset: nn.Parameter  # (H,), only in the mix joint_offset

    def __init__(
        self, config: LLNDiagConfig, num_heads: int, head_dim: int, max_positions: int, dropout: float
    ) -> None:
        super().__init__(config, num_heads, head_dim, max_positions, dropout)
        self.block_size = check_block_size(config.block_size, head_dim)
        if config.mix in SUM_MIXES:
            self.shard_multiple = self.block_size
        else:
            self.shard_multiple = None
        # A mix per feature has a different matrix for every feature.
        self.has_matrix = config.mix not in PER_FEATURE_MIXES
        self.rows_sum_to_one = self.has_matrix
        if config.mix in PER_FEATURE_MIXES:
            self.ratio = nn.Parameter(torch.full((num_heads, 1, head_dim), 0.5))
        if config.mix == "scale":
            self.diag_scale = nn.Parameter(torch.full((num_heads, 1, head_dim), 0.5))
        if config.mix == "joint_offset":
            self.offset = nn.Parameter(torch.zeros(num_heads))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        matching = self.moment_matching_arguments(q, k, key_padding_mask)
        if self.config.mix in PER_FEATURE_MIXES:
            lln = lln_attention(q, k, v, key_padding_mask=key_padding_mask, **matching)
            diag = block_diag_attention(q, k, v, key_padding_mask, self.block_size, self.active_dropout)
            return self._mix_per_feature(lln, diag)
        return lln_diag_attention(
            q,
            k,
            v,
            key_padding_mask=key_padding_mask,
            block_size=self.block_size,
            dropout_p=self.active_dropout,
            mix=self.config.mix,
            mix_parameter=self._head_offset(),
            **matching,
        )

    def attention_matrix(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        mix = self.config.mix
        if mix in PER_FEATURE_MIXES:
            raise ValueError(f"mix '{mix}' weighs every feature separately, so there is no single attention matrix")
        alpha, beta = self.alpha_beta(q, k, key_padding_mask)
        offset = head_offsets(mix, self._head_offset(), q)
        if offset is None:
            return reference.lln_diag_matrix(q, k, alpha, beta, self.block_size, key_padding_mask)
        return reference.joint_matrix(q, k, alpha, beta, self.block_size, offset, key_padding_mask)

    def branches(self) -> dict[str, Attention]:
        """Return LLN attention, which shares this attention's learned gain, and block-diagonal softmax."""
        sizes = (self.num_heads, self.head_dim, self.max_positions, self.dropout)
        lln_options = {field.name: getattr(self.config, field.name) for field in dataclasses.fields(LLNConfig)}
        lln = LLNAttention(LLNConfig(**lln_options), *sizes)
        lln.log_gain = self.log_gain
        diag = BlockDiagAttention(BlockDiagConfig(self.block_size), *sizes)
        return {"LLN only": lln, "Diag only": diag}

    def _head_offset(self) -> Tensor | None:
        """Return the learned offset of every head, (H,), or None unless the mix is joint_offset."""
        if self.config.mix == "joint_offset":
            return self.offset
        return None

    def _mix_per_feature(self, lln: Tensor, diag: Tensor) -> Tensor:
        """Combine both outputs, each (B, H, N, D), with the learned weights of the mixes ratio and scale."""
        ratio = self.ratio.to(lln.dtype)
        if self.config.mix == "ratio":
            return ratio * lln + (1 - ratio) * diag
        return ratio * lln + self.diag_scale.to(lln.dtype) * diag
