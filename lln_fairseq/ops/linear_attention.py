"""Kernel-feature attention in linear time, shared by every mechanism that is a feature map (paper, eq. 4)."""

import torch
from torch import Tensor


def linear_attention(phi_q: Tensor, phi_k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
    """out_i = φ(q_i)ᵀ Σ_j φ(k_j) v_jᵀ / φ(q_i)ᵀ Σ_l φ(k_l), both sums over the keys that are not padded.

    Args:
        phi_q, phi_k: non-negative features (B, H, N, F); v: (B, H, N, D). Summed and divided in float32 or float64.
        key_padding_mask: bool (B, N), True = padded.

    Returns: (B, H, N, D) in the dtype of v; 0 where the normaliser is 0 (no real key, or no feature in common).
    """
    dtype = torch.promote_types(v.dtype, torch.float32)
    phi_q, phi_k, values = phi_q.to(dtype), phi_k.to(dtype), v.to(dtype)
    if key_padding_mask is not None:
        padded = key_padding_mask[:, None, :, None]
        # v too: 0 · inf in a padded row would be NaN.
        phi_k, values = phi_k.masked_fill(padded, 0.0), values.masked_fill(padded, 0.0)
    normaliser = phi_q @ phi_k.sum(dim=-2).unsqueeze(-1)
    out = phi_q @ (phi_k.mT @ values)
    return (out / normaliser.masked_fill(normaliser == 0, 1.0)).to(v.dtype)
