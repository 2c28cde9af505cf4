"""Transformer-LS: softmax over a window and a few learned mixtures of all keys (Zhu et al. 2021, arXiv 2107.02192)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lln_fairseq.attention.context import NO_CONTEXT, Context
from lln_fairseq.attention.registry import Attention, option, register_attention
from lln_fairseq.ops.formula import clear_padding, compute_dtype, explicit_mask


@dataclass
class TransformerLSConfig:
    window: int = option(
        8, "w, tokens in a chunk of queries, which also attends to w // 2 keys beyond each of its ends", at_least=1
    )
    rank: int = option(32, "r, learned mixtures of the keys and of the values for each head", at_least=1)


@register_attention("transformer_ls", TransformerLSConfig)
class TransformerLSAttention(Attention):
    """One softmax over r mixtures of all keys and over a window: softmax(q [K̄; K_w]ᵀ / √D) [V̄; V_w] (eqs. 4 to 7).

        K = LN_L(k)                V = LN_L(v)                the normalized keys and values
        P = softmax(k W_p)         over the tokens            the mixing weights, (N, r) for each head
        K̄ = LN_S(Pᵀ K)             V̄ = LN_S(Pᵀ V)             the mixtures

    K_w and V_w are the rows of K and V in the window of the query. The layer norms LN_L and LN_S normalize all heads of
    a token together, and keys and values share them. W_p (H D, H r) is applied to the keys of all heads. The paper
    applies it to the layer's input x; since k = x W_k, both can learn the same mixtures. Padding is left out of the
    mixtures and the windows. Attention dropout applies to the softmax.
    """

    config: TransformerLSConfig
    has_matrix = False  # the norms mix the heads of a value
    rows_sum_to_one = False

    def __init__(
        self, config: TransformerLSConfig, num_heads: int, head_dim: int, max_positions: int, dropout: float
    ) -> None:
        super().__init__(config, num_heads, head_dim, max_positions, dropout)
        self.dynamic_proj = nn.Linear(num_heads * head_dim, num_heads * config.rank, bias=False)  # W_p
        self.long_norm = nn.LayerNorm(num_heads * head_dim)  # LN_L
        self.short_norm = nn.LayerNorm(num_heads * head_dim)  # LN_S

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        if not q.numel():
            return torch.zeros_like(v)
        q, k, v = clear_padding(q, k, v, context.padding)
        padding = explicit_mask(context.padding, q)
        mixing = self._mixing_weights(k, padding)
        k = _norm_over_heads(self.long_norm, k)
        v = _norm_over_heads(self.long_norm, v)
        k_mixed = _norm_over_heads(self.short_norm, mixing.mT @ k)
        v_mixed = _norm_over_heads(self.short_norm, mixing.mT @ v)
        q = q * self.head_dim**-0.5
        scores = torch.cat([q @ k_mixed.mT, self._window_scores(q, k, padding)], dim=-1)
        weights = scores.softmax(dim=-1, dtype=compute_dtype(q.dtype)).to(q.dtype)
        weights = F.dropout(weights, self.active_dropout)
        mixed_weights = weights[..., : self.config.rank]
        window_weights = weights[..., self.config.rank :]
        out = mixed_weights @ v_mixed + self._window_values(window_weights, v)
        return out.masked_fill(padding.all(dim=1)[:, None, None, None], 0.0).to(q.dtype)

    def _mixing_weights(self, k: Tensor, padding: Tensor) -> Tensor:
        """Compute P (B, H, N, r) from the keys before LN_L. Its columns are softmaxes over the tokens without padding.

        In a sequence that contains only padding they are softmaxes over all tokens, as they would otherwise be 0/0.
        """
        scores = F.linear(k.transpose(1, 2).flatten(2), self.dynamic_proj.weight.to(k.dtype))
        scores = scores.unflatten(-1, (self.num_heads, self.config.rank))
        is_excluded = padding & ~padding.all(dim=1, keepdim=True)
        scores = scores.masked_fill(is_excluded[:, :, None, None], -torch.inf)
        return scores.softmax(dim=1, dtype=compute_dtype(k.dtype)).to(k.dtype).transpose(1, 2)

    def _window_scores(self, q: Tensor, k: Tensor, padding: Tensor) -> Tensor:
        """Compute the scores of every query, already divided by √D, for the keys in its window.

        The result is (B, H, N, w + 2 (w // 2)), with -inf at padding and beyond the ends of the sequence.
        """
        scores = self._chunks(q) @ self._windows(k)
        is_missing = self._windows(padding[:, None, :, None], fill=True)[..., 0, :]  # (B, 1, chunks, keys)
        scores = scores.masked_fill(is_missing[..., None, :], -torch.inf)
        return scores.flatten(2, 3)[:, :, : q.shape[2]]

    def _window_values(self, weights: Tensor, v: Tensor) -> Tensor:
        """Return Σ weight · value over the window of every query; the weights are (B, H, N, w + 2 (w // 2))."""
        out = self._chunks(weights) @ self._windows(v).mT
        return out.flatten(2, 3)[:, :, : v.shape[2]]

    def _chunks(self, x: Tensor) -> Tensor:
        """Cut x (B, H, N, F) into chunks of w tokens, (B, H, chunks, w, F). The last chunk is filled up with zeros."""
        tail = -x.shape[2] % self.config.window
        return F.pad(x, (0, 0, 0, tail)).unflatten(2, (-1, self.config.window))

    def _windows(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """Cut x (B, H, N, F) into overlapping windows, (B, H, chunks, F, w + 2 (w // 2)): the tokens come last.

        The window of a chunk contains the tokens of the chunk and w // 2 more on each side. Tokens beyond the ends of
        the sequence have the value `fill`.
        """
        width = self.config.window
        reach = width // 2
        tail = -x.shape[2] % width
        return F.pad(x, (0, 0, reach, reach + tail), value=fill).unfold(2, width + 2 * reach, width)


def _norm_over_heads(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """Normalize the H · D values of each token of x (B, H, N, D) together, in float32 or float64.

    The result has the dtype of x.
    """
    dtype = compute_dtype(x.dtype)
    tokens = x.transpose(1, 2).flatten(2).to(dtype)
    out = F.layer_norm(tokens, norm.normalized_shape, norm.weight.to(dtype), norm.bias.to(dtype), norm.eps).to(x.dtype)
    return out.unflatten(-1, x.shape[1::2]).transpose(1, 2)
