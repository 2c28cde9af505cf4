"""Softmax attention by positive random features (FAVOR+), with a backward pass in closed form.

With directions ω (D, M), the logarithms of the M features of a query and a key, without the terms that cancel, are

    x = q ω        y = k ω - |k|²/(2√D)

and with the sums over the keys j that are not padding, the output is A S, where

    L_m = logsumexp_j y_jm        W_jm = exp(y_jm - L_m)        A_im = softmax_m(x_im + L_m)        S = Wᵀ v

As in `linear_attention.balanced_features`, nothing overflows, and no epsilon is needed.

M is several times D, so the heads are computed in groups, and no tensor of features is kept beyond its group. The
backward pass needs q, k, v and, for each head, L (M) and S (M x D). It recomputes everything else.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lln_fairseq.ops.dispatch import (
    check_inputs,
    differentiable_gradients,
    fresh_result,
    is_traced_or_transformed,
)
from lln_fairseq.ops.dtypes import compute_dtype, without_autocast
from lln_fairseq.ops.linear_attention import balanced_features, linear_attention
from lln_fairseq.ops.padding import clear_padding
from lln_fairseq.ops.scratch import Scratch, head_groups


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


def _formula(q: Tensor, k: Tensor, v: Tensor, omega: Tensor, padding: Tensor | None) -> Tensor:
    """Compute the attention in plain operations of torch.

    Args:
        q, k, v: (B, H, N, D), finite at padding positions.
        omega: ω, (D, M).
        padding: bool (B, N), True = padded, or None.

    Returns: (B, H, N, D) in the dtype of v.
    """
    x, y = log_features(q, k, omega)
    a, w = balanced_features(x, y, padding)
    return linear_attention(a, w, v, padding)


class RandomFeatureFunction(torch.autograd.Function):
    """`random_feature_attention` as an autograd function, for plain tensors with at least one element."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, omega: Tensor, padding: Tensor | None) -> Tensor:
        """Compute the output (B, H, N, D) from q, k and v, which `clear_padding` has cleared, and omega (D, M)."""
        run = _Run(q, omega, padding)
        out = fresh_result(q)
        heads = q.shape[0] * q.shape[1]
        dim, features = omega.shape
        log_sums = run.omega.new_empty(heads, 1, features)
        states = run.omega.new_empty(heads, features, dim)
        for group in run.groups:
            q_, k_, v_ = run.load(group, q=q, k=k, v=v)
            w = run.log_keys(group, k_)
            # If all keys are padding, the maximum is -inf. 0 instead of -inf makes W = 0, so S = 0 and out = 0.
            maximum = w.amax(dim=1, keepdim=True).nan_to_num_(neginf=0.0)
            w.sub_(maximum).exp_()
            # The sum is at least its largest term, 1. Only a sequence that is all padding needs the clamp.
            total = w.sum(dim=1, keepdim=True).clamp_min_(1.0)
            state = torch.bmm(w.mT, v_, out=states[group]).div_(total.mT)
            log_sum = torch.add(maximum, total.log_(), out=log_sums[group])
            a = run.query_features(q_, log_sum)
            run.store(group, out, torch.bmm(a, state, out=run.scratch("out", *q_.shape)))
        ctx.save_for_backward(q, k, v, omega, padding, log_sums, states)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, omega, padding, log_sums, states = ctx.saved_tensors
        if not (torch.is_grad_enabled() or is_traced_or_transformed(grad)):
            return *_gradients(grad, q, k, v, omega, padding, log_sums, states), None, None

        def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return _formula(q, k, v, omega, padding)

        return *differentiable_gradients(formula, (q, k, v), ctx.needs_input_grad[:3], grad), None, None


