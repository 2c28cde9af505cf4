"""FLASH: gated attention units, quadratic within chunks and linear between them (Hua et al. 2022, arXiv 2202.10447)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lln_fairseq.attention.layers import EncoderLayer, register_layer
from lln_fairseq.attention.registry import option
from lln_fairseq.ops.formula import compute_dtype
from lln_fairseq.ops.rotary import rotary_factors, rotate

FORMS = ("chunked", "quadratic")
INITIAL_STD = 0.02
EXPANSION = 2  # e / d


@dataclass
class FlashConfig:
    form: str = option(
        "chunked", "chunked: chunks plus linear attention (FLASH); quadratic: every pair of tokens (FLASH-Quad)", FORMS
    )
    chunk_size: int = option(256, "c, tokens in a chunk; all distances of c - 1 or more share a bias", at_least=1)
    key_dim: int = option(128, "s, features of queries and keys; must be even", at_least=2)
    units: int = option(2, "gated attention units in a layer; two have the parameters of a RoBERTa layer", at_least=1)


class GatedAttentionUnit(nn.Module):
    """Gated attention unit with one head (section 3 of the paper): o = (U ∘ A V) W_o.

        U = SiLU(x̂ W_u)            V = SiLU(x̂ W_v)            Z = SiLU(x̂ W_z)
        Q = R(Z ∘ γ_q + β_q)       K = R(Z ∘ γ_k + β_k)
        quadratic    A = relu²(Q Kᵀ / n + b)
        chunked      A = relu²(Q Kᵀ / c + b) within chunks of c tokens, plus Q' K'ᵀ / n over the whole sequence

    x̂ holds the normalized tokens (B, N, d). U and V are (B, N, 2 d), Z is (B, N, s). V is set to 0 at padding. R is the
    rotary position embedding, n is the number of tokens of a sequence without padding, and b_ij is a learned bias that
    depends only on the distance i - j. Q' and K' are computed from Z like Q and K, with their own scales γ and
    offsets β. The term Q' K'ᵀ V / n is computed as Q' (K'ᵀ V) / n, so its cost is linear in N.

    Args:
        config: the options of FLASH, among them c (chunk_size) and s (key_dim).
        dim: d, the number of features of a token.
        attention_dropout: dropout probability of the entries of relu²(...).
        activation_dropout: dropout probability of the entries of U ∘ A V.

    Raises:
        ValueError: if key_dim is odd.
    """

    def __init__(self, config: FlashConfig, dim: int, attention_dropout: float, activation_dropout: float) -> None:
        super().__init__()
        if config.key_dim % 2:
            raise ValueError(f"attention 'flash': key_dim must be even, got {config.key_dim}")
        self.config = config
        self.attention_dropout = attention_dropout
        self.activation_dropout = activation_dropout
        self.layer_norm = nn.LayerNorm(dim)
        self.gate_proj = nn.Linear(dim, EXPANSION * dim)
        self.value_proj = nn.Linear(dim, EXPANSION * dim)
        self.shared_proj = nn.Linear(dim, config.key_dim)
        self.out_proj = nn.Linear(EXPANSION * dim, dim)
        num_projections = 4  # Q, K, Q', K'
        if config.form == "quadratic":
            num_projections = 2  # Q, K
        self.scales = nn.Parameter(INITIAL_STD * torch.randn(num_projections, config.key_dim))
        self.offsets = nn.Parameter(torch.zeros(num_projections, config.key_dim))
        self.distance_bias = nn.Parameter(INITIAL_STD * torch.randn(2 * config.chunk_size - 1))

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """Normalize the tokens x (B, N, d) and apply the unit, without the residual connection."""
        x = self.layer_norm(x)
        gate = F.silu(self.gate_proj(x))
        v = F.silu(self.value_proj(x))
        shared = F.silu(self.shared_proj(x))
        num_real = torch.full((len(x), 1, 1), x.shape[1], dtype=compute_dtype(x.dtype), device=x.device)  # n
        if padding is not None:
            v = v.masked_fill(padding[:, :, None], 0.0)
            num_real = (~padding).sum(dim=1).clamp(min=1).to(num_real.dtype)[:, None, None]
        positions = torch.arange(x.shape[1], device=x.device)[:, None]
        factors = rotary_factors(positions, self.config.key_dim, compute_dtype(x.dtype))
        projections = rotate(shared[:, :, None] * self.scales + self.offsets, factors)
        if self.config.form == "quadratic":
            q, k = projections.unbind(dim=2)
            attended = self._weights(q, k, 1 / num_real) @ v
        else:
            q, k, q_linear, k_linear = projections.unbind(dim=2)
            # Both factors of the product are divided by √n, which keeps them within the range of half precision.
            scale = num_real.rsqrt().to(v.dtype)
            attended = self._attend_in_chunks(q, k, v) + q_linear @ ((k_linear * scale).mT @ (v * scale))
        return self.out_proj(F.dropout(gate * attended, self.activation_dropout, self.training))

    def _attend_in_chunks(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute relu²(Q Kᵀ / c + b) V within every chunk of c tokens. A shorter last chunk is divided by c, too."""
        length = v.shape[1]
        width = min(self.config.chunk_size, length)

        def chunks(x: Tensor) -> Tensor:
            return F.pad(x, (0, 0, 0, -length % width)).unflatten(1, (-1, width))

        out = self._weights(chunks(q), chunks(k), 1 / self.config.chunk_size) @ chunks(v)
        return out.flatten(1, 2)[:, :length]

    def _weights(self, q: Tensor, k: Tensor, factor: Tensor | float) -> Tensor:
        """Compute relu²(Q Kᵀ · factor + b), (..., M, M), with dropout, for q, k (..., M, s) of M consecutive tokens."""
        max_distance = self.config.chunk_size - 1
        index = torch.arange(q.shape[-2], device=q.device)
        distance = (index[:, None] - index).clamp(-max_distance, max_distance)
        weights = (q @ k.mT * factor + self.distance_bias[distance + max_distance]).relu().square()
        return F.dropout(weights, self.attention_dropout, self.training).to(q.dtype)


@register_layer("flash", FlashConfig)
class FlashLayer(EncoderLayer):
    """A layer of gated attention units. Each unit replaces both self-attention and the feed-forward part.

    The published models have twice as many layers as RoBERTa, and one unit in each of them. To get as many units with
    RoBERTa's number of layers, a layer has two units by default.
    """

    def __init__(
        self, config: FlashConfig, dim: int, dropout: float, attention_dropout: float, activation_dropout: float
    ) -> None:
        units = [GatedAttentionUnit(config, dim, attention_dropout, activation_dropout) for _ in range(config.units)]
        super().__init__(units, dropout)
