"""The two attentions of TransNormer that normalise their output instead of their rows (arXiv 2210.10340)."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from lln_fairseq.ops.dtypes import compute_dtype, without_autocast

EPSILON = 1e-12  # of a mean square: an output of 0 stays 0


@without_autocast
def norm_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    features: Callable[[Tensor], Tensor],
    key_padding_mask: Tensor | None = None,
) -> Tensor:
    """NormAttention: RMSNorm(φ(q) (φ(k)ᵀ v)), in linear time and without a denominator that could vanish.

    Args:
        q, k, v: (B, H, N, D), computed in float32 (float64 for float64 inputs); key_padding_mask: bool (B, N).
        features: φ, of any sign, elementwise.

    Returns: (B, H, N, D) in the dtype of v; 0 for a sequence without a real key.
    """
    dtype = compute_dtype(v.dtype)
    phi_q, phi_k, values = features(q.to(dtype)), features(k.to(dtype)), v.to(dtype)
    if key_padding_mask is not None:
        padded = key_padding_mask[:, None, :, None]
        phi_k, values = phi_k.masked_fill(padded, 0.0), values.masked_fill(padded, 0.0)
    return rms_norm_over_heads(phi_q @ (phi_k.mT @ values)).to(v.dtype)


@without_autocast
def block_relu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_size: int,
    key_padding_mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """RMSNorm(ReLU(q kᵀ / √D) v) inside blocks of tokens (ReLA, arXiv 2104.07012); the last block may be shorter.

    Args, returns: as `norm_attention`; dropout_p is the probability of dropping a weight. 0 without a positive score.
    """
    dtype, length = compute_dtype(v.dtype), v.shape[-2]
    block_size = min(block_size, length)
    if key_padding_mask is not None:
        padded = key_padding_mask[:, None, :, None]
        k, v = k.masked_fill(padded, 0.0), v.masked_fill(padded, 0.0)  # a score of 0 is a weight of 0

    def blocks(x: Tensor) -> Tensor:
        return F.pad(x.to(dtype), (0, 0, 0, -length % block_size)).unflatten(-2, (-1, block_size))

    weights = F.dropout((blocks(q) @ blocks(k).mT * q.shape[-1] ** -0.5).relu(), dropout_p)
    out = (weights @ blocks(v)).flatten(-3, -2)[..., :length, :]
    return rms_norm_over_heads(out).to(v.dtype)


def rms_norm_over_heads(x: Tensor) -> Tensor:
    """x / RMS(x), the root mean square over the heads and features of a token, (B, H, N, D)."""
    return x * (x.square().mean(dim=(1, 3), keepdim=True) + EPSILON).rsqrt()
