"""LLN and block-diagonal attention as plain operations, differentiable any number of times, at linear cost.

For second derivatives, for what records or imitates operations (tracing, export, transforms, tensors without data), and
for tensors without an element. Several times the memory and time of the backends.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lln_fairseq.ops.backends import Mixture
from lln_fairseq.ops.dtypes import compute_dtype
from lln_fairseq.ops.linear_attention import balanced_features, linear_attention
from lln_fairseq.ops.padding import clear_padding


def mixture_formula(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, mask: Tensor | None, mix: Mixture
) -> Tensor:
    """The mixture for q, k, v (B, H, N, D), alpha and beta (B, H), mask bool (B, N) or None, in the dtype of q."""
    dtype = compute_dtype(q.dtype)
    x, y, values = clear_padding(q.to(dtype), k.to(dtype), v.to(dtype), mask)
    out = torch.zeros_like(values)
    if mix.lln_weight:
        features = balanced_features(alpha[..., None, None] * x, beta[..., None, None] * y, mask)
        out = out + mix.lln_weight * linear_attention(*features, values, mask)
    if mix.diag_weight:
        out = out + mix.diag_weight * _block_diag(x, y, values, mask, mix)
    return out.to(q.dtype)


def _block_diag(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, mix: Mixture) -> Tensor:
    """softmax(q kᵀ / √D) v inside blocks; 0 in a block without a real key."""
    length = q.shape[2]
    size = max(1, min(mix.block_size, length))
    count = -(-length // size)
    padding = q.new_zeros(q.shape[0], length, dtype=torch.bool) if mask is None else mask
    padding = F.pad(padding, (0, count * size - length), value=True).unflatten(1, (count, size))[:, None, :, None]
    q, k, v = (F.pad(x, (0, 0, 0, count * size - length)).unflatten(2, (count, size)) for x in (q, k, v))
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(padding, torch.finfo(q.dtype).min)
    weights = F.dropout(scores.softmax(dim=-1).masked_fill(padding, 0.0), mix.dropout_p)
    return (weights @ v).flatten(2, 3)[:, :, :length]
