"""Linformer: softmax attention to learned projections of the keys and values (Wang et al. 2020, arXiv 2006.04768)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lln_fairseq.attention.registry import Attention, option, register_attention
from lln_fairseq.ops.padding import clear_padding
from lln_fairseq.ops.softmax import softmax_attention

SHARING = ("none", "headwise", "key_value")


@dataclass
class LinformerConfig:
    projected_length: int = option(256, "k, the projected keys of a sentence; at most the longest sentence", at_least=1)
    sharing: str = option(
        "headwise", "E, F of every head, of a layer (headwise), or one E = F of a layer (key_value)", SHARING
    )


@register_attention("linformer", LinformerConfig)
class LinformerAttention(Attention):
    """softmax(q (E k)ᵀ / √D) F v with learned E, F (k, max_positions) (eq. 7), k of order 256 for any length.

    Token j is weighed by column j, so a model has its longest sentence built in, and needs its E and F trained there.
    Padded keys and values count as 0: a short sentence sees the first columns. Attention dropout applies to the weights
    of the projected keys. E and F start from N(0, 1/k), the random projections of Theorem 1. The paper's layerwise
    sharing is out of reach of one attention.
    """

    config: LinformerConfig
    stochastic_rows = False  # F is any matrix

    def __init__(
        self, config: LinformerConfig, num_heads: int, head_dim: int, max_positions: int, dropout: float
    ) -> None:
        super().__init__(config, num_heads, head_dim, max_positions, dropout)
        rows = min(config.projected_length, max_positions)
        shape = (num_heads if config.sharing == "none" else 1, rows, max_positions)
        self.key_projection = nn.Parameter(torch.randn(shape) * rows**-0.5)
        separate = config.sharing != "key_value"
        self.value_projection = nn.Parameter(torch.randn(shape) * rows**-0.5) if separate else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        q, k, v = clear_padding(q, k, v, key_padding_mask)
        e, f = self._projections(q)
        return softmax_attention(q, self._project(e, k), self._project(f, v), dropout_p=self.active_dropout)

    def attention_matrix(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """softmax(q (E k)ᵀ / √D) F, with the columns of E and F that meet padding set to 0 instead of k and v."""
        e, f = self._projections(q)
        if key_padding_mask is not None:
            real = (~key_padding_mask).to(q.dtype)[:, None, None, :]
            e, f = e * real, f * real
        return (q @ (e @ k).mT / self.head_dim**0.5).softmax(dim=-1) @ f

    def _projections(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """E, F (H or 1, k, N) for the length and dtype of x."""
        if x.shape[2] > self.max_positions:
            raise ValueError(f"linformer was built for {self.max_positions} tokens, got {x.shape[2]}")
        e = self.key_projection
        f = e if self.value_projection is None else self.value_projection
        return e[..., : x.shape[2]].to(x.dtype), f[..., : x.shape[2]].to(x.dtype)

    @staticmethod
    def _project(weights: Tensor, x: Tensor) -> Tensor:
        """(H or 1, k, N), (B, H, N, D) -> (B, H, k, D), as one product for all that share the weights."""
        if weights.shape[0] > 1:
            return torch.einsum("hkn,bhnd->bhkd", weights, x)
        return torch.einsum("kn,bhnd->bhkd", weights[0], x)
