"""LLN and block-diagonal attention in plain operations, differentiable any number of times, in time linear in N.

This formula is used for second derivatives, for traced or transformed operations (tracing, export, functorch, meta
tensors) and for tensors without elements. It takes several times the memory and the time of the backends.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lln_fairseq.ops.backends import HybridSpec
from lln_fairseq.ops.dtypes import compute_dtype
from lln_fairseq.ops.joint import (
    BlockKinds,
    classify_blocks,
    count_global_keys,
    global_key_padding,
    outside_mass,
    outside_weight,
)
from lln_fairseq.ops.linear_attention import balanced_features, linear_attention
from lln_fairseq.ops.padding import clear_padding, explicit_mask


def hybrid_formula(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, mask: Tensor | None, spec: HybridSpec
) -> Tensor:
    """Compute the hybrid of LLN and block-diagonal attention that `spec` describes.

    The computation is in float32, or in float64 for float64 inputs.

    Args:
        q, k, v: (B, H, N, D); N may be 0.
        alpha, beta: (B, H).
        mask: bool (B, N), True = padded, or None.
        spec: the settings of the call, without an exchange. The seed is ignored: dropout uses torch's generator.

    Returns: (B, H, N, D) in the dtype of q.
    """
    dtype = compute_dtype(q.dtype)
    queries, keys, values = clear_padding(q.to(dtype), k.to(dtype), v.to(dtype), mask)
    out = torch.zeros_like(values)
    if spec.lln_weight:
        a, w = balanced_features(alpha[..., None, None] * queries, beta[..., None, None] * keys, mask)
        if spec.joint:
            return _joint(a, w, queries, keys, values, mask, spec).to(q.dtype)
        out = out + spec.lln_weight * linear_attention(a, w, values, mask)
    if spec.diag_weight:
        out = out + spec.diag_weight * _block_diag(queries, keys, values, mask, spec)
    return out.to(q.dtype)


def _block_diag(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: HybridSpec) -> Tensor:
    """Compute softmax(q kᵀ / √D) v inside the blocks, for q, k and v (B, H, N, D).

    Returns: (B, H, N, D), without diag_weight; 0 in a block whose keys are all padding.
    """
    length = q.shape[2]
    padding, q, k, v = _split_into_blocks(mask, spec.block_size, q, k, v)
    p = _probabilities(q @ k.mT / math.sqrt(q.shape[-1]), padding, spec)
    return (p @ v).flatten(2, 3)[:, :, :length]


def _joint(a: Tensor, w: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: HybridSpec) -> Tensor:
    """Compute the joint form of ops/joint.py.

    Args:
        a, w: the factors of the LLN matrix P = A Wᵀ, both (B, H, N, D).
        q, k, v: (B, H, N, D), cleared by `clear_padding`.

    Returns: (B, H, N, D).
    """
    assert spec.offset is not None
    length = q.shape[2]
    total = a @ w.sum(dim=2)[..., None]
    # The rows of P sum to 1 even without this division. With it, the derivatives take that into account too.
    a = a / total.masked_fill(total == 0, 1.0)
    state = (w.mT @ v)[:, :, None]
    global_padding = _global_padding(mask, q, spec)
    global_keys = [x[:, :, : global_padding.shape[-1]] for x in (w, k, v)]
    padding, a, w, q, k, v = _split_into_blocks(mask, spec.block_size, a, w, q, k, v)
    all_keys, no_key = classify_blocks(padding[:, :, :, 0], global_padding[:, :, :, 0])
    kinds = BlockKinds(all_keys[..., None, None], no_key[..., None, None])
    inside = a @ w.mT
    scores = q @ k.mT
    has_globals = global_padding.shape[-1] > 0
    if has_globals:
        global_w, global_k, global_v = global_keys
        global_inside = _times_all_blocks(a, global_w.mT).masked_fill(global_padding, 0.0)
        inside = torch.cat((inside, global_inside), dim=-1)
        scores = torch.cat((scores, _times_all_blocks(q, global_k.mT)), dim=-1)
        padding = torch.cat((padding, global_padding), dim=-1)
    p = _probabilities(scores / math.sqrt(q.shape[-1]), padding, spec)
    u = outside_mass(inside)
    c = outside_weight(u, spec.offset[..., None, None, None], kinds)
    weights = (1 - c * u) * p - c * inside
    out = c * (a @ state) + weights[..., : v.shape[3]] @ v
    if has_globals:
        out = out + _times_all_blocks(weights[..., v.shape[3] :], global_v)
    return out.flatten(2, 3)[:, :, :length]


def _global_padding(mask: Tensor | None, q: Tensor, spec: HybridSpec) -> Tensor:
    """Return the result of `global_key_padding` as (B, 1, blocks, 1, E), for q (B, H, N, D).

    E is the result of `count_global_keys`, or 0 if the spec has no global tokens.
    """
    length = q.shape[2]
    size = max(1, min(spec.block_size, length))
    count = 0
    global_tokens = torch.zeros(q.shape[0], dtype=torch.int64, device=q.device)
    if spec.global_tokens is not None:
        global_tokens = spec.global_tokens
        count = count_global_keys(spec.max_global_tokens, length, size)
    return global_key_padding(global_tokens, mask, q, size, count)[:, None, :, None]


def _times_all_blocks(x: Tensor, y: Tensor) -> Tensor:
    """Multiply the rows of every block by one matrix per head.

    Args:
        x: the rows of the blocks, (B, H, blocks, size, n).
        y: the matrices, (B, H, n, m).

    Returns: (B, H, blocks, size, m).
    """
    return (x.flatten(2, 3) @ y).unflatten(2, x.shape[2:4])


def _split_into_blocks(mask: Tensor | None, block_size: int, *tensors: Tensor) -> list[Tensor]:
    """Split the tokens of the mask and of the tensors into blocks of `size` = min(block_size, N) tokens.

    The last block is filled up with padding tokens, whose values are 0.

    Args:
        mask: bool (B, N), True = padded, or None.
        tensors: each (B, H, N, D).

    Returns: the padding as bool (B, 1, blocks, 1, size), then the tensors as (B, H, blocks, size, D).
    """
    length = tensors[0].shape[2]
    size = max(1, min(block_size, length))
    count = -(-length // size)
    missing = count * size - length
    padding = F.pad(explicit_mask(mask, tensors[0]), (0, missing), value=True)
    padding = padding.unflatten(1, (count, size))[:, None, :, None]
    return [padding, *(F.pad(x, (0, 0, 0, missing)).unflatten(2, (count, size)) for x in tensors)]


def _probabilities(scores: Tensor, padding: Tensor, spec: HybridSpec) -> Tensor:
    """Return the softmax of the scores over the keys, after dropout with spec.dropout_p.

    Args:
        scores: (B, H, blocks, size, keys).
        padding: bool, broadcasts to the scores. Where it is True, the probability is 0.

    Returns: the probabilities, in the shape of the scores.
    """
    scores = scores.masked_fill(padding, torch.finfo(scores.dtype).min)
    return F.dropout(scores.softmax(dim=-1).masked_fill(padding, 0.0), spec.dropout_p)
