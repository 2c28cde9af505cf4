"""TransNormer T1: ReLU attention in blocks in early layers, normalised linear attention with φ = elu in later ones.

Qin et al. 2022, "The Devil in Linear Transformer", arXiv 2210.10340; details as in the authors' code.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from lln_fairseq.attention.registry import Attention, option, register_attention
from lln_fairseq.ops.dtypes import compute_dtype, without_autocast
from lln_fairseq.ops.padding import clear_padding

EPSILON = 1e-12  # of a mean square: an output of 0 stays 0


@dataclass
class TransNormerConfig:
    block_size: int = option(64, "tokens in a block of the local layers", at_least=1)
    local_layers: int | None = option(
        None, "layers with local attention, the first ones; default: half of them", at_least=0
    )


class TransNormerAttention(Attention):
    """DiagAttention in the first half of the layers, NormAttention, φ(q) (φ(k)ᵀ v) / RMS, in the others.

    The RMS is taken over all heads of a token, so NormAttention has no attention matrix and no dropout of weights. It
    has no gain: the output projection that follows can hold any. An attention that no encoder has placed is a later
    layer.
    """

    config: TransNormerConfig
    features: Callable[[Tensor], Tensor]  # φ of NormAttention
    local_has_matrix = False

    def __init__(
        self, config: TransNormerConfig, num_heads: int, head_dim: int, max_positions: int, dropout: float
    ) -> None:
        super().__init__(config, num_heads, head_dim, max_positions, dropout)
        self.place(0, 1)

    def place(self, layer: int, layers: int) -> None:
        local_layers = layers // 2 if self.config.local_layers is None else self.config.local_layers
        self.is_local = layer < local_layers
        self.has_matrix = self.stochastic_rows = self.is_local and self.local_has_matrix

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        q, k, v = clear_padding(q, k, v, key_padding_mask)
        if self.is_local:
            return self.local_attention(q, k, v, key_padding_mask)
        return norm_attention(q, k, v, self.features, key_padding_mask)

    def local_attention(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """DiagAttention: attention inside blocks of tokens."""
        raise NotImplementedError

    def attention_matrix(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """P where there is one; otherwise ValueError."""
        raise ValueError("an output that is normalised over the heads has no single attention matrix")


@register_attention("transnormer_t1", TransNormerConfig)
class TransNormerT1Attention(TransNormerAttention):
    """ReLU(q·k/√D) in blocks without a denominator (ReLA), normalised like the linear layers; φ = elu."""

    features = staticmethod(F.elu)

    def local_attention(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        return block_relu_attention(q, k, v, self.config.block_size, self.active_dropout)


@without_autocast
def norm_attention(
    q: Tensor, k: Tensor, v: Tensor, features: Callable[[Tensor], Tensor], key_padding_mask: Tensor | None
) -> Tensor:
    """Return RMSNorm(φ(q) (φ(k)ᵀ v)) of (B, H, N, D) in linear time, without a denominator that could vanish.

    Computed in float32 (float64 for float64 inputs). Padded values must be 0.
    """
    dtype = compute_dtype(v.dtype)
    phi_q, phi_k = features(q.to(dtype)), features(k.to(dtype))
    if key_padding_mask is not None:
        phi_k = phi_k.masked_fill(key_padding_mask[:, None, :, None], 0.0)
    return rms_norm_over_heads(phi_q @ (phi_k.mT @ v.to(dtype))).to(v.dtype)


@without_autocast
def block_relu_attention(q: Tensor, k: Tensor, v: Tensor, block_size: int, dropout_p: float) -> Tensor:
    """Return RMSNorm(ReLU(q kᵀ / √D) v) inside blocks of tokens (ReLA, arXiv 2104.07012); the last may be shorter.

    dropout_p is the probability of dropping a weight. A row without a positive score gives 0. Padded values must be 0.
    """
    dtype, length = compute_dtype(v.dtype), v.shape[-2]
    block_size = min(block_size, length)

    def blocks(x: Tensor) -> Tensor:
        return F.pad(x.to(dtype), (0, 0, 0, -length % block_size)).unflatten(-2, (-1, block_size))

    weights = F.dropout((blocks(q) @ blocks(k).mT * q.shape[-1] ** -0.5).relu(), dropout_p)
    out = (weights @ blocks(v)).flatten(-3, -2)[..., :length, :]
    return rms_norm_over_heads(out).to(v.dtype)


def rms_norm_over_heads(x: Tensor) -> Tensor:
    """Return x / RMS(x), the root mean square over the heads and features of a token, (B, H, N, D)."""
    return x * (x.square().mean(dim=(1, 3), keepdim=True) + EPSILON).rsqrt()
