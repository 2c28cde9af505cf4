"""Softmax attention over padded batches by torch's fused kernel, shared by every mechanism that is softmax in parts."""

import torch.nn.functional as F
from torch import Tensor


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None, dropout_p: float = 0.0
) -> Tensor:
    """softmax(q kᵀ / √D) v over the keys that are not padded.

    Args:
        q: (B, H, M, D); k, v: (B, H, N, D), any strides.
        key_padding_mask: bool (B, N), True = padded.
        dropout_p: probability of dropping an attention weight.

    Returns: (B, H, M, D); 0 for a sequence without a real key.
    """
    if key_padding_mask is None:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p)
    # A sequence that is all padding keeps all its keys here: its softmax would otherwise be 0/0.
    empty = key_padding_mask.all(dim=1)
    allowed = ~key_padding_mask | empty[:, None]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed[:, None, None, :], dropout_p=dropout_p)
    return out.masked_fill(empty[:, None, None, None], 0.0)