@without_autocast
def _gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    omega: Tensor,
    padding: Tensor | None,
    log_sums: Tensor,
    states: Tensor,
) -> Sequence[Tensor]:
    """Return the gradients of q, k and v, all (B, H, N, D), in closed form.

    The formulas are the same as for LLN attention (backends/pytorch/lln.py), except that the term |k|² in y adds
    -k/√D Σ_m dy to the gradient of k.

    Args:
        grad: the gradient of the output, (B, H, N, D).
        log_sums: L from the forward pass, (B H, 1, M).
        states: S from the forward pass, (B H, M, D).
    """
    run = _Run(q, omega, padding)
    dq = fresh_result(q)
    dk = fresh_result(k)
    dv = fresh_result(v)
    for group in run.groups:
        q_, k_, v_, grad_ = run.load(group, q=q, k=k, v=v, grad=grad)
        log_sum = log_sums[group]
        state = states[group]
        out = run.scratch("out", *q_.shape)

        a = run.query_features(q_, log_sum)
        dx = torch.bmm(grad_, state.mT, out=run.scratch("dx", *a.shape)).mul_(a)
        delta = dx.sum(dim=-1, keepdim=True)
        dx.addcmul_(a, delta, value=-1)
        grad_state = torch.bmm(a.mT, grad_)
        g = torch.bmm(a.mT, delta).mT
        run.store(group, dq, run.matmul(dx, run.omega.mT, out))

        w = run.log_keys(group, k_).sub_(log_sum).exp_()
        run.store(group, dv, torch.bmm(w, grad_state, out=out))
        dy = torch.bmm(v_, grad_state.mT, out=dx).sub_(g).mul_(w)
        dk_ = run.matmul(dy, run.omega.mT, out)
        run.store(group, dk, dk_.addcmul_(k_, dy.sum(dim=-1, keepdim=True), value=-run.scale))
    return dq, dk, dv


class _Run:
    """The context of one forward or backward call: groups of heads, scratch memory, ω and the padding.

    Tensors of a group of G heads are contiguous, (G, N, ...), in the compute dtype.

    The results of `log_keys` and `query_features` are in scratch memory, which the next call of the same method
    overwrites. A call of `query_features` also overwrites the result of `log_keys`.
    """

    def __init__(self, q: Tensor, omega: Tensor, padding: Tensor | None) -> None:
        batch, heads, length, dim = q.shape
        self.scratch = Scratch(q, length)
        self.scale = 1 / math.sqrt(dim)
        self.omega = omega.to(self.scratch.dtype)
        self.groups = list(head_groups(batch * heads, length * max(omega.shape), q))
        self.padding: Tensor | None = None  # (B H, N, 1)
        if padding is not None:
            self.padding = padding.repeat_interleave(heads, dim=0)[:, :, None]

    def load(self, group: slice, **tensors: Tensor) -> list[Tensor]:
        """Return the part of each tensor (B, H, N, D) that belongs to a group, as (G, N, D), in the same order.

        The name of a keyword argument is the name of the scratch buffer that is used if the part must be copied.
        """
        return [self.scratch.load(name, x.flatten(0, 1)[group]) for name, x in tensors.items()]

    @staticmethod
    def store(group: slice, target: Tensor, result: Tensor) -> None:
        """Copy the result (G, N, D) of a group of heads into `target`.

        Args:
            target: (B, H, N, D). Its batch and heads must be viewable as one dimension.
        """
        target.flatten(0, 1)[group].copy_(result)

    @staticmethod
    def matmul(x: Tensor, matrix: Tensor, out: Tensor) -> Tensor:
        """Multiply x (G, N, F) by one matrix (F, M) for all heads. The product overwrites `out` and is returned."""
        torch.mm(x.flatten(0, 1), matrix, out=out.flatten(0, 1))
        return out

    def log_keys(self, group: slice, k: Tensor) -> Tensor:
        """Compute y (G, N, M) of the keys k (G, N, D) of a group in scratch memory; -inf for padding keys."""
        y = self.matmul(k, self.omega, self.scratch("w", *k.shape[:2], self.omega.shape[1]))
        y.sub_(torch.linalg.vecdot(k, k).mul_(self.scale / 2)[..., None])
        if self.padding is not None:
            y.masked_fill_(self.padding[group], -math.inf)
        return y

    def query_features(self, q: Tensor, log_sum: Tensor) -> Tensor:
        """Compute A = softmax_m(x + L), (G, N, M), of the queries q (G, N, D) of a group in scratch memory.

        log_sum is L, (G, 1, M).
        """
        shape = (*q.shape[:2], self.omega.shape[1])
        x = self.matmul(q, self.omega, self.scratch("w", *shape)).add_(log_sum)
        return torch.softmax(x, dim=-1, out=self.scratch("a", *shape))
