"""Linear Log-Normal attention with moment matching (arXiv 2311.13541, section 4.1)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lln_fairseq.attention.registry import Attention, option, register_attention
from lln_fairseq.ops import reference
from lln_fairseq.ops.lln import lln_attention, lln_features
from lln_fairseq.ops.moment_matching import CONSTANTS, SCOPES, match_moments

GAINS = ("none", "learned")


@dataclass
class LLNConfig:
    alpha: float | None = option(None, "fixed α; needs β too and switches moment matching off")
    beta: float | None = option(None, "fixed β; needs α too and switches moment matching off")
    constants: str = option(
        "calibrated", "σ̃² by the table that makes variances equal, entropies equal, or the paper's line", CONSTANTS
    )
    scope: str = option("head", "one α, β for each sequence and head, or one for the whole batch", SCOPES)
    gain: str = option("none", "learned: α and β times a factor each per head, 1 at first", GAINS)


class MomentMatched(Attention):
    """What mechanisms with α and β share: fixed values, or values matched to the queries and keys of every call."""

    shard_multiple: int | None = 1
    config: LLNConfig
    log_gain: nn.Parameter | None  # of α and β, (2, H)

    def __init__(self, config: LLNConfig, num_heads: int, head_dim: int, max_positions: int, dropout: float) -> None:
        super().__init__(config, num_heads, head_dim, max_positions, dropout)
        fixed = [x for x in (config.alpha, config.beta) if x is not None]
        got = f"got alpha={config.alpha}, beta={config.beta}"
        if len(fixed) == 1:
            raise ValueError(f"α and β must be given together or not at all, {got}")
        if not all(x > 0 for x in fixed):
            raise ValueError(f"α and β must be positive, {got}")
        self.batch_independent = bool(fixed) or config.scope == "head"
        self.constants = config.constants
        learned = nn.Parameter(torch.zeros(2, num_heads)) if config.gain == "learned" else None
        self.register_parameter("log_gain", learned)

    def alpha_beta(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        alpha, beta = self._alpha_beta(q, k, key_padding_mask)
        return alpha.detach(), beta.detach()

    def matching(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None) -> dict[str, Any]:
        """How α and β come about, as the operations take it: matched in their own passes where nothing is learned."""
        if self.log_gain is None:
            options = {name: getattr(self.config, name) for name in ("alpha", "beta", "scope", "constants")}
        else:
            options = dict(zip(("alpha", "beta"), self._alpha_beta(q, k, key_padding_mask), strict=True))
        return options | {"group": self.group}

    def _alpha_beta(self, q: Tensor, k: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        config = self.config
        if config.alpha is None or config.beta is None:
            alpha, beta = match_moments(q, k, mask, config.scope, config.constants, group=self.group)
        else:
            ones = torch.ones(q.shape[:2], device=q.device)
            alpha, beta = config.alpha * ones, config.beta * ones
        if self.log_gain is None:
            return alpha, beta
        gain = self.log_gain.to(alpha.dtype).exp()
        return alpha * gain[0], beta * gain[1]


@register_attention("lln", LLNConfig)
class LLNAttention(MomentMatched):
    """LLN attention alone. It has no attention matrix, so attention dropout does not apply."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        return lln_attention(q, k, v, key_padding_mask=key_padding_mask, **self.matching(q, k, key_padding_mask))

    def attention_matrix(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        return reference.lln_matrix(q, k, *self.alpha_beta(q, k, key_padding_mask), key_padding_mask)

    def feature_maps(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return lln_features(q, k, *self.alpha_beta(q, k, key_padding_mask), key_padding_mask)
