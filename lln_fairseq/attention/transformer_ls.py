"""Transformer-LS: softmax over a few learned mixtures of all keys and a window (Zhu et al. 2021, arXiv 2107.02192)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lln_fairseq.attention.registry import Attention, option, register_attention
from lln_fairseq.ops.dtypes import compute_dtype
from lln_fairseq.ops.padding import clear_padding, explicit_mask


@dataclass
class TransformerLSConfig:
    window: int = option(
        8, "w, tokens in a chunk of queries, which sees w // 2 keys beyond each of its ends", at_least=1
    )
    rank: int = option(32, "r, learned mixtures of the keys and of the values for each head", at_least=1)


@register_attention("transformer_ls", TransformerLSConfig)
class TransformerLSAttention(Attention):
    """One softmax over r projected keys and the window: softmax(q [K̄; K_w]ᵀ / √D) [V̄; V_w] (eqs. 4 to 7).

        K = LN_L(k), V = LN_L(v);  P = softmax over the tokens of k W_p;  K̄ = LN_S(Pᵀ K), V̄ = LN_S(Pᵀ V)

    Both norms are over all heads of a token, and are shared by keys and values. W_p (H D, H r) sees the keys of all
    heads, where the paper's sees the layer's input x: k = x W_k, so both can learn the same mixtures. Padding is in no
    mixture and in no window. Attention dropout acts on the one softmax.
    """

    config: TransformerLSConfig
    has_matrix = stochastic_rows = False  # the norms mix the heads of a value

    def __init__(
        self, config: TransformerLSConfig, num_heads: int, head_dim: int, max_positions: int, dropout: float
    ) -> None:
        super().__init__(config, num_heads, head_dim, max_positions, dropout)
        self.dynamic_proj = nn.Linear(num_heads * head_dim, num_heads * config.rank, bias=False)
        self.long_norm = nn.LayerNorm(num_heads * head_dim)  # LN_L
        self.short_norm = nn.LayerNorm(num_heads * head_dim)  # LN_S

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        if not q.numel():
            return torch.zeros_like(v)
        q, k, v = clear_padding(q, k, v, key_padding_mask)
        key_padding_mask = explicit_mask(key_padding_mask, q)
        weights = self._projection(k, key_padding_mask)
        k, v = (_normalised(self.long_norm, x) for x in (k, v))
        k_short, v_short = (_normalised(self.short_norm, weights.mT @ x) for x in (k, v))
        q = q * self.head_dim**-0.5
        far, near = q @ k_short.mT, self._window_scores(q, k, key_padding_mask)
        attention = torch.cat([far, near], dim=-1)
        attention = attention.softmax(dim=-1, dtype=compute_dtype(q.dtype)).to(q.dtype)
        attention = F.dropout(attention, self.active_dropout)
        far, near = attention.split([self.config.rank, attention.shape[-1] - self.config.rank], dim=-1)
        out = far @ v_short + self._window_values(near, v)
        return out.masked_fill(key_padding_mask.all(dim=1)[:, None, None, None], 0.0).to(q.dtype)

    def _projection(self, k: Tensor, padding: Tensor) -> Tensor:
        """P (B, H, N, r): every column a softmax over the real tokens."""
        scores = F.linear(k.transpose(1, 2).flatten(2), self.dynamic_proj.weight.to(k.dtype))
        scores = scores.unflatten(-1, (self.num_heads, self.config.rank))
        # A sequence without a real token keeps all: its softmax would otherwise be 0/0.
        padding = padding & ~padding.all(dim=1, keepdim=True)
        scores = scores.masked_fill(padding[:, :, None, None], -torch.inf)
        return scores.softmax(dim=1, dtype=compute_dtype(k.dtype)).to(k.dtype).transpose(1, 2)

    def _window_scores(self, q: Tensor, k: Tensor, padding: Tensor) -> Tensor:
        """(B, H, N, w + 2 (w // 2)): every query over the keys of its window, -inf where there is no real one."""
        scores = self._chunks(q) @ self._windows(k)
        missing = self._windows(padding[:, None, :, None], outside=True)[..., 0, :]  # (B, 1, chunks, keys)
        scores = scores.masked_fill(missing[..., None, :], -torch.inf)
        return scores.flatten(2, 3)[:, :, : q.shape[2]]

    def _window_values(self, attention: Tensor, v: Tensor) -> Tensor:
        """(B, H, N, keys), (B, H, N, D) -> (B, H, N, D)"""
        out = self._chunks(attention) @ self._windows(v).mT
        return out.flatten(2, 3)[:, :, : v.shape[2]]

    def _chunks(self, x: Tensor) -> Tensor:
        """(B, H, N, F) -> (B, H, chunks, w, F), with 0 behind the end."""
        tail = -x.shape[2] % self.config.window
        return F.pad(x, (0, 0, 0, tail)).unflatten(2, (-1, self.config.window))

    def _windows(self, x: Tensor, outside: float = 0.0) -> Tensor:
        """(B, H, N, F) -> (B, H, chunks, F, keys): what each chunk of queries sees, `outside` beyond the ends."""
        width, reach = self.config.window, self.config.window // 2
        tail = -x.shape[2] % width
        return F.pad(x, (0, 0, reach, reach + tail), value=outside).unfold(2, width + 2 * reach, width)

    def attention_matrix(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Always ValueError."""
        raise ValueError("an output of values that are normalised over the heads has no single attention matrix")


def _normalised(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """A layer norm over the heads and features of x (B, H, N, D), computed in float32 at least."""
    tokens = x.transpose(1, 2).flatten(2)
    tokens, weight, bias = (y.to(compute_dtype(x.dtype)) for y in (tokens, norm.weight, norm.bias))
    out = F.layer_norm(tokens, norm.normalized_shape, weight, bias, norm.eps).to(x.dtype)
    return out.unflatten(-1, x.shape[1::2]).transpose(1, 2)
