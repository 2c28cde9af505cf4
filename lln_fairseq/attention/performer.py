"""Performer: softmax attention by positive orthogonal random features (Choromanski et al. 2020, arXiv 2009.14794)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lln_fairseq.attention.registry import Attention, option, register_attention
from lln_fairseq.ops import reference
from lln_fairseq.ops.dtypes import compute_dtype
from lln_fairseq.ops.linear_attention import balanced_features
from lln_fairseq.ops.random_features import log_features, random_feature_attention


@dataclass
class PerformerConfig:
    num_features: int = option(256, "random features of a head", at_least=1)
    redraw_every: int = option(1000, "new features after so many training forwards; 0: the first ones stay", at_least=0)


@register_attention("performer", PerformerConfig)
class PerformerAttention(Attention):
    """φ_m(x) = exp(ω_m·x' - |x'|²/2) / √M with x' = x / D^¼: E <φ(q), φ(k)> = exp(q·k / √D) (Lemma 1).

    The features are given by their logarithms, so that nothing overflows and no epsilon is needed. It has no attention
    matrix, so attention dropout does not apply.

    The features change with training alone and are saved with the parameters. What is drawn next depends on a seed,
    taken from torch's global generator on construction, and on the forwards so far; both are saved too: a resumed run
    draws what an uninterrupted one would have drawn, and so do all workers. A model in half precision rounds ω, the
    same ω for queries and keys: other directions by a part in a thousand, not another kernel.
    """

    config: PerformerConfig
    projection: Tensor

    def __init__(
        self, config: PerformerConfig, num_heads: int, head_dim: int, max_positions: int, dropout: float
    ) -> None:
        super().__init__(config, num_heads, head_dim, max_positions, dropout)
        # Python numbers: reading them off a buffer would make a GPU wait in every forward.
        self.seed, self.forwards = int(torch.randint(2**31 - 1, ())), 0
        self.register_buffer("projection", self._draw())

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        out = random_feature_attention(q, k, v, self.omega(q.dtype), key_padding_mask)
        # After the computation and with gradients only: fairseq's activation checkpointing runs a forward once without
        # and once with gradients, and both must see the same features.
        if self.training and torch.is_grad_enabled():
            self._count()
        return out

    def attention_matrix(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        return reference.kernel_matrix(*self.feature_maps(q, k, key_padding_mask), key_padding_mask)

    def feature_maps(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Features (B, H, N, M) with the same P as φ, scaled per query and per feature so that they stay in range."""
        return balanced_features(*log_features(q, k, self.omega(q.dtype)), key_padding_mask)

    def omega(self, dtype: torch.dtype) -> Tensor:
        """ω / D^¼ (D, M) in float32 or float64; a copy, so that drawing anew leaves the graph alone."""
        return self.projection.to(compute_dtype(dtype)).mT * self.head_dim**-0.25

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.seed, self.forwards])

    def set_extra_state(self, state: Tensor) -> None:
        self.seed, self.forwards = state.tolist()

    def _count(self) -> None:
        self.forwards += 1
        if self.config.redraw_every and self.forwards % self.config.redraw_every == 0:
            self.projection.copy_(self._draw())

    def _draw(self) -> Tensor:
        """(M, D): each row standard normal (so the kernel is unbiased), rows of a block of D orthogonal."""
        generator = torch.Generator().manual_seed(self.seed + self.forwards)
        m, dim = self.config.num_features, self.head_dim
        blocks = torch.randn(-(-m // dim), dim, dim, generator=generator, dtype=torch.float64)
        directions, r = torch.linalg.qr(blocks)
        # With the signs of R's diagonal the directions are uniformly distributed.
        directions = (directions * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).mT.flatten(0, 1)[:m]
        lengths = torch.randn(m, dim, generator=generator, dtype=torch.float64).norm(dim=-1, keepdim=True)
        return (directions * lengths).float()
