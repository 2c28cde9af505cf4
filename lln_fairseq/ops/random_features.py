"""Softmax attention by positive random features (FAVOR+), forward and closed-form backward, group of heads by group.

The M features of a token are several times its D numbers: nothing of that size outlives a group of heads. Saved for the
backward pass: q, k, v, and per head the logsumexp L (M) and the state S (M x D); the rest is recomputed.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lln_fairseq.ops.autograd import differentiable_gradients
from lln_fairseq.ops.backends import is_traced_or_transformed
from lln_fairseq.ops.checks import check_inputs
from lln_fairseq.ops.dtypes import compute_dtype, without_autocast
from lln_fairseq.ops.layout import fresh_result
from lln_fairseq.ops.linear_attention import balanced_features, linear_attention
from lln_fairseq.ops.padding import clear_padding
from lln_fairseq.ops.scratch import Scratch, head_groups


@without_autocast
def random_feature_attention(
    q: Tensor, k: Tensor, v: Tensor, omega: Tensor, key_padding_mask: Tensor | None = None
) -> Tensor:
    """A (Wᵀ v) with A_im = softmax_m(x_im + L_m), W_jm = exp(y_jm - L_m), L_m = logsumexp_j y_jm over the real keys.

    x = q ω and y = k ω - |k|²/(2√D) are the logarithms of the features, up to what cancels; the form is the one of
    `linear_attention.balanced_features`: it cannot overflow, needs no epsilon, and its cost is linear in N.

    Args:
        q, k, v: (B, H, N, D), any strides; computed in float32 (float64 for float64 inputs).
        omega: (D, M), random directions over D^¼; no gradient flows to them.
        key_padding_mask: bool (B, N), True = padded. A sequence without a real key gives 0.

    Returns: (B, H, N, D) in the dtype of q. Differentiable any number of times.
    """
    check_inputs(q, k, v, key_padding_mask)
    q, k, v = clear_padding(q, k, v, key_padding_mask)
    if q.numel() == 0 or is_traced_or_transformed(q, k, v, omega, key_padding_mask):
        return _formula(q, k, v, omega, key_padding_mask)
    return RandomFeatureFunction.apply(q, k, v, omega, key_padding_mask)


def log_features(q: Tensor, k: Tensor, omega: Tensor) -> tuple[Tensor, Tensor]:
    """x and y, (B, H, N, M), in float32 (float64 for float64 inputs)."""
    dtype = compute_dtype(q.dtype)
    q, k, omega = q.to(dtype), k.to(dtype), omega.to(dtype)
    return q @ omega, k @ omega - k.square().sum(dim=-1, keepdim=True) / (2 * math.sqrt(q.shape[-1]))


def _formula(q: Tensor, k: Tensor, v: Tensor, omega: Tensor, mask: Tensor | None) -> Tensor:
    """The same in plain operations."""
    return linear_attention(*balanced_features(*log_features(q, k, omega), mask), v, mask)


class RandomFeatureFunction(torch.autograd.Function):
    """Works on groups of heads: contiguous (G, N, D) in the compute dtype."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, omega: Tensor, mask: Tensor | None) -> Tensor:
        run = _Run(q, omega, mask)
        out, heads, (dim, features) = fresh_result(q), q.shape[0] * q.shape[1], omega.shape
        log_sums, states = (run.omega.new_empty(heads, *shape) for shape in ((1, features), (features, dim)))
        for group in run.groups:
            q_, k_, v_ = run.load(group, q=q, k=k, v=v)
            w = run.log_keys(group, k_)
            # A sequence without a real key has the maximum -inf; 0 there makes W = 0, so S = 0 and out = 0.
            top = w.amax(dim=1, keepdim=True).nan_to_num_(neginf=0.0)
            w.sub_(top).exp_()
            # With a real key the sum is at least 1, its largest term: the clamp concerns the empty sequence alone.
            total = w.sum(dim=1, keepdim=True).clamp_min_(1.0)
            state = torch.bmm(w.mT, v_, out=states[group]).div_(total.mT)
            log_sum = torch.add(top, total.log_(), out=log_sums[group])
            run.store(group, out, torch.bmm(run.query_features(q_, log_sum), state, out=run.scratch("out", *q_.shape)))
        ctx.save_for_backward(q, k, v, omega, mask, log_sums, states)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, omega, mask, *_ = saved = ctx.saved_tensors
        if not (torch.is_grad_enabled() or is_traced_or_transformed(grad)):
            return *_gradients(grad, *saved), None, None

        def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return _formula(q, k, v, omega, mask)

        return *differentiable_gradients(formula, (q, k, v), ctx.needs_input_grad[:3], grad), None, None


