"""FLASH: gated attention units, quadratic in chunks and linear between them (Hua et al. 2022, arXiv 2202.10447)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lln_fairseq.attention.layers import EncoderLayer, register_layer
from lln_fairseq.attention.registry import option
from lln_fairseq.ops.dtypes import compute_dtype

FORMS = ("chunked", "quadratic")
INITIAL = 0.02  # standard deviation
EXPANSION = 2  # e / d


@dataclass
class FlashConfig:
    form: str = option("chunked", "chunks and linear attention (FLASH), or every pair of tokens (FLASH-Quad)", FORMS)
    chunk_size: int = option(256, "c, tokens in a chunk; distances from c on share a bias", at_least=1)
    key_dim: int = option(128, "s, features of queries and keys, an even number", at_least=2)
    units: int = option(2, "gated attention units in place of a layer; two have its parameters", at_least=1)


class GatedAttentionUnit(nn.Module):
    """GAU (section 3 of the paper), one head: o = (U ∘ A V) W_o for normalised tokens x̂ (B, N, d).

        U = SiLU(x̂ W_u), V = SiLU(x̂ W_v) (B, N, e), e = 2 d;  Z = SiLU(x̂ W_z) (B, N, s)
        Q = R(Z ∘ γ_q + β_q), K = R(Z ∘ γ_k + β_k), R the rotary embedding of the positions
        quadratic    A = relu²(Q Kᵀ / n + b)
        chunked      A = relu²(Q Kᵀ / c + b) inside chunks of c tokens, plus Q' K'ᵀ / n over the whole sequence, where
                     Q', K' are made like Q, K; it goes by way of K'ᵀ V, and so the cost is linear in N

    n is the number of real tokens of a sequence, b a learned bias of the distance i - j. V is 0 at padding.
    """

    def __init__(self, config: FlashConfig, dim: int, attention_dropout: float, activation_dropout: float) -> None:
        super().__init__()
        if config.key_dim % 2:
            raise ValueError(f"attention 'flash': key_dim must be even, got {config.key_dim}")
        self.config, self.attention_dropout, self.activation_dropout = config, attention_dropout, activation_dropout
        self.layer_norm = nn.LayerNorm(dim)
        self.gate_proj, self.value_proj = (nn.Linear(dim, EXPANSION * dim) for _ in range(2))
        self.shared_proj, self.out_proj = nn.Linear(dim, config.key_dim), nn.Linear(EXPANSION * dim, dim)
        kinds = 2 if config.form == "quadratic" else 4  # Q, K, Q', K'
        self.scales = nn.Parameter(INITIAL * torch.randn(kinds, config.key_dim))
        self.offsets = nn.Parameter(torch.zeros(kinds, config.key_dim))
        self.distance_bias = nn.Parameter(INITIAL * torch.randn(2 * config.chunk_size - 1))

    def forward(self, x: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """(B, N, d), (B, N) -> (B, N, d)"""
        x = self.layer_norm(x)
        gate, v, shared = (F.silu(proj(x)) for proj in (self.gate_proj, self.value_proj, self.shared_proj))
        count = torch.full((len(x), 1, 1), x.shape[1], dtype=compute_dtype(x.dtype), device=x.device)  # n
        if key_padding_mask is not None:
            v = v.masked_fill(key_padding_mask[:, :, None], 0.0)
            count = (~key_padding_mask).sum(dim=1).clamp(min=1).to(count.dtype)[:, None, None]
        rows = rotated(shared[:, :, None] * self.scales + self.offsets).unbind(dim=2)
        if self.config.form == "quadratic":
            attended = self._weights(rows[0], rows[1], 1 / count) @ v
        else:
            root = count.rsqrt().to(v.dtype)  # of each factor, far from the limits of half precision
            attended = self._in_chunks(rows[0], rows[1], v) + rows[2] @ ((rows[3] * root).mT @ (v * root))
        return self.out_proj(F.dropout(gate * attended, self.activation_dropout, self.training))

    def _in_chunks(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A V of the chunks, (B, N, e); those of a shorter sequence are no longer than it."""
        length = v.shape[1]
        width = min(self.config.chunk_size, length)
        q, k, v = (F.pad(x, (0, 0, 0, -length % width)).unflatten(1, (-1, width)) for x in (q, k, v))
        return (self._weights(q, k, 1 / self.config.chunk_size) @ v).flatten(1, 2)[:, :length]

    def _weights(self, q: Tensor, k: Tensor, factor: Tensor | float) -> Tensor:
        """relu²(Q Kᵀ · factor + b), (..., M, M), with attention dropout."""
        furthest = self.config.chunk_size - 1
        index = torch.arange(q.shape[-2], device=q.device)
        distance = (index[:, None] - index).clamp(-furthest, furthest)
        weights = (q @ k.mT * factor + self.distance_bias[distance + furthest]).relu().square()
        return F.dropout(weights, self.attention_dropout, self.training).to(q.dtype)


@register_layer("flash", FlashConfig)
class FlashLayer(EncoderLayer):
    """Gated attention units and nothing else: a unit is attention and feed-forward part in one.

    Published models have twice RoBERTa's layers, of one unit each: as many units as RoBERTa's number of two each.
    """

    def __init__(
        self, config: FlashConfig, dim: int, dropout: float, attention_dropout: float, activation_dropout: float
    ) -> None:
        units = (GatedAttentionUnit(config, dim, attention_dropout, activation_dropout) for _ in range(config.units))
        super().__init__(units, dropout)


def rotated(x: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021, arXiv 2104.09864) of x (B, N, kinds, s), s even.

    At position i the features f and f + s/2 turn by the angle i · 10000^(-2f/s).
    """
    half = x.shape[-1] // 2
    position, number = (torch.arange(n, device=x.device).to(compute_dtype(x.dtype)) for n in (x.shape[1], half))
    angle = (position[:, None] * 10000.0 ** (-number / half))[:, None]
    first, second = x[..., :half], x[..., half:]
    turned = (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin())
    return torch.cat(turned, dim=-1).to(x.dtype)
