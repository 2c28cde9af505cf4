"""The mathematics of LLN, block-diagonal and hybrid attention, forward only, for a group of heads.

`hybrid_formula` computes a whole call in these plain operations. It is used for second derivatives, for traced or
transformed operations (tracing, export, functorch, meta tensors) and for tensors without elements, and takes several
times the memory of the backends. The PyTorch backend uses the same functions for one group of heads after another, and
adds the gradients.

Shapes: G heads, N tokens in blocks of S tokens (N is rounded up), D features. A head has the attention matrix

    P = A Wᵀ        W_jd = exp(β k_jd - L_d)        A_id = softmax_d(α q_id + L_d)        L_d = logsumexp_j(β k_jd)

of LLN, and the matrix Diag of the softmax inside the blocks. joint.py defines the joint form of both.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lln_fairseq.ops.backends import DIAG, JOINT, LLN, Inputs, Spec
from lln_fairseq.ops.dtypes import compute_dtype
from lln_fairseq.ops.joint import (
    BlockKinds,
    classify_blocks,
    count_global_keys,
    global_key_padding,
    outside_mass,
    outside_weight,
)
from lln_fairseq.ops.padding import clear_queries, explicit_mask


class Heads(NamedTuple):
    """The tensors of G heads in the compute dtype, ready for the formulas."""

    q: Tensor  # (G, N, D), 0 beyond the last token; padding is finite in q, and 0 in k and v
    k: Tensor
    v: Tensor
    alpha: Any  # (G, 1, 1), as beta and offset; None if the form of the call has none
    beta: Any
    offset: Any
    padding: Tensor | None  # bool (G, N, 1), also True beyond the last token; None if there is none
    blocks: int
    global_padding: Tensor | None  # bool (G, blocks, E), see `joint.global_key_padding`; None without global keys


class KeySums(NamedTuple):
    """The sums over the keys of G heads. L = maximum + log total."""

    maximum: Tensor  # max_j β k_j, (G, 1, D); 0 if all keys are padding
    total: Tensor  # Σ_j exp(β k_j - maximum), (G, 1, D), at least 1
    state: Tensor  # S = Wᵀ v, (G, D, D)


Drop = Callable[[Tensor], Tensor]


def hybrid_formula(spec: Spec, inputs: Inputs) -> Tensor:
    """Compute the call, and return (B, H, N, D) in the dtype of q. Dropout uses torch's generator and not the seed."""
    heads = load_heads(spec, inputs)
    sums = None
    if spec.form != DIAG:
        sums = sum_keys(heads)
    out = attend_heads(spec, heads, sums, lambda p: F.dropout(p, spec.dropout))
    return out[:, : inputs.q.shape[2]].reshape(inputs.q.shape).to(inputs.q.dtype)


