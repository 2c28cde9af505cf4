"""TNN: gated Toeplitz units, which mix tokens by their distance only (Qin et al. 2023, arXiv 2305.04749)."""

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lln_fairseq.attention.layers import EncoderLayer, register_layer
from lln_fairseq.attention.registry import option
from lln_fairseq.ops.autocast import without_autocast
from lln_fairseq.ops.formula import compute_dtype

EXPANSION = 3  # width within the Toeplitz unit / d
EPSILON = 1e-6  # added to mean squares


@dataclass
class TnnConfig:
    gamma: float = option(0.99, "γ, factor by which a mixing weight decays with each token of distance, 0 < γ <= 1")
    rpe_layers: int = option(6, "hidden layers of the network that computes the mixing weights", at_least=0)
    rpe_dim: int = option(64, "width of that network", at_least=1)


class InputDtypeLinear(nn.Linear):
    """A linear layer that computes in the dtype of its input instead of the dtype of its parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class RelativePositionEncoder(nn.Module):
    """The relative position encoder (section 3.3), a network that maps a distance k to one weight for each channel.

    RPE(k) is a Linear(1, h), followed by `rpe_layers` times [norm, ReLU, Linear(h, h)], followed by norm, ReLU and
    Linear(h, E). h is the option `rpe_dim`, and E is the number of `channels`.
    """

    def __init__(self, config: TnnConfig, channels: int) -> None:
        super().__init__()
        widths = [1, *[config.rpe_dim] * (config.rpe_layers + 1), channels]
        self.layers = nn.ModuleList(InputDtypeLinear(before, after) for before, after in itertools.pairwise(widths))

    @without_autocast
    def forward(self, distances: Tensor) -> Tensor:
        """Compute the weights (M, E) of integer distances (M,), in float32, or in float64 for a model in float64.

        Half precision could not represent the distances.
        """
        first, *rest = self.layers
        parameter_dtype = next(self.parameters()).dtype
        x = first(distances[:, None].to(compute_dtype(parameter_dtype)))
        for layer in rest:
            x = layer(rms_norm(x).relu())
        return x


class GatedToeplitzUnit(nn.Module):
    """Gated Toeplitz unit (section 3.2): o = (SiLU(x̂ W_u) ∘ T SiLU(x̂ W_v)) W_o, where x̂ are the normalized tokens.

    Tokens have d = `dim` features, and the unit has E = 3 d channels. Each channel has a Toeplitz matrix
    T_ij = γ^|i-j| RPE(i - j), with the relative position encoder RPE. The values SiLU(x̂ W_v) are 0 at padding.

    Args:
        config: the options of TNN, among them γ (gamma).
        dim: d.
        activation_dropout: dropout probability of the input of W_o.

    Raises:
        ValueError: if gamma is not above 0 and at most 1.
    """

    def __init__(self, config: TnnConfig, dim: int, activation_dropout: float) -> None:
        super().__init__()
        if not 0 < config.gamma <= 1:
            raise ValueError(f"attention 'tnn': gamma must be above 0 and at most 1, got {config.gamma}")
        self.gamma = config.gamma
        self.activation_dropout = activation_dropout
        self.gate_proj = nn.Linear(dim, EXPANSION * dim)
        self.value_proj = nn.Linear(dim, EXPANSION * dim)
        self.out_proj = nn.Linear(EXPANSION * dim, dim)
        self.rpe = RelativePositionEncoder(config, EXPANSION * dim)

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """Normalize the tokens x (B, N, d) and apply the unit, without the residual connection."""
        x = rms_norm(x)
        gate = F.silu(self.gate_proj(x))
        v = F.silu(self.value_proj(x))
        if padding is not None:
            v = v.masked_fill(padding[:, :, None], 0.0)
        mixed = toeplitz_product(self.mixing_weights(x.shape[1], x.device), v)
        return self.out_proj(F.dropout(gate * mixed, self.activation_dropout, self.training))

    def mixing_weights(self, length: int, device: torch.device) -> Tensor:
        """Return t_0 ... t_{N-1}, t_{-N} ... t_{-1} with t_k = γ^|k| RPE(k), (2 N, E), for `toeplitz_product`.

        N is `length`, and t_{-N} is never used. The dtype is float32, or float64 for a model in float64.
        """
        distances = torch.arange(2 * length, device=device)
        distances = torch.where(distances < length, distances, distances - 2 * length)
        encoded = self.rpe(distances)
        return encoded * (self.gamma ** distances.abs().to(encoded.dtype))[:, None]


class GatedLinearUnit(nn.Module):
    """Gated linear unit: (SiLU(x̂ W_1) ∘ x̂ W_2) W_3, where x̂ are the normalized tokens. All three matrices are (d, d).

    Args:
        dim: d, the number of features of a token.
        activation_dropout: dropout probability of the input of W_3.
    """

    def __init__(self, dim: int, activation_dropout: float) -> None:
        super().__init__()
        self.activation_dropout = activation_dropout
        self.gate_proj = nn.Linear(dim, dim)
        self.value_proj = nn.Linear(dim, dim)
        self.out_proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """Normalize the tokens x (B, N, d) and apply the unit to each of them, without the residual connection.

        The mask is ignored, since no token influences another.
        """
        x = rms_norm(x)
        gated = F.silu(self.gate_proj(x)) * self.value_proj(x)
        return self.out_proj(F.dropout(gated, self.activation_dropout, self.training))


@register_layer("tnn", TnnConfig)
class TnnLayer(EncoderLayer):
    """A gated Toeplitz unit followed by a gated linear unit.

    The unit sees positions only as distances between tokens, and the encoder adds no position embeddings. There are no
    attention weights, so `attention_dropout` has no effect.
    """

    positions = False

    def __init__(
        self, config: TnnConfig, dim: int, dropout: float, attention_dropout: float, activation_dropout: float
    ) -> None:
        units = [GatedToeplitzUnit(config, dim, activation_dropout), GatedLinearUnit(dim, activation_dropout)]
        super().__init__(units, dropout)


def toeplitz_product(weights: Tensor, v: Tensor) -> Tensor:
    """Compute o_i = Σ_j t_{i-j} v_j for each of E channels of v (B, N, E). An FFT makes the cost O(N log N).

    The weights (2 N, E) have the rows t_0 ... t_{N-1}, one row of any values, and t_{-N+1} ... t_{-1}. These are the
    first columns of circulant matrices that contain the Toeplitz matrices. The computation is in float32 (float64 for
    float64 values).
    """
    length = v.shape[1]
    dtype = compute_dtype(v.dtype)
    spectrum = torch.fft.rfft(weights.to(dtype), dim=0) * torch.fft.rfft(v.to(dtype), n=2 * length, dim=1)
    return torch.fft.irfft(spectrum, n=2 * length, dim=1)[:, :length].to(v.dtype)


def rms_norm(x: Tensor) -> Tensor:
    """Divide x by its root mean square over the last dimension, without a learned gain, in float32 or float64.

    The result has the dtype of x.
    """
    x_compute = x.to(compute_dtype(x.dtype))
    return (x_compute * (x_compute.square().mean(dim=-1, keepdim=True) + EPSILON).rsqrt()).to(x.dtype)