@without_autocast
def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, omega: Tensor, mask: Tensor | None, log_sums: Tensor, states: Tensor
) -> Sequence[Tensor]:
    """As LLN's: the logsumexp terms cancel; the norm of a key adds -k/√D Σ_m dy to dk."""
    run = _Run(q, omega, mask)
    dq, dk, dv = (fresh_result(x) for x in (q, k, v))
    for group in run.groups:
        q_, k_, v_, grad_ = run.load(group, q=q, k=k, v=v, grad=grad)
        log_sum, state = log_sums[group], states[group]
        out = run.scratch("out", *q_.shape)

        a = run.query_features(q_, log_sum)
        dx = torch.bmm(grad_, state.mT, out=run.scratch("dx", *a.shape)).mul_(a)
        delta = dx.sum(dim=-1, keepdim=True)
        dx.addcmul_(a, delta, value=-1)
        dstate, g = torch.bmm(a.mT, grad_), torch.bmm(a.mT, delta).mT
        run.store(group, dq, run.matmul(dx, run.omega.mT, out))

        w = run.log_keys(group, k_).sub_(log_sum).exp_()
        run.store(group, dv, torch.bmm(w, dstate, out=out))
        dy = torch.bmm(v_, dstate.mT, out=dx).sub_(g).mul_(w)
        dk_ = run.matmul(dy, run.omega.mT, out)
        run.store(group, dk, dk_.addcmul_(k_, dy.sum(dim=-1, keepdim=True), value=-run.scale))
    return dq, dk, dv


class _Run:
    """What one call needs: the groups of heads, their scratch memory, and padding per head."""

    def __init__(self, q: Tensor, omega: Tensor, mask: Tensor | None) -> None:
        batch, heads, length, dim = q.shape
        self.scratch, self.scale = Scratch(q, length), 1 / math.sqrt(dim)
        self.omega = omega.to(self.scratch.dtype)
        self.groups = list(head_groups(batch * heads, length * max(omega.shape), q))
        self.padding = None if mask is None else mask.repeat_interleave(heads, dim=0)[:, :, None]

    def load(self, group: slice, **tensors: Tensor) -> list[Tensor]:
        return [self.scratch.load(name, x.flatten(0, 1)[group]) for name, x in tensors.items()]

    @staticmethod
    def store(group: slice, target: Tensor, result: Tensor) -> None:
        target.flatten(0, 1)[group].copy_(result)

    @staticmethod
    def matmul(x: Tensor, matrix: Tensor, out: Tensor) -> Tensor:
        """(G, N, F) times one matrix for all heads."""
        torch.mm(x.flatten(0, 1), matrix, out=out.flatten(0, 1))
        return out

    def log_keys(self, group: slice, k: Tensor) -> Tensor:
        """y, -inf at padding."""
        y = self.matmul(k, self.omega, self.scratch("w", *k.shape[:2], self.omega.shape[1]))
        y.sub_(torch.linalg.vecdot(k, k).mul_(self.scale / 2)[..., None])
        return y if self.padding is None else y.masked_fill_(self.padding[group], -math.inf)

    def query_features(self, q: Tensor, log_sum: Tensor) -> Tensor:
        """A = softmax_m(x + L): every row a distribution over the features."""
        shape = (*q.shape[:2], self.omega.shape[1])
        x = self.matmul(q, self.omega, self.scratch("w", *shape)).add_(log_sum)
        return torch.softmax(x, dim=-1, out=self.scratch("a", *shape))
