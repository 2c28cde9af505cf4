"""Linear Log-Normal attention with moment matching (arXiv 2311.13541, section 4.1)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lln_fairseq.attention.context import NO_CONTEXT, Context
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
        "calibrated",
        "how σ̃² is computed: from a simulated table (calibrated), or from the paper's line (paper)",
        CONSTANTS,
    )
    scope: str = option("head", "one α, β for each sequence and head, or one for the whole batch", SCOPES)
    gain: str = option("none", "learned: multiply α and β by one learned factor each per head, initially 1", GAINS)


class MomentMatchedAttention(Attention):
    """Base class of attentions that contain LLN attention, whose features are e^{αq} and e^{βk}.

    α and β are fixed numbers, or moment matching computes them from the queries and keys of every call. With
    gain="learned", each head multiplies both by its own learned factors.

    Raises:
        ValueError: if only one of α and β is given, or if one of them is not positive.
    """

    config: LLNConfig
    log_gain: nn.Parameter | None  # logarithms of the factors of α and of β, (2, H)

    def __init__(self, config: LLNConfig, num_heads: int, head_dim: int, max_positions: int, dropout: float) -> None:
        super().__init__(config, num_heads, head_dim, max_positions, dropout)
        fixed = [x for x in (config.alpha, config.beta) if x is not None]
        if len(fixed) == 1:
            raise ValueError(
                f"alpha and beta must be set together or not at all, got alpha={config.alpha}, beta={config.beta}"
            )
        if not all(x > 0 for x in fixed):
            raise ValueError(f"alpha and beta must be positive, got alpha={config.alpha}, beta={config.beta}")
        self.batch_independent = bool(fixed) or config.scope == "head"
        self.constants = config.constants
        if config.gain == "learned":
            self.log_gain = nn.Parameter(torch.zeros(2, num_heads))
        else:
            self.register_parameter("log_gain", None)

    def alpha_beta(self, q: Tensor, k: Tensor, context: Context = NO_CONTEXT) -> tuple[Tensor, Tensor]:
        config = self.config
        if config.alpha is None or config.beta is None:
            alpha, beta = match_moments(q, k, context.padding, config.scope, config.constants)
        else:
            ones = torch.ones(q.shape[:2], device=q.device)
            alpha = config.alpha * ones
            beta = config.beta * ones
        if self.log_gain is None:
            return alpha, beta
        gain = self.log_gain.to(alpha.dtype).exp()
        return alpha * gain[0], beta * gain[1]


@register_attention("lln", LLNConfig)
class LLNAttention(MomentMatchedAttention):
    """LLN attention without block-diagonal softmax. P is never formed, so attention dropout does not apply."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        config = self.config
        alpha: float | Tensor | None = config.alpha
        beta: float | Tensor | None = config.beta
        if self.log_gain is not None:
            alpha, beta = self.alpha_beta(q, k, context)
        return lln_attention(
            q,
            k,
            v,
            alpha,
            beta,
            context.padding,
            scope=config.scope,
            constants=config.constants,
        )

    def attention_matrix(self, q: Tensor, k: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        alpha, beta = self.alpha_beta(q, k, context)
        return reference.lln_matrix(q, k, alpha, beta, context.padding)

    def feature_maps(self, q: Tensor, k: Tensor, context: Context = NO_CONTEXT) -> tuple[Tensor, Tensor]:
        alpha, beta = self.alpha_beta(q, k, context)
        return lln_features(q, k, alpha, beta, context.padding)
