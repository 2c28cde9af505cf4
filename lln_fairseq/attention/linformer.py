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
    """The options of Linformer."""

    projected_length: int = option(256, "projected keys of a sequence; at most the longest sequence", at_least=1)
    sharing: str = option(
        "headwise",
        "none: E and F for every head; headwise: one E and one F for a layer; key_value: one E = F for a layer",
        SHARING,
    )


@register_attention("linformer", LinformerConfig)
class LinformerAttention(Attention):
    """Compute softmax(q (E k)ᵀ / √D) F v with learned matrices E and F, each (M, max_positions) (eq. 7 of the paper).

    M is `projected_length`, or max_positions if that is smaller. Column j of E and F belongs to token j. So a model
    cannot process sequences longer than max_positions, and columns beyond the longest training sequence stay untrained.
    Padded keys and values count as 0. Attention dropout applies to the weights of the projected keys.

    E and F are initialized from N(0, 1/M), the random projections of Theorem 1. The paper also describes projections
    that all layers share; here every layer has its own.

    Raises (in `forward`):
        ValueError: if a sequence is longer than max_positions.
    """

    config: LinformerConfig
    rows_sum_to_one = False  # F is an arbitrary matrix

    def __init__(
        self, config: LinformerConfig, num_heads: int, head_dim: int, max_positions: int, dropout: float
    ) -> None:
        super().__init__(config, num_heads, head_dim, max_positions, dropout)
        projected_length = min(config.projected_length, max_positions)
        num_matrices = num_heads if config.sharing == "none" else 1
        shape = (num_matrices, projected_length, max_positions)
        self.key_projection = nn.Parameter(torch.randn(shape) * projected_length**-0.5)
        self.value_projection = None
        if config.sharing != "key_value":
            self.value_projection = nn.Parameter(torch.randn(shape) * projected_length**-0.5)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        q, k, v = clear_padding(q, k, v, key_padding_mask)
        key_projection, value_projection = self._projections(q)
        projected_k = self._project(key_projection, k)
        projected_v = self._project(value_projection, v)
        return softmax_attention(q, projected_k, projected_v, dropout_p=self.active_dropout)

    def _projections(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first N columns of E and F, for queries q (B, H, N, D).

        Returns:
            E and F, each (H, M, N) in the dtype of q, or (1, M, N) if the heads share them.

        Raises:
            ValueError: if N exceeds max_positions.
        """
        length = q.shape[2]
        if length > self.max_positions:
            raise ValueError(f"linformer was built for {self.max_positions} tokens, got {length}")
        value_projection = self.value_projection
        if value_projection is None:
            value_projection = self.key_projection
        return self.key_projection[..., :length].to(q.dtype), value_projection[..., :length].to(q.dtype)

    @staticmethod
    def _project(weights: Tensor, x: Tensor) -> Tensor:
        """Multiply the keys or values of each head by a projection.

        Args:
            weights: the projections (H, M, N), or (1, M, N) for all heads.
            x: keys or values (B, H, N, D).

        Returns:
            (B, H, M, D).
        """
        if weights.shape[0] > 1:
            return torch.einsum("hkn,bhnd->bhkd", weights, x)
        # One matrix product for all heads.
        return torch.einsum("kn,bhnd->bhkd", weights[0], x)
