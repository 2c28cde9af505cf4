"""Simulate attention with Gaussian queries and keys, as in the paper's section 3, for Figures 2, 5 and 7.

σ_q² and σ_k² are the variances of the entries of the queries and of the keys, and s = σ_q² σ_k².
"""

import math

import torch
from torch import Tensor

from lln_fairseq.attention import Attention, build_attention
from lln_fairseq.ops import reference

HEAD_DIM = 64


class GaussianInputs:
    """Random queries and keys, which are the same for every attention. The methods scale them to the requested s.

    Attributes:
        q: independent standard normal queries, float64 (1, heads, tokens, HEAD_DIM).
        k: independent standard normal keys, float64 (1, heads, tokens, HEAD_DIM).

    Args:
        tokens: number of tokens.
        heads: number of heads.
        seed: seed of the queries and keys.
    """

    def __init__(self, tokens: int, heads: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (2, 1, heads, tokens, HEAD_DIM)
        self.tokens = tokens
        self.heads = heads
        self.q, self.k = torch.randn(shape, generator=generator, dtype=torch.float64)

    def scaled(self, s: float) -> tuple[Tensor, Tensor]:
        """Return q and k, each multiplied by the fourth root of s, so that σ_q² σ_k² = s.

        The logarithm of softmax attention then has a variance of about s.
        """
        return s**0.25 * self.q, s**0.25 * self.k

    def features(self, name: str, s: float, **options: float | str) -> tuple[Tensor, Tensor] | None:
        """Return the features φ(q) and φ(k) of a linear attention, or None if the attention is not linear.

        Args:
            name: name of a registered attention.
            s: the value of σ_q² σ_k².
            **options: options of the attention.
        """
        return self._build(name, options).feature_maps(*self.scaled(s))

    def matrix(self, name: str, s: float, **options: float | str) -> Tensor:
        """Return the attention matrix P. For a linear attention, it is computed from the features, which is faster.

        Args:
            name: name of a registered attention.
            s: the value of σ_q² σ_k².
            **options: options of the attention.

        Returns:
            P, (1, heads, tokens, tokens).
        """
        features = self.features(name, s, **options)
        if features is not None:
            return reference.kernel_matrix(*features)
        return self._build(name, options).attention_matrix(*self.scaled(s))

    def _build(self, name: str, options: dict) -> Attention:
        """Build a registered attention in float64 and in evaluation mode."""
        attention = build_attention(name, num_heads=self.heads, head_dim=HEAD_DIM, max_positions=self.tokens, **options)
        return attention.double().eval()


def geometric_range(low: float, high: float, points: int) -> list[float]:
    """Return `points` numbers from `low` to `high`, both included, with a constant ratio between neighbors."""
    return torch.linspace(math.log(low), math.log(high), points, dtype=torch.float64).exp().tolist()
