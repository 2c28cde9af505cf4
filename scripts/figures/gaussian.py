"""Attention of Gaussian queries and keys, the model of section 3: what Figures 2, 5 and 7 are simulated with."""

import math

import torch
from torch import Tensor

from lln_fairseq.attention import Attention, build_attention
from lln_fairseq.ops import reference

HEAD_DIM = 64


class Inputs:
    """Independent q, k (1, H, N, 64) ~ N(0, 1) in float64, the same for every attention and every s."""

    def __init__(self, tokens: int, heads: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (2, 1, heads, tokens, HEAD_DIM)
        self.tokens, self.heads = tokens, heads
        self.q, self.k = torch.randn(shape, generator=generator, dtype=torch.float64)

    def scaled(self, s: float) -> tuple[Tensor, Tensor]:
        """q and k of equal standard deviation with σ_q² σ_k² = s, the log-variance of softmax attention."""
        return s**0.25 * self.q, s**0.25 * self.k

    def features(self, name: str, s: float, **options: float | str) -> tuple[Tensor, Tensor] | None:
        """φ(Q), φ(K) of a linear mechanism, else None."""
        return self._build(name, options).feature_maps(*self.scaled(s))

    def matrix(self, name: str, s: float, **options: float | str) -> Tensor:
        """P (1, H, N, N) of a registered attention; of linear ones by their features, which is the quicker way."""
        features = self.features(name, s, **options)
        if features is not None:
            return reference.kernel_matrix(*features)
        return self._build(name, options).attention_matrix(*self.scaled(s))

    def _build(self, name: str, options: dict) -> Attention:
        sizes = {"num_heads": self.heads, "head_dim": HEAD_DIM, "max_positions": self.tokens}
        return build_attention(name, **sizes, **options).double().eval()


def spread(low: float, high: float, points: int) -> list[float]:
    """Numbers at equal ratios, both ends included."""
    return torch.linspace(math.log(low), math.log(high), points, dtype=torch.float64).exp().tolist()
