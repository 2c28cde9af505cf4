"""LLN and block-diagonal attention as plain operations, differentiable any number of times, at linear cost.

For second derivatives, for what records or imitates operations (tracing, export, transforms, tensors without data), and
for tensors without an element. Several times the memory and time of the backends.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lln_fairseq.ops.backends import HybridSpec
from lln_fairseq.ops.dtypes import compute_dtype
from lln_fairseq.ops.joint import Blocks, count_blocks, outside_mass, outside_weight
from lln_fairseq.ops.linear_attention import balanced_features, linear_attention
from lln_fairseq.ops.padding import clear_padding, written_out


def hybrid_formula(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, mask: Tensor | None, mix: HybridSpec
) -> Tensor:
    """The mixture for q, k, v (B, H, N, D), alpha and beta (B, H), mask bool (B, N) or None, in the dtype of q."""
    dtype = compute_dtype(q.dtype)
    x, y, values = clear_padding(q.to(dtype), k.to(dtype), v.to(dtype), mask)
    out = torch.zeros_like(values)
    if mix.lln_weight:
        features = balanced_features(alpha[..., None, None] * x, beta[..., None, None] * y, mask)
        if mix.joint:
            return _joint(*features, x, y, values, mask, mix).to(q.dtype)
        out = out + mix.lln_weight * linear_attention(*features, values, mask)
    if mix.diag_weight:
        out = out + mix.diag_weight * _block_diag(x, y, values, mask, mix)
    return out.to(q.dtype)


def _block_diag(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, mix: HybridSpec) -> Tensor:
    """softmax(q kᵀ / √D) v inside blocks; 0 in a block without a real key."""
    length = q.shape[2]
    padding, q, k, v = _blocks(mask, mix.block_size, q, k, v)
    return (_probabilities(q, k, padding, mix) @ v).flatten(2, 3)[:, :, :length]


def _joint(a: Tensor, w: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, mix: HybridSpec) -> Tensor:
    """The joint form: see joint.py. P = A Wᵀ."""
    assert mix.parameter is not None
    length = q.shape[2]
    total = a @ w.sum(dim=2)[..., None]
    a = a / total.masked_fill(total == 0, 1.0)  # rows of P sum to 1 not only in their values, but their derivatives too
    state = (w.mT @ v)[:, :, None]
    padding, a, w, q, k, v = _blocks(mask, mix.block_size, a, w, q, k, v)
    blocks = Blocks(*(x[..., None, None] for x in count_blocks(padding[:, :, :, 0])))
    inside, p = a @ w.mT, _probabilities(q, k, padding, mix)
    u = outside_mass(inside)
    c = outside_weight(u, mix.parameter[..., None, None, None], blocks)
    out = c * (a @ state) + ((1 - c * u) * p - c * inside) @ v
    return out.flatten(2, 3)[:, :, :length]


def _blocks(mask: Tensor | None, block_size: int, *tensors: Tensor) -> list[Tensor]:
    """Padding (B, 1, blocks, 1, size) and the tensors (B, H, N, D) as (B, H, blocks, size, D)."""
    length = tensors[0].shape[2]
    size = max(1, min(block_size, length))
    count = -(-length // size)
    missing = count * size - length
    padding = F.pad(written_out(mask, tensors[0]), (0, missing), value=True)
    padding = padding.unflatten(1, (count, size))[:, None, :, None]
    return [padding, *(F.pad(x, (0, 0, 0, missing)).unflatten(2, (count, size)) for x in tensors)]


def _probabilities(q: Tensor, k: Tensor, padding: Tensor, mix: HybridSpec) -> Tensor:
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(padding, torch.finfo(q.dtype).min)
    return F.dropout(scores.softmax(dim=-1).masked_fill(padding, 0.0), mix.dropout_p)
