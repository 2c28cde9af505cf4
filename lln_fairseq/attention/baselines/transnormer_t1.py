"""TransNormer T1: ReLU attention within blocks in early layers, normalized linear attention with φ = elu in later ones.

Qin et al. 2022, "The Devil in Linear Transformer", arXiv 2210.10340. Details follow the authors' code.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from lln_fairseq.attention.context import NO_CONTEXT, Context
from lln_fairseq.attention.registry import Attention, option, register_attention
from lln_fairseq.ops.autocast import without_autocast
from lln_fairseq.ops.formula import clear_padding, compute_dtype

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

    DiagAttention is attention within blocks, which the subclass defines. NormAttention is φ(q) (φ(k)ᵀ v), divided by
    its root mean square over all heads of a token. NormAttention therefore has no attention matrix, and attention
    dropout does not apply to it. The norm has no learned gain, because the output projection that follows can represent
    any gain.

    The option `local_layers` sets another number of layers with DiagAttention. Until an encoder calls `set_depth`, the
    attention acts like the only layer of an encoder, which has NormAttention unless `local_layers` is 1 or more.
    """

    config: TransNormerConfig
    local_has_matrix = False  # DiagAttention has an attention matrix whose rows sum to 1

    def __init__(
        self, config: TransNormerConfig, num_heads: int, head_dim: int, max_positions: int, dropout: float
    ) -> None:
        super().__init__(config, num_heads, head_dim, max_positions, dropout)
        self.set_depth(0, 1)

    def set_depth(self, layer: int, layers: int) -> None:
        """Choose DiagAttention or NormAttention for this layer, and set has_matrix and rows_sum_to_one accordingly.

        The first `local_layers` layers have DiagAttention; by default these are half of the layers, rounded down.
        """
        local_layers = self.config.local_layers
        if local_layers is None:
            local_layers = layers // 2
        self.is_local = layer < local_layers
        self.has_matrix = self.is_local and self.local_has_matrix
        self.rows_sum_to_one = self.has_matrix

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        q, k, v = clear_padding(q, k, v, context.padding)
        if self.is_local:
            return self.local_attention(q, k, v, context.padding)
        return norm_attention(q, k, v, self.features, context.padding)

    def features(self, x: Tensor) -> Tensor:
        """Compute φ of NormAttention elementwise, for queries or keys x (B, H, N, D) in float32 or float64."""
        raise NotImplementedError

    def local_attention(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> Tensor:
        """Compute DiagAttention, which is attention within blocks of tokens. The keys and values of padding are 0."""
        raise NotImplementedError


@register_attention("transnormer_t1", TransNormerConfig)
class TransNormerT1Attention(TransNormerAttention):
    """TransNormer with φ = elu. Its DiagAttention has the weights ReLU(q·k/√D) within blocks (ReLA).

    These weights are not divided by their sum. Instead, the output is divided by its root mean square over all heads of
    a token, as in NormAttention.
    """

    def features(self, x: Tensor) -> Tensor:
        return F.elu(x)

    def local_attention(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> Tensor:
        return block_relu_attention(q, k, v, self.config.block_size, self.active_dropout)


@without_autocast
def norm_attention(
    q: Tensor, k: Tensor, v: Tensor, features: Callable[[Tensor], Tensor], padding: Tensor | None
) -> Tensor:
    """Compute NormAttention, RMSNorm(φ(q) (φ(k)ᵀ v)), in linear time. The norm is over all heads of a token.

    φ, which must be elementwise, is called with float32 tensors, or with float64 tensors if v is float64. v must be 0
    at padding; φ(k) is set to 0 there.
    """
    dtype = compute_dtype(v.dtype)
    phi_q = features(q.to(dtype))
    phi_k = features(k.to(dtype))
    if padding is not None:
        phi_k = phi_k.masked_fill(padding[:, None, :, None], 0.0)
    return rms_norm_over_heads(phi_q @ (phi_k.mT @ v.to(dtype))).to(v.dtype)


@without_autocast
def block_relu_attention(q: Tensor, k: Tensor, v: Tensor, block_size: int, dropout_p: float) -> Tensor:
    """Compute RMSNorm(ReLU(q kᵀ / √D) v) within blocks of tokens (ReLA, arXiv 2104.07012), in the dtype of v.

    The computation is in float32, or in float64 if v is float64. At padding, q and k must be finite and v must be 0.
    The norm is over all heads of a token. The output is 0 for a token without a positive score in any head. The last
    block may be shorter. Dropout applies whenever `dropout_p` is not 0, also in evaluation.
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
    """Divide x (B, H, N, D) by its root mean square over the heads and features of each token. A token of 0 stays 0."""
    return x * (x.square().mean(dim=(1, 3), keepdim=True) + EPSILON).rsqrt()
