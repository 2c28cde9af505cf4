"""LLN and block-diagonal attention in PyTorch, forward and closed-form backward, group of heads by group of heads.

Everything here works on one group: contiguous (G, N, D) in the compute dtype, padding bool (G, N) or None. Saved for
the backward pass: q, k, v, and per head the logsumexp L (D) and the state S (D x D); the rest is recomputed.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lln_fairseq.ops._memory import Scratch, empty_result, head_groups


@dataclass(frozen=True)
class Mixture:
    """out = lln_weight · LLN + diag_weight · block-diagonal softmax; a part of weight 0 is not computed."""

    lln_weight: float
    diag_weight: float
    block_size: int = 1
    dropout_p: float = 0.0  # of the block-diagonal probabilities
    seed: int = 0


class MixtureFunction(torch.autograd.Function):
    """q, k, v (B, H, N, D), alpha and beta (B, H), mask bool (B, N) or None -> (B, H, N, D)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, mask: Tensor | None, mix: Mixture
    ) -> Tensor:
        run = _Run(q, mask, mix)
        out = empty_result(q)
        heads, dim = q.shape[0] * q.shape[1], q.shape[3]
        log_sums = torch.empty(heads, 1, dim, dtype=run.scratch.dtype, device=q.device)
        states = torch.empty(heads, dim, dim, dtype=run.scratch.dtype, device=q.device)
        for group in run.groups:
            q_, k_, v_ = run.load(group, q=q, k=k, v=v)
            (out_,) = run.targets(group, out)
            if mix.lln_weight:
                _lln_forward(run, group, q_, k_, v_, run.per_head(alpha, group), run.per_head(beta, group), out_,
                             log_sums[group], states[group])  # fmt: skip
            else:
                out_.zero_()
            if mix.diag_weight:
                _BlockDiag(run, group).forward(q_, k_, v_, out_)
            run.store(group, [out_], [out])
        ctx.save_for_backward(q, k, v, alpha, beta, mask, log_sums, states)
        ctx.mix = mix
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, alpha, beta, mask, log_sums, states = ctx.saved_tensors
        run = _Run(q, mask, ctx.mix)
        grads = [empty_result(x) for x in (q, k, v)]
        dalpha, dbeta = (
            torch.zeros(alpha.numel(), 1, 1, dtype=run.scratch.dtype, device=q.device) if needed else None
            for needed in ctx.needs_input_grad[3:5]
        )
        for group in run.groups:
            loaded = run.load(group, q=q, k=k, v=v, grad=grad)
            targets = run.targets(group, *grads)
            if ctx.mix.lln_weight:
                _lln_backward(run, group, *loaded, run.per_head(alpha, group), run.per_head(beta, group),
                              log_sums[group], states[group], *targets, dalpha, dbeta)  # fmt: skip
            else:
                for target in targets:
                    target.zero_()
            if ctx.mix.diag_weight:
                _BlockDiag(run, group).backward(*loaded, *targets)
            run.store(group, targets, grads)
        to_alpha = (None if x is None else x.view(alpha.shape).to(alpha.dtype) for x in (dalpha, dbeta))
        return *grads, *to_alpha, None, None


