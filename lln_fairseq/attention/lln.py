"""Linear Log-Normal attention with moment matching (arXiv 2311.13541, section 4.1)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lln_fairseq.attention.registry import Attention, option, register_attention
from lln_fairseq.ops import reference
from lln_fairseq.ops.lln import lln_attention, lln_features
from lln_fairseq.ops.moment_matching import CONSTANTS, SCOPES, match_moments


@dataclass
class LLNConfig:
    alpha: float | None = option(None, "fixed α; needs β too and switches moment matching off")
    beta: float | None = option(None, "fixed β; needs α too and switches moment matching off")
    constants: str = option("calibrated", "σ̃² by the calibrated table or by the paper's straight line", CONSTANTS)
    scope: str = option("head", "one α, β for each sequence and head, or one for the whole batch", SCOPES)


class MomentMatched(Attention):
    """What mechanisms with α and β share: fixed values, or values matched to the queries and keys of every call."""

    config: LLNConfig

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
        # how α and β come about, as the operations take it
        self.matching = {name: getattr(config, name) for name in ("alpha", "beta", "scope", "constants")}

    def alpha_beta(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        config = self.config
        if config.alpha is None or config.beta is None:
            return match_moments(q, k, key_padding_mask, config.scope, config.constants)
        ones = torch.ones(q.shape[:2], device=q.device)
        return config.alpha * ones, config.beta * ones


@register_attention("lln", LLNConfig)
class LLNAttention(MomentMatched):
    """LLN attention alone. It has no attention matrix, so attention dropout does not apply."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        return lln_attention(q, k, v, key_padding_mask=key_padding_mask, **self.matching)

    def attention_matrix(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        return reference.lln_matrix(q, k, *self.alpha_beta(q, k, key_padding_mask), key_padding_mask)

    def feature_maps(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return lln_features(q, k, *self.alpha_beta(q, k, key_padding_mask), key_padding_mask)
