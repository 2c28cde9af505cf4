"""LLN+Diag: Linear Log-Normal attention combined with block-diagonal softmax (arXiv 2311.13541, section 4.2)."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

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

NO_GLOBAL_TOKENS = "none"
FIRST_SEGMENT = "first_segment"
# A first segment has at most this many global tokens, so that the cost stays linear in the length of the sequence.
MAX_GLOBAL_TOKENS = 128
# With this offset, the weight outside the block is below 1e-34 of the weight inside.
ONLY_INSIDE = -80.0


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
    global_tokens: str = option(
        NO_GLOBAL_TOKENS,
        "with a joint mix, the first tokens that attend to all tokens by softmax, and that all tokens attend to: "
        f"first_segment (the first text of a pair, at most {MAX_GLOBAL_TOKENS} tokens), a number of tokens, or none",
    )


def check_global_tokens(text: str, mix: str) -> None:
    """Raise ValueError if `text` is not a value of the option global_tokens, or if this mix does not support it.

    The values are "none", "first_segment" and positive numbers. Every mix supports "none"; only the mixes joint and
    joint_offset support the others.
    """
    if text == NO_GLOBAL_TOKENS:
        return
    if text != FIRST_SEGMENT and not (text.isdecimal() and int(text) > 0):
        raise ValueError(f"global_tokens must be none, first_segment or a positive number, got '{text}'")
    if mix in SUM_MIXES:
        raise ValueError(f"global_tokens={text} needs the mix joint or joint_offset, got mix '{mix}'")


@register_attention("lln_diag", LLNDiagConfig)
class LLNDiagAttention(MomentMatchedAttention):
    """LLN+Diag: ½ (LLN + block-diagonal softmax), as in the paper, or another mix of the two.

    The mixes joint and joint_offset are defined in ops/joint.py. Attention dropout applies to the block-diagonal part
    and to the softmax from and to global tokens.

    Raises:
        ValueError: if the option global_tokens is not "none", "first_segment" or a positive number, or if global tokens
            are requested with another mix than joint and joint_offset. Also for invalid α and β, see
            `MomentMatchedAttention`.
    """

    linearize_options: ClassVar[Mapping[str, Any]] = {"mix": "joint_offset", "gain": "learned", "block_size": 64}
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
        self.global_tokens = str(config.global_tokens)  # benchmarks and configurations may state a number
        check_global_tokens(self.global_tokens, config.mix)
        self.needs_segments = self.global_tokens == FIRST_SEGMENT

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
            global_tokens=self._global_tokens(),
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
        return reference.joint_matrix(
            q, k, alpha, beta, self.block_size, offset, key_padding_mask, self._global_tokens()
        )

    def branches(self) -> dict[str, Attention]:
        """Return the two parts of LLN+Diag, each as an attention that can be called by itself.

        "LLN only" is LLN attention; it uses this attention's parameter for the learned gain. "Diag only" is
        block-diagonal softmax. With global tokens, "Diag only" also has the softmax from and to them.
        """
        sizes = (self.num_heads, self.head_dim, self.max_positions, self.dropout)
        lln_options = {field.name: getattr(self.config, field.name) for field in dataclasses.fields(LLNConfig)}
        lln = LLNAttention(LLNConfig(**lln_options), *sizes)
        lln.log_gain = self.log_gain
        diag: Attention = BlockDiagAttention(BlockDiagConfig(self.block_size), *sizes)
        if self.global_tokens != NO_GLOBAL_TOKENS:
            diag = InsideAttention(self.config, *sizes)
            diag.log_gain = self.log_gain
            diag.segment_lengths = self.segment_lengths
        return {"LLN only": lln, "Diag only": diag}

    def _global_tokens(self) -> int | Tensor | None:
        """Return the number of global tokens: a tensor (B,) for "first_segment", otherwise one int for all sequences.

        Return None if there are no global tokens.

        Raises:
            ValueError: for "first_segment" if `segment_lengths` is not set.
        """
        if self.global_tokens == NO_GLOBAL_TOKENS:
            return None
        if not self.needs_segments:
            return int(self.global_tokens)
        if self.segment_lengths is None:
            raise ValueError(
                f"global_tokens={FIRST_SEGMENT} needs the lengths of the first segments: set segment_lengths before "
                "the call, as the encoder does"
            )
        return self.segment_lengths.clamp(max=MAX_GLOBAL_TOKENS)

    def _head_offset(self) -> float | Tensor | None:
        """Return the learned offsets (H,) of the mix joint_offset, or None for any other mix.

        A subclass can return one number for all heads.
        """
        if self.config.mix == "joint_offset":
            return self.offset
        return None

    def _mix_per_feature(self, lln: Tensor, diag: Tensor) -> Tensor:
        """Combine the outputs of LLN and of the blocks, each (B, H, N, D), by the mix "ratio" or "scale".

        With learned weights r and p for each head and feature, "ratio" returns r LLN + (1 - r) Diag, and "scale"
        returns r LLN + p Diag.
        """
        ratio = self.ratio.to(lln.dtype)
        if self.config.mix == "ratio":
            return ratio * lln + (1 - ratio) * diag
        return ratio * lln + self.diag_scale.to(lln.dtype) * diag


class InsideAttention(LLNDiagAttention):
    """Softmax over the block and the global tokens: a joint mix in which the LLN part has practically no weight.

    Global tokens attend to all tokens. If a block contains only padding and there are no global tokens, the tokens of
    the block get LLN attention.
    """

    def __init__(
        self, config: LLNDiagConfig, num_heads: int, head_dim: int, max_positions: int, dropout: float
    ) -> None:
        config = dataclasses.replace(config, mix="joint_offset")
        super().__init__(config, num_heads, head_dim, max_positions, dropout)
        del self.offset

    def _head_offset(self) -> float:
        """Return an offset so low that keys outside the block have practically no weight."""
        return ONLY_INSIDE
