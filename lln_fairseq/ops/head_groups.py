"""LLN attention in PyTorch for a group of heads after another: how groups are read and written, and the gradients.

A group is so small that its dozen temporary tensors stay in the cache. Let x = α q, y = β k, and let the tensor `do` be
the gradient of the output times the weight of LLN. The gradients are

    dA = do Sᵀ        dx = A (dA - Σ_d A dA)        dS = Aᵀ do        g = (S dSᵀ)_dd - Σ_i dx_id
    dv = W dS         dy = W (v dSᵀ - g)            dq = α dx         dk = β dy

Here g = -dL is the negated gradient of L. The PyTorch backend and random features use these functions.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lln_fairseq.ops import formula
from lln_fairseq.ops.formula import Heads, Inputs, KeySums, compute_dtype

# Bytes of one temporary tensor of a group. On a GPU, large groups are faster because they need fewer launches.
GROUP_BYTES = 1 << 20
GROUP_BYTES_ON_GPU = 256 << 20


def with_joined_heads(inputs: Inputs) -> Inputs:
    """Return the inputs with `join_heads` applied to q, k and v."""
    return inputs._replace(q=join_heads(inputs.q), k=join_heads(inputs.k), v=join_heads(inputs.v))


def join_heads(x: Tensor) -> Tensor:
    """Return x (B, H, N, D), or a copy of it if its batch and heads cannot be viewed as one dimension.

    Otherwise every group of heads would copy all of x.
    """
    if x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1):
        return x
    return x.contiguous()


def head_groups(inputs: Inputs, columns: int) -> Iterator[slice]:
    """Yield slices of the B·H heads, for groups of at least one head. `columns` are those of its largest matrix."""
    batch, heads, length, _ = inputs.q.shape
    bytes_per_head = length * columns * compute_dtype(inputs.q.dtype).itemsize
    budget = GROUP_BYTES if inputs.q.device.type == "cpu" else GROUP_BYTES_ON_GPU
    size = max(1, budget // max(1, bytes_per_head))
    for start in range(0, batch * heads, size):
        yield slice(start, min(start + size, batch * heads))


def empty_sums(q: Tensor, features: int) -> KeySums:
    """Return uninitialized sums over the keys of all heads of q (B, H, N, D)."""
    batch, heads, _, dim = q.shape
    shapes = ((1, features), (1, features), (features, dim))
    options: dict[str, Any] = {"dtype": compute_dtype(q.dtype), "device": q.device}
    return KeySums(*(torch.empty(batch * heads, *shape, **options) for shape in shapes))


def load_gradient(grad: Tensor, heads: Heads, group: slice) -> Tensor:
    """Return the gradient of the output of a group, (G, N, D), with 0 beyond the last token."""
    do = grad.flatten(0, 1)[group].to(heads.q.dtype)
    return torch.nn.functional.pad(do, (0, 0, 0, heads.q.shape[1] - do.shape[1]))


def write_group(x: Tensor, target: Tensor, group: slice) -> None:
    """Write the result x (G, rounded-up N, D) of a group to `target` (B, H, N, D)."""
    target.flatten(0, 1)[group] = x[:, : target.shape[2]]


def store_sums(part: KeySums, sums: KeySums, group: slice) -> None:
    for x, target in zip(part, sums, strict=True):
        target[group] = x


def select_sums(sums: KeySums, group: slice) -> KeySums:
    return KeySums(*(x[group] for x in sums))


def queries_backward(heads: Heads, sums: KeySums, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx (G, N, D), and dS (G, D, D) and g (G, 1, D), the sums over the queries."""
    a = formula.query_features(heads, sums)
    dx = softmax_backward(do @ sums.state.mT, a)
    grad_state = a.mT @ do
    g = (sums.state * grad_state).sum(dim=-1)[:, None] - dx.sum(dim=1, keepdim=True)
    return dx, grad_state, g


def keys_backward(heads: Heads, sums: KeySums, grad_state: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return dy and dv, (G, N, D)."""
    w = formula.key_features(heads, sums)
    return w * (heads.v @ grad_state.mT - g), w @ grad_state


def softmax_backward(grad: Tensor, p: Tensor) -> Tensor:
    """Return P (dP - Σ P dP), the gradient of the input of a softmax over the last dimension."""
    return torch.ops.aten._softmax_backward_data(grad, p, -1, p.dtype)