def load_heads(spec: Spec, inputs: Inputs, group: slice = slice(None)) -> Heads:
    """Return the tensors of a group of the B·H heads."""
    _, heads, length, _ = inputs.q.shape
    dtype = compute_dtype(inputs.q.dtype)
    size = 1
    if spec.form != LLN:
        size = max(1, min(spec.block_size, length))
    blocks = -(-length // size)
    missing = blocks * size - length
    q, k, v = (x.flatten(0, 1)[group].to(dtype).contiguous() for x in inputs[:3])
    padding = None
    if inputs.padding is not None or missing:
        padding = F.pad(explicit_mask(inputs.padding, inputs.q), (0, missing), value=True)
        padding = padding.repeat_interleave(heads, dim=0)[group, :, None]
    if missing:
        q, k, v = (F.pad(x, (0, 0, 0, missing)) for x in (q, k, v))
    if inputs.padding is not None and padding is not None:
        q = clear_queries(q, padding)
        k = k.masked_fill(padding, 0.0)
        v = v.masked_fill(padding, 0.0)
    scalars = []
    for x in inputs[3:6]:
        scalars.append(None if x is None else x.reshape(-1, 1, 1)[group].to(dtype))
    global_padding = None
    num_global_keys = count_global_keys(spec.max_global, length, size)
    if inputs.global_counts is not None and num_global_keys:
        global_padding = global_key_padding(inputs.global_counts, inputs.padding, inputs.q, size, num_global_keys)
        global_padding = global_padding.repeat_interleave(heads, dim=0)[group]
    alpha, beta, offset = scalars
    return Heads(q, k, v, alpha, beta, offset, padding, blocks, global_padding)


def sum_keys(heads: Heads) -> KeySums:
    """Compute the sums over the keys. No gradient flows through the maximum, which cancels."""
    y = heads.beta * heads.k
    if heads.padding is not None:
        y = y.masked_fill(heads.padding, -math.inf)
    if y.shape[1]:
        maximum = y.detach().amax(dim=1, keepdim=True)
        maximum = maximum.masked_fill(maximum == -math.inf, 0.0)
    else:
        maximum = torch.zeros_like(y.sum(dim=1, keepdim=True))
    w = (y - maximum).exp()
    # The sum is at least its largest term, 1. Only a sequence that is all padding needs the clamp.
    total = w.sum(dim=1, keepdim=True).clamp_min(1.0)
    return KeySums(maximum, total, w.mT @ heads.v / total.mT)


def query_features(heads: Heads, sums: KeySums) -> Tensor:
    """Compute A, (G, N, D): every row is a distribution over the features."""
    return (heads.alpha * heads.q + (sums.maximum + sums.total.log())).softmax(dim=-1)


def key_features(heads: Heads, sums: KeySums) -> Tensor:
    """Compute W, (G, N, D): every column is a distribution over the tokens, 0 for padding keys."""
    # As in sum_keys, without the logarithm of the total: exp(β k - L) would differ by the rounding of a large L.
    w = (heads.beta * heads.k - sums.maximum).exp() / sums.total
    if heads.padding is not None:
        w = w.masked_fill(heads.padding, 0.0)
    return w


def attend_heads(spec: Spec, heads: Heads, sums: KeySums | None, drop: Drop) -> Tensor:
    """Compute the output of the heads, (G, N, D). `drop` applies dropout to the probabilities of the blocks."""
    if spec.form == JOINT:
        assert sums is not None
        return _joint(heads, sums, drop)
    if spec.form == LLN:
        assert sums is not None
        return query_features(heads, sums) @ sums.state
    out = times_keys(drop(probabilities(heads)), heads.v, heads)
    if sums is None:
        return out
    return (out + query_features(heads, sums) @ sums.state) / 2


def _joint(heads: Heads, sums: KeySums, drop: Drop) -> Tensor:
    """Compute (1 - c u) Diag v + c (A S - M v), where M is the part of P inside the block; see joint.py."""
    a = query_features(heads, sums)
    inside = key_products(a, key_features(heads, sums), heads)
    u = outside_mass(inside)
    c = outside_weight(u, block_offsets(heads), block_kinds(heads))
    weights = (1 - c * u) * drop(probabilities(heads)) - c * inside
    return c.flatten(1, 2) * (a @ sums.state) + times_keys(weights, heads.v, heads)


def block_offsets(heads: Heads) -> Tensor:
    """Return the offset o, (G, 1, 1, 1)."""
    return heads.offset[..., None]


def block_kinds(heads: Heads) -> BlockKinds:
    """Return the kinds of the blocks, bool (G, blocks, 1, 1)."""
    padding = explicit_block_padding(heads)[:, :, 0]
    kinds = classify_blocks(padding, heads.global_padding)
    return BlockKinds(kinds.all_keys[..., None, None], kinds.no_key[..., None, None])


def explicit_block_padding(heads: Heads) -> Tensor:
    """Return the padding of the keys of every block, bool (G, blocks, 1, S)."""
    padding = heads.padding
    if padding is None:
        padding = torch.zeros_like(heads.q[:, :, :1], dtype=torch.bool)
    return split_blocks(padding, heads).mT


def probabilities(heads: Heads) -> Tensor:
    """Compute the softmax Diag over the keys of each block, (G, blocks, S, S + E); 0 for padding keys."""
    scores = key_products(heads.q, heads.k, heads, mask_value=torch.finfo(heads.q.dtype).min)
    p = (scores / math.sqrt(heads.q.shape[-1])).softmax(dim=-1)
    return mask_keys(p, heads, 0.0)


def key_products(x: Tensor, y: Tensor, heads: Heads, mask_value: float = 0.0) -> Tensor:
    """Return x_iᵀ y_j for every query i and every key j of its block, (G, blocks, S, S + E).

    x and y are (G, N, D). The E global keys of the block come last. Padding keys have the mask value.
    """
    products = split_blocks(x, heads) @ split_blocks(y, heads).mT
    if heads.global_padding is not None:
        global_keys = y[:, : heads.global_padding.shape[-1]]
        products = torch.cat((products, split_blocks(x @ global_keys.mT, heads)), dim=-1)
    return mask_keys(products, heads, mask_value)


def mask_keys(products: Tensor, heads: Heads, value: float) -> Tensor:
    """Return products (G, blocks, S, S + E) with this value for padding and for unused places of global keys.

    If there are none, the result is `products` itself.
    """
    if heads.padding is None and heads.global_padding is None:
        return products
    padding = explicit_block_padding(heads)
    if heads.global_padding is not None:
        padding = torch.cat((padding, heads.global_padding[:, :, None]), dim=-1)
    return products.masked_fill(padding, value)


def times_keys(weights: Tensor, y: Tensor, heads: Heads) -> Tensor:
    """Return Σ_j weights_ij y_j over the keys j of the block of every query i, (G, N, D), for y (G, N, D)."""
    size = y.shape[1] // max(1, heads.blocks)
    out = (weights[..., :size] @ split_blocks(y, heads)).flatten(1, 2)
    if heads.global_padding is not None:
        out = out + weights[..., size:].flatten(1, 2) @ y[:, : heads.global_padding.shape[-1]]
    return out


def split_blocks(x: Tensor, heads: Heads) -> Tensor:
    """Split the tokens of x (G, N, D) into blocks, (G, blocks, S, D)."""
    return x.unflatten(1, (heads.blocks, x.shape[1] // max(1, heads.blocks)))
