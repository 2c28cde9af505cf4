"""LLN and block-diagonal attention in plain operations, differentiable any number of times, in time linear in N.

This formula is used for second derivatives, for traced or transformed operations (tracing, export, functorch, meta
tensors) and for tensors without elements. It takes several times the memory and the time of the backends.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lln_fairseq.ops.backends import JOINT, WEIGHTS, Inputs, Spec
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


def hybrid_formula(spec: Spec, inputs: Inputs) -> Tensor:
    """Compute the call, and return (B, H, N, D) in the dtype of q. N may be 0.

    The computation is in float32, or in float64 for float64 inputs. Dropout uses torch's generator and not the seed.
    """
    q, k, v, alpha, beta, _, padding, *_ = inputs
    dtype = compute_dtype(q.dtype)
    queries, keys, values = clear_padding(q.to(dtype), k.to(dtype), v.to(dtype), padding)
    lln_weight, diag_weight = WEIGHTS[spec.form]
    out = torch.zeros_like(values)
    if lln_weight:
        assert alpha is not None
        assert beta is not None
        a, w = balanced_features(alpha[..., None, None] * queries, beta[..., None, None] * keys, padding)
        if spec.form == JOINT:
            return _joint(a, w, queries, keys, values, spec, inputs).to(q.dtype)
        out = out + lln_weight * linear_attention(a, w, values, padding)
    if diag_weight:
        out = out + diag_weight * _block_diag(queries, keys, values, padding, spec)
    return out.to(q.dtype)


def _block_diag(q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, spec: Spec) -> Tensor:
    """Compute softmax(q kᵀ / √D) v inside the blocks; 0 in a block whose keys are all padding."""
    length = q.shape[2]
    block_padding, q, k, v = _split_into_blocks(padding, spec.block_size, q, k, v)
    p = _probabilities(q @ k.mT / math.sqrt(q.shape[-1]), block_padding, spec)
    return (p @ v).flatten(2, 3)[:, :, :length]


def _joint(a: Tensor, w: Tensor, q: Tensor, k: Tensor, v: Tensor, spec: Spec, inputs: Inputs) -> Tensor:
    """Compute the joint form of joint.py from the factors of the LLN matrix P = A Wᵀ and q, k and v without padding."""
    assert inputs.offset is not None
    length = q.shape[2]
    total = a @ w.sum(dim=2)[..., None]
    # The rows of P sum to 1 even without this division. With it, the derivatives take that into account too.
    a = a / total.masked_fill(total == 0, 1.0)
    state = (w.mT @ v)[:, :, None]
    global_padding = _global_padding(q, spec, inputs)
    global_keys = [x[:, :, : global_padding.shape[-1]] for x in (w, k, v)]
    padding, a, w, q, k, v = _split_into_blocks(inputs.padding, spec.block_size, a, w, q, k, v)
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
    c = outside_weight(u, inputs.offset[..., None, None, None], kinds)
    weights = (1 - c * u) * p - c * inside
    out = c * (a @ state) + weights[..., : v.shape[3]] @ v
    if has_globals:
        out = out + _times_all_blocks(weights[..., v.shape[3] :], global_v)
    return out.flatten(2, 3)[:, :, :length]


def _global_padding(q: Tensor, spec: Spec, inputs: Inputs) -> Tensor:
    """Return the result of `global_key_padding` as (B, 1, blocks, 1, E), with E = 0 without global tokens."""
    length = q.shape[2]
    size = max(1, min(spec.block_size, length))
    count = 0
    global_counts = torch.zeros(q.shape[0], dtype=torch.int64, device=q.device)
    if inputs.global_counts is not None:
        global_counts = inputs.global_counts
        count = count_global_keys(spec.max_global, length, size)
    return global_key_padding(global_counts, inputs.padding, q, size, count)[:, None, :, None]


def _times_all_blocks(x: Tensor, y: Tensor) -> Tensor:
    """Multiply the rows of every block, (B, H, blocks, size, n), by one matrix (B, H, n, m) per head."""
    return (x.flatten(2, 3) @ y).unflatten(2, x.shape[2:4])


def _split_into_blocks(padding: Tensor | None, block_size: int, *tensors: Tensor) -> list[Tensor]:
    """Split the mask (B, N) and tensors (B, H, N, D) into blocks of `size` = min(block_size, N) tokens.

    The last block is filled up with padding tokens, whose values are 0. The results are bool (B, 1, blocks, 1, size)
    and tensors (B, H, blocks, size, D).
    """
    length = tensors[0].shape[2]
    size = max(1, min(block_size, length))
    count = -(-length // size)
    missing = count * size - length
    all_padding = F.pad(explicit_mask(padding, tensors[0]), (0, missing), value=True)
    all_padding = all_padding.unflatten(1, (count, size))[:, None, :, None]
    return [all_padding, *(F.pad(x, (0, 0, 0, missing)).unflatten(2, (count, size)) for x in tensors)]


def _probabilities(scores: Tensor, padding: Tensor, spec: Spec) -> Tensor:
    """Return the softmax of the scores over the keys that are not padding, after dropout."""
    scores = scores.masked_fill(padding, torch.finfo(scores.dtype).min)
    return F.dropout(scores.softmax(dim=-1).masked_fill(padding, 0.0), spec.dropout)
