"""Simulate attention of Gaussian queries and keys, the model of the paper's section 3, for Figures 2, 5 and 7."""

import math

import torch
from torch import Tensor

from lln_fairseq.attention import Attention, build_attention
from lln_fairseq.ops import reference

HEAD_DIM = 64


class GaussianInputs:
    """Independent standard normal queries and keys, the same for every attention and every s = σ_q² σ_k².

    Attributes:
        q, k: shape (1, heads, tokens, HEAD_DIM), float64.
    """

    def __init__(self, tokens: int, heads: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (2, 1, heads, tokens, HEAD_DIM)
        self.tokens = tokens
        self.heads = heads
        self.q, self.k = torch.randn(shape, generator=generator, dtype=torch.float64)

    def scaled(self, s: float) -> tuple[Tensor, Tensor]:
        """Return q and k, scaled equally so that σ_q² σ_k² = s, the variance of the logarithm of softmax attention."""
        return s**0.25 * self.q, s**0.25 * self.k

    def features(self, name: str, s: float, **options: float | str) -> tuple[Tensor, Tensor] | None:
        """Return the features φ(q) and φ(k) of a registered linear attention, and None for other attentions."""
        return self._build(name, options).feature_maps(*self.scaled(s))

    def matrix(self, name: str, s: float, **options: float | str) -> Tensor:
        """Return the attention matrix P, of shape (1, heads, tokens, tokens).

        The matrix of a linear attention is computed from its features, which is faster.
        """
        features = self.features(name, s, **options)
        if features is not None:
            return reference.kernel_matrix(*features)
        return self._build(name, options).attention_matrix(*self.scaled(s))

    def _build(self, name: str, options: dict) -> Attention:
        attention = build_attention(name, num_heads=self.heads, head_dim=HEAD_DIM, max_positions=self.tokens, **options)
        return attention.double().eval()


def geometric_range(low: float, high: float, points: int) -> list[float]:
    """Return numbers with equal ratios from `low` to `high`, both included."""
    return torch.linspace(math.log(low), math.log(high), points, dtype=torch.float64).exp().tolist()