class _Run:
    """What one call needs: the groups of heads, their scratch memory, and padding per head."""

    def __init__(self, q: Tensor, mask: Tensor | None, mix: Mixture) -> None:
        batch, heads, self.n, dim = q.shape
        self.mix, self.block = mix, max(1, min(mix.block_size, self.n)) if mix.diag_weight else 1
        length = -(-self.n // self.block) * self.block
        self.scratch = Scratch(q, length)
        self.groups = list(head_groups(batch * heads, length * max(dim, self.block), q))
        self.padding = None
        if mask is not None or length != self.n:
            padding = q.new_zeros(batch, self.n, dtype=torch.bool) if mask is None else mask
            padding = torch.nn.functional.pad(padding, (0, length - self.n), value=True)
            self.padding = padding.repeat_interleave(heads, dim=0)

    def per_head(self, x: Tensor, group: slice) -> Tensor:
        return x.flatten()[group, None, None].to(self.scratch.dtype)

    def load(self, group: slice, **tensors: Tensor) -> list[Tensor]:
        return [self.scratch.load(name, x.flatten(0, 1)[group]) for name, x in tensors.items()]

    def targets(self, group: slice, *tensors: Tensor) -> list[Tensor]:
        return [self.scratch.target(f"target{i}", x.flatten(0, 1)[group]) for i, x in enumerate(tensors)]

    def store(self, group: slice, results: list[Tensor], tensors: list[Tensor]) -> None:
        for result, x in zip(results, tensors, strict=True):
            self.scratch.store(result, x.flatten(0, 1)[group])


def _features(run: _Run, q: Tensor, alpha: Tensor, log_sum: Tensor) -> Tensor:
    """A = softmax_d(α q + L): every row a distribution over the features."""
    x = torch.addcmul(log_sum, q, alpha, out=run.scratch("x", *q.shape))
    return torch.softmax(x, dim=-1, out=run.scratch("a", *q.shape))


def _lln_forward(
    run: _Run, group: slice, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, out: Tensor,
    log_sum: Tensor, state: Tensor,
) -> None:  # fmt: skip
    """out = weight · A (Wᵀ v); fills L = logsumexp_j(β k_j) and S = weight · Wᵀ v."""
    w = torch.mul(k, beta, out=run.scratch("x", *k.shape))
    if run.padding is not None:
        w.masked_fill_(run.padding[group, :, None], -math.inf)
    # A sequence without a real key has the maximum -inf; 0 there makes W = 0, so S = 0 and out = 0.
    top = w.amax(dim=1, keepdim=True).nan_to_num_(neginf=0.0)
    w.sub_(top).exp_()
    # With a real key the sum is at least 1, its largest term: the clamp concerns the empty sequence alone.
    total = w.sum(dim=1, keepdim=True).clamp_min_(1.0)
    torch.bmm(w.mT, v, out=state)
    state.div_(total.mT).mul_(run.mix.lln_weight)
    torch.add(top, total.log_(), out=log_sum)
    torch.bmm(_features(run, q, alpha, log_sum), state, out=out)


def _lln_backward(
    run: _Run, group: slice, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, alpha: Tensor, beta: Tensor,
    log_sum: Tensor, state: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, dalpha: Tensor | None, dbeta: Tensor | None,
) -> None:  # fmt: skip
    """dA = do Sᵀ, dx = A (dA - Σ_d A dA), dS = Aᵀ do, dv = W dS, dy = W (v dSᵀ - g); the logsumexp terms cancel."""
    a = _features(run, q, alpha, log_sum)
    dx = torch.bmm(grad, state.mT, out=dq).mul_(a)
    delta = dx.sum(dim=-1, keepdim=True)
    dx.addcmul_(a, delta, value=-1)
    dstate = torch.bmm(a.mT, grad).mul_(run.mix.lln_weight)
    g = torch.bmm(a.mT, delta).mT
    if dalpha is not None:
        dalpha[group] = torch.mul(q, dx, out=a).sum(dim=(1, 2), keepdim=True)
    dx.mul_(alpha)

    w = torch.addcmul(-log_sum, k, beta, out=run.scratch("x", *k.shape)).exp_()
    if run.padding is not None:
        w.masked_fill_(run.padding[group, :, None], 0.0)
    torch.bmm(w, dstate, out=dv)
    dy = torch.bmm(v, dstate.mT, out=dk).sub_(g).mul_(w)
    if dbeta is not None:
        dbeta[group] = torch.mul(k, dy, out=w).sum(dim=(1, 2), keepdim=True)
    dy.mul_(beta)


class _BlockDiag:
    """weight · softmax(q kᵀ / √D) v inside blocks, for one group of heads; results are added to what is there."""

    def __init__(self, run: _Run, group: slice) -> None:
        self.scratch, self.mix, self.block = run.scratch, run.mix, run.block
        self.padding = None if run.padding is None else run.padding[group].reshape(-1, 1, run.block)
        self.generator = None
        if run.mix.dropout_p > 0:  # the same numbers in forward and backward: a seed for every group
            self.generator = torch.Generator(run.scratch.device).manual_seed(run.mix.seed + group.start)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        q, k, v, out = (self._blocks(x) for x in (q, k, v, out))
        p = self._probabilities(q, k)
        if self.generator is not None:
            p.mul_(self._kept(p))
        out.baddbmm_(p, v, alpha=self.mix.diag_weight)

    def backward(self, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        q, k, v, grad, dq, dk, dv = (self._blocks(x) for x in (q, k, v, grad, dq, dk, dv))
        weight, scale = self.mix.diag_weight, self.mix.diag_weight / math.sqrt(q.shape[-1])
        p = self._probabilities(q, k)
        # The buffer of the scores is free once their softmax is taken.
        dp = torch.bmm(grad, v.mT, out=self.scratch("scores", *p.shape))
        if self.generator is None:
            dv.baddbmm_(p.mT, grad, alpha=weight)
        else:
            kept = self._kept(p)
            dp.mul_(kept)
            dv.baddbmm_(kept.mul_(p).mT, grad, alpha=weight)
        ds = dp.mul_(p)  # the derivative of the softmax, P (dP - Σ P dP)
        ds.addcmul_(p, ds.sum(dim=-1, keepdim=True), value=-1)
        dq.baddbmm_(ds, k, alpha=scale)
        dk.baddbmm_(ds.mT, q, alpha=scale)

    def _blocks(self, x: Tensor) -> Tensor:
        return x.view(-1, self.block, x.shape[-1])

    def _probabilities(self, q: Tensor, k: Tensor) -> Tensor:
        scores = self.scratch("scores", q.shape[0], self.block, self.block)
        torch.baddbmm(scores, q, k.mT, beta=0, alpha=1 / math.sqrt(q.shape[-1]), out=scores)
        if self.padding is not None:
            # The lowest finite number, not -inf: a block without a real key must not become NaN ...
            scores.masked_fill_(self.padding, torch.finfo(scores.dtype).min)
        p = torch.softmax(scores, dim=-1, out=self.scratch("p", *scores.shape))
        # ... and gives 0 because its weights are set to 0 here.
        return p if self.padding is None else p.masked_fill_(self.padding, 0.0)

    def _kept(self, p: Tensor) -> Tensor:
        """0 for dropped weights, 1 / (1 - dropout_p) for the others."""
        keep = 1 - self.mix.dropout_p
        return self.scratch("kept", *p.shape).bernoulli_(keep, generator=self.generator).div_(keep)
