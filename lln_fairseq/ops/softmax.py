"""Softmax attention over padded batches by torch's fused kernel, for mechanisms that use softmax in some part."""

import torch.nn.functional as F
from torch import Tensor


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None, dropout_p: float = 0.0
) -> Tensor:
    """Compute softmax(q kᵀ / √D) v over the keys that are not padding.

    Args:
        q: (B, H, M, D), any strides.
        k, v: (B, H, N, D), any strides.
        key_padding_mask: bool (B, N), True = padded, or None. The values at padding positions must be finite.
        dropout_p: probability of dropping an attention weight, drawn from torch's global generator.

    Returns: (B, H, M, D) in the dtype of v; 0 for a sequence whose keys are all padding.
    """
    if key_padding_mask is None:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p)
    # A sequence that is all padding uses all its keys here, since its softmax would be 0/0, and becomes 0 below.
    empty = key_padding_mask.all(dim=1)
    allowed = ~key_padding_mask | empty[:, None]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed[:, None, None, :], dropout_p=dropout_p)
    return out.masked_fill(empty[:, None, None, None], 0.0)
