"""TNN: gated Toeplitz units, tokens mixed by their distance alone (Qin et al. 2023, arXiv 2305.04749)."""

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lln_fairseq.attention.layers import EncoderLayer, register_layer
from lln_fairseq.attention.registry import option
from lln_fairseq.ops.dtypes import compute_dtype, without_autocast

EXPANSION = 3  # width of the Toeplitz unit / d
EPS = 1e-6


@dataclass
class TnnConfig:
    gamma: float = option(0.99, "γ, the factor that a mixing weight loses with each token of distance")
    rpe_layers: int = option(6, "layers of the network that gives the mixing weights", at_least=0)
    rpe_dim: int = option(64, "width of that network", at_least=1)


class WideLinear(nn.Linear):
    """Computes in the dtype of its input, whatever its parameters have."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class RelativePositions(nn.Module):
    """The relative position encoder (section 3.3): a network from a distance k to the weights t_k of every channel.

    RPE(k) = Linear(1, h), then `rpe_layers` times [norm, ReLU, Linear(h, h)], then norm, ReLU, Linear(h, channels).
    Computed in float32, whatever the model has: distances and their squares exceed half precision.
    """

    def __init__(self, config: TnnConfig, channels: int) -> None:
        super().__init__()
        widths = [1, *[config.rpe_dim] * (config.rpe_layers + 1), channels]
        self.layers = nn.ModuleList(itertools.starmap(WideLinear, itertools.pairwise(widths)))

    @without_autocast
    def forward(self, distances: Tensor) -> Tensor:
        """(M) -> (M, channels) float32, float64 for a model in float64"""
        first, *rest = self.layers
        x = first(distances[:, None].to(compute_dtype(next(self.parameters()).dtype)))
        for layer in rest:
            x = layer(rms_normalised(x).relu())
        return x


class GatedToeplitzUnit(nn.Module):
    """GTU (section 3.2): o = (SiLU(x̂ W_u) ∘ T SiLU(x̂ W_v)) W_o for normalised tokens x̂ (B, N, d), width 3 d inside.

    T is a Toeplitz matrix for every channel, T_ij = γ^|i-j| RPE(i - j). The values are 0 at padding.
    """

    def __init__(self, config: TnnConfig, dim: int, activation_dropout: float) -> None:
        super().__init__()
        if not 0 < config.gamma <= 1:
            raise ValueError(f"attention 'tnn': gamma must be above 0 and at most 1, got {config.gamma}")
        self.gamma, self.activation_dropout = config.gamma, activation_dropout
        self.gate_proj, self.value_proj = (nn.Linear(dim, EXPANSION * dim) for _ in range(2))
        self.out_proj = nn.Linear(EXPANSION * dim, dim)
        self.rpe = RelativePositions(config, EXPANSION * dim)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """(B, N, d), (B, N) -> (B, N, d)"""
        x = rms_normalised(x)
        gate, v = F.silu(self.gate_proj(x)), F.silu(self.value_proj(x))
        if key_padding_mask is not None:
            v = v.masked_fill(key_padding_mask[:, :, None], 0.0)
        mixed = toeplitz_product(self.weights(x.shape[1], x.device), v)
        return self.out_proj(F.dropout(gate * mixed, self.activation_dropout, self.training))

    def weights(self, length: int, device: torch.device) -> Tensor:
        """t_k for k = 0 ... N - 1, -N ... -1, (2 N, channels) float32; t_-N is in no product."""
        distances = torch.arange(2 * length, device=device)
        distances = torch.where(distances < length, distances, distances - 2 * length)
        encoded = self.rpe(distances)
        return encoded * (self.gamma ** distances.abs().to(encoded.dtype))[:, None]


class GatedLinearUnit(nn.Module):
    """GLU: (SiLU(x̂ W_1) ∘ x̂ W_2) W_3 for normalised tokens x̂ (B, N, d), width d inside."""

    def __init__(self, dim: int, activation_dropout: float) -> None:
        super().__init__()
        self.activation_dropout = activation_dropout
        self.gate_proj, self.value_proj, self.out_proj = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """(B, N, d) -> (B, N, d); no token sees another."""
        x = rms_normalised(x)
        gated = F.silu(self.gate_proj(x)) * self.value_proj(x)
        return self.out_proj(F.dropout(gated, self.activation_dropout, self.training))


@register_layer("tnn", TnnConfig)
class TnnLayer(EncoderLayer):
    """A gated Toeplitz unit, then a gated linear unit. Distances are all the positions that there are."""

    positions = False

    def __init__(
        self, config: TnnConfig, dim: int, dropout: float, attention_dropout: float, activation_dropout: float
    ) -> None:
        """`attention_dropout` has nothing to act on."""
        units = (GatedToeplitzUnit(config, dim, activation_dropout), GatedLinearUnit(dim, activation_dropout))
        super().__init__(units, dropout)


def toeplitz_product(weights: Tensor, v: Tensor) -> Tensor:
    """o_i = Σ_j t_{i-j} v_j for every channel, by FFT in O(N log N).

    weights (2 N, E): t_0 ... t_{N-1}, anything, t_{-N+1} ... t_{-1}, the first column of a circulant matrix that holds
    the Toeplitz matrix; v (B, N, E). Returns (B, N, E) in the dtype of v, computed in float32 (float64 for float64).
    """
    length = v.shape[1]
    wide = compute_dtype(v.dtype)
    spectrum = torch.fft.rfft(weights.to(wide), dim=0) * torch.fft.rfft(v.to(wide), n=2 * length, dim=1)
    return torch.fft.irfft(spectrum, n=2 * length, dim=1)[:, :length].to(v.dtype)


def rms_normalised(x: Tensor) -> Tensor:
    """x / √(mean of its squares), without a gain; in float32 at least."""
    wide = x.to(compute_dtype(x.dtype))
    return (wide * (wide.square().mean(dim=-1, keepdim=True) + EPS).rsqrt()).to(x.dtype)
