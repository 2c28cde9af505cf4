"""TransNormer T1: ReLU attention in blocks in the first layers, normalized linear attention in the later layers.

Qin et al. 2022, "The Devil in Linear Transformer", arXiv 2210.10340; details follow the authors' code.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from lln_fairseq.attention.registry import Attention, option, register_attention
from lln_fairseq.ops.dtypes import compute_dtype, without_autocast
from lln_fairseq.ops.padding import clear_padding

EPSILON = 1e-12  # added to mean squares, so that an output of 0 stays 0


@dataclass
class TransNormerConfig:
    """The options of both TransNormers."""

    block_size: int = option(64, "tokens in a block of the local layers", at_least=1)
    local_layers: int | None = option(
        None, "number of layers, from the first one, with local attention; default: half of them", at_least=0
    )


class TransNormerAttention(Attention):
    """Base class of both TransNormers: DiagAttention in the first half of the layers, NormAttention in the second half.

    The subclass defines DiagAttention, which is attention within blocks of tokens. NormAttention is φ(q) (φ(k)ᵀ v),
    divided by its root mean square over all heads and features of a token. So NormAttention has no attention matrix,
    and attention dropout does not apply to it. The norm has no learned gain, because the output projection that follows
    can represent any gain. Until an encoder calls `set_depth`, the attention is NormAttention, or DiagAttention if
    config.local_layers is at least 1.
    """

    config: TransNormerConfig
    local_has_matrix = False  # True if DiagAttention has an attention matrix whose rows sum to 1

    def __init__(
        self, config: TransNormerConfig, num_heads: int, head_dim: int, max_positions: int, dropout: float
    ) -> None:
        super().__init__(config, num_heads, head_dim, max_positions, dropout)
        self.set_depth(0, 1)

    def set_depth(self, layer: int, layers: int) -> None:
        """Select DiagAttention or NormAttention for this layer, and set has_matrix and rows_sum_to_one accordingly.

        DiagAttention is selected for the first `local_layers` layers, or for the first half of the layers if that
        option is None. The half is rounded down. The arguments are those of `Attention.set_depth`.
        """
        local_layers = self.config.local_layers
        if local_layers is None:
            local_layers = layers // 2
        self.is_local = layer < local_layers
        self.has_matrix = self.is_local and self.local_has_matrix
        self.rows_sum_to_one = self.has_matrix

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        q, k, v = clear_padding(q, k, v, key_padding_mask)
        if self.is_local:
            return self.local_attention(q, k, v, key_padding_mask)
        return norm_attention(q, k, v, self.features, key_padding_mask)

    def features(self, x: Tensor) -> Tensor:
        """Return φ(x) of NormAttention, computed elementwise, in the shape and dtype of x (float32 or float64)."""
        raise NotImplementedError

    def local_attention(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """Compute DiagAttention, which is attention within blocks of tokens.

        The arguments and the result are those of `forward`, but `clear_padding` has already cleared q, k and v.
        """
        raise NotImplementedError

    def attention_matrix(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Raise ValueError. A subclass overrides this if its local layers have an attention matrix."""
        raise ValueError("the output is normalized over all heads, so there is no single attention matrix")


@register_attention("transnormer_t1", TransNormerConfig)
class TransNormerT1Attention(TransNormerAttention):
    """TransNormer with φ = elu in NormAttention, and with the weights ReLU(q·k/√D) in DiagAttention.

    These weights have no denominator (ReLA). Instead, the output is divided by its root mean square, as it is in
    NormAttention.
    """

    def features(self, x: Tensor) -> Tensor:
        return F.elu(x)

    def local_attention(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        return block_relu_attention(q, k, v, self.config.block_size, self.active_dropout)


@without_autocast
def norm_attention(
    q: Tensor, k: Tensor, v: Tensor, features: Callable[[Tensor], Tensor], key_padding_mask: Tensor | None
) -> Tensor:
    """Compute RMSNorm(φ(q) (φ(k)ᵀ v)) in linear time, without a denominator that could vanish.

    Args:
        q, k, v: (B, H, N, D). v must be 0 at padding.
        features: φ, elementwise. It is called with float32 tensors, or with float64 tensors if v is float64.
        key_padding_mask: bool (B, N), True = padded, or None. φ(k) is set to 0 at padding.

    Returns:
        (B, H, N, D) in the dtype of v.
    """
    dtype = compute_dtype(v.dtype)
    phi_q = features(q.to(dtype))
    phi_k = features(k.to(dtype))
    if key_padding_mask is not None:
        phi_k = phi_k.masked_fill(key_padding_mask[:, None, :, None], 0.0)
    return rms_norm_over_heads(phi_q @ (phi_k.mT @ v.to(dtype))).to(v.dtype)


@without_autocast
def block_relu_attention(q: Tensor, k: Tensor, v: Tensor, block_size: int, dropout_p: float) -> Tensor:
    """Compute RMSNorm(ReLU(q kᵀ / √D) v) within blocks of tokens (ReLA, arXiv 2104.07012).

    Args:
        q, k, v: (B, H, N, D). v must be 0 at padding.
        block_size: tokens in a block; the last block may be shorter.
        dropout_p: probability of dropping a weight.

    Returns:
        (B, H, N, D) in the dtype of v. It is 0 for a token without a positive score in any head.
    """
    dtype = compute_dtype(v.dtype)
    length = v.shape[-2]
    block_size = min(block_size, length)

    def blocks(x: Tensor) -> Tensor:
        return F.pad(x.to(dtype), (0, 0, 0, -length % block_size)).unflatten(-2, (-1, block_size))

    weights = F.dropout((blocks(q) @ blocks(k).mT * q.shape[-1] ** -0.5).relu(), dropout_p)
    out = (weights @ blocks(v)).flatten(-3, -2)[..., :length, :]
    return rms_norm_over_heads(out).to(v.dtype)


def rms_norm_over_heads(x: Tensor) -> Tensor:
    """Divide each token of x (B, H, N, D) by its root mean square over all heads and features."""
    return x * (x.square().mean(dim=(1, 3), keepdim=True) + EPSILON).rsqrt()
