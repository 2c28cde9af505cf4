"""Softmax attention by positive random features (FAVOR+), with a backward pass in closed form.

With directions ω (D, M), the logarithms of the M features of a query and a key, without the terms that cancel, are

    x = q ω        y = k ω - |k|²/(2√D)

and with the sums over the keys j that are not padding, the output is A S, where

    L_m = logsumexp_j y_jm        W_jm = exp(y_jm - L_m)        A_im = softmax_m(x_im + L_m)        S = Wᵀ v

As in LLN attention, nothing overflows, and no epsilon is needed.

M is several times D, so the heads are computed in groups, and no tensor of features is kept beyond its group. Given x
and y, this is LLN attention, with M features in place of D, and head_groups.py has its gradients.
"""

import math
from typing import Any

import torch
from torch import Tensor

from lln_fairseq.ops import formula
from lln_fairseq.ops.autocast import without_autocast
from lln_fairseq.ops.dispatch import check_inputs, differentiable_gradients, fresh_result, is_traced_or_transformed
from lln_fairseq.ops.formula import LLN, Heads, Inputs, KeySums, Spec, clear_padding, compute_dtype
from lln_fairseq.ops.head_groups import (
    empty_sums,
    head_groups,
    join_heads,
    keys_backward,
    load_gradient,
    queries_backward,
    select_sums,
    store_sums,
    with_joined_heads,
    write_group,
)


@without_autocast
def random_feature_attention(q: Tensor, k: Tensor, v: Tensor, omega: Tensor, padding: Tensor | None = None) -> Tensor:
    """Approximate softmax(q kᵀ / √D) v by M positive random features, in time linear in N.

    Args:
        q, k, v: (B, H, N, D) with any strides. The computation is in float32, or in float64 for float64 inputs.
        omega: ω, random directions divided by D^¼, (D, M). They get no gradient.
        padding: bool (B, N), True = padded, or None. The result is 0 for a sequence that is all padding.

    Returns: (B, H, N, D) in the dtype of q. It can be differentiated any number of times.
    Raises: ValueError if a shape, dtype or device of q, k, v or the padding is invalid, see `check_inputs`.
    """
    check_inputs(q, k, v, padding)
    q, k, v = clear_padding(q, k, v, padding)
    if q.numel() == 0 or is_traced_or_transformed(q, k, v, omega, padding):
        return _formula(q, k, v, omega, padding)
    return RandomFeatureFunction.apply(q, k, v, omega, padding)


def log_features(q: Tensor, k: Tensor, omega: Tensor) -> tuple[Tensor, Tensor]:
    """Return x = q ω and y = k ω - |k|²/(2√D), the logarithms of the features without the terms that cancel.

    Args:
        q, k: (B, H, N, D).
        omega: ω, (D, M).

    Returns: x and y, both (B, H, N, M) in float32, or in float64 if q is float64.
    """
    dtype = compute_dtype(q.dtype)
    q = q.to(dtype)
    k = k.to(dtype)
    omega = omega.to(dtype)
    return q @ omega, k @ omega - k.square().sum(dim=-1, keepdim=True) / (2 * math.sqrt(q.shape[-1]))


def balanced_features(q: Tensor, k: Tensor, omega: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return A and W (B, H, N, M), in the dtype of `log_features`. W is 0 for padding keys."""
    heads = _load_features(Inputs(q, k, k, padding=padding), omega, slice(None))
    sums = formula.sum_keys(heads)
    shape = (*q.shape[:-1], omega.shape[1])
    return formula.query_features(heads, sums).view(shape), formula.key_features(heads, sums).view(shape)


def _formula(q: Tensor, k: Tensor, v: Tensor, omega: Tensor, padding: Tensor | None) -> Tensor:
    """Compute the attention (B, H, N, D) in plain operations of torch, in the dtype of v."""
    heads = _load_features(Inputs(q, k, v, padding=padding), omega, slice(None))
    sums = formula.sum_keys(heads)
    return (formula.query_features(heads, sums) @ sums.state).reshape(v.shape).to(v.dtype)


class RandomFeatureFunction(torch.autograd.Function):
    """`random_feature_attention` as an autograd function, for plain tensors with at least one element."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, omega: Tensor, padding: Tensor | None) -> Tensor:
        inputs = with_joined_heads(Inputs(q, k, v, padding=padding))
        out = fresh_result(q)
        sums = empty_sums(q, omega.shape[1])
        for group in head_groups(inputs, max(omega.shape)):
            heads = _load_features(inputs, omega, group)
            group_sums = formula.sum_keys(heads)
            store_sums(group_sums, sums, group)
            write_group(formula.query_features(heads, group_sums) @ group_sums.state, out, group)
        ctx.save_for_backward(q, k, v, omega, padding, *sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, omega, padding, *sums = ctx.saved_tensors
        if not (torch.is_grad_enabled() or is_traced_or_transformed(grad)):
            return *_gradients(grad, Inputs(q, k, v, padding=padding), omega, KeySums(*sums)), None, None

        def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return _formula(q, k, v, omega, padding)

        return *differentiable_gradients(plain, (q, k, v), ctx.needs_input_grad[:3], grad), None, None


@without_autocast
def _gradients(grad: Tensor, inputs: Inputs, omega: Tensor, sums: KeySums) -> list[Tensor]:
    """Return the gradients of q, k and v. The term |k|² in y adds -k/√D Σ_m dy to the gradient of k."""
    results = [fresh_result(x) for x in inputs[:3]]
    inputs = with_joined_heads(inputs)
    grad = join_heads(grad)
    for group in head_groups(inputs, max(omega.shape)):
        heads = _load_features(inputs, omega, group)
        group_sums = select_sums(sums, group)
        dx, grad_state, g = queries_backward(heads, group_sums, load_gradient(grad, heads, group))
        dy, dv = keys_backward(heads, group_sums, grad_state, g)
        directions = omega.to(dx.dtype).mT
        k = inputs.k.flatten(0, 1)[group]
        dk = dy @ directions - k / math.sqrt(k.shape[-1]) * dy.sum(dim=-1, keepdim=True)
        for x, target in zip((dx @ directions, dk, dv), results, strict=True):
            write_group(x, target, group)
    return results


def _load_features(inputs: Inputs, omega: Tensor, group: slice) -> Heads:
    """Return a group of heads with x and y, (G, N, M), in place of queries and keys."""
    heads = formula.load_heads(Spec(LLN), inputs, group)
    x, y = log_features(heads.q, heads.k, omega)
    return heads._replace(q=x, k=y, alpha=1.0, beta=1.0)
