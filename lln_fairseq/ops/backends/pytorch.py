"""LLN and block-diagonal attention in PyTorch, forward and closed-form backward, group of heads by group of heads.

Everything here works on one group: contiguous (G, N, D) in the compute dtype, padding bool (G, N) or None. Saved for
the backward pass: q, k, v, and per head the logsumexp L (D) and the state S (D x D); the rest is recomputed.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lln_fairseq.ops.backends import Mixture
from lln_fairseq.ops.layout import fresh_result
from lln_fairseq.ops.moment_matching import calibration_table, matched_moments
from lln_fairseq.ops.padding import clear_queries
from lln_fairseq.ops.scratch import Scratch, head_groups


def is_supported(q: Tensor, block_size: int | None = None) -> str | None:
    """None: it runs everywhere."""
    return None


def draw_seed(device: torch.device) -> int:
    """A seed from torch's global CPU generator: torch.manual_seed and activation checkpointing then reproduce it."""
    return int(torch.randint(2**31 - 1, (), device="cpu"))


def forward(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor | None, beta: Tensor | None, mask: Tensor | None, mix: Mixture
) -> tuple[Tensor, Tensor, Tensor, Sequence[Tensor]]:
    """The mixture, α and β as given or matched, and what `backward` wants to see again."""
    if alpha is None or beta is None:
        alpha, beta = match_moments(q, k, mask, calibration_table(q.shape[-1], q.device))
    run = _Run(q, mask, mix)
    out = fresh_result(q)
    log_sums = torch.empty(run.heads, 1, q.shape[3], dtype=run.scratch.dtype, device=q.device)
    states = torch.empty(run.heads, q.shape[3], q.shape[3], dtype=run.scratch.dtype, device=q.device)
    inputs, results = _flat(q, k, v), _flat(out)
    per_head = (*run.by_head(alpha, beta), log_sums, states)
    for group in run.groups:
        loaded, cut = run.load(group, inputs), run.cut(group, results)
        (out_,) = targets = run.targets(cut)
        if mix.lln_weight:
            _lln_forward(run, group, loaded, run.cut(group, per_head), out_)
        else:
            out_.zero_()
        if mix.diag_weight:
            _BlockDiag(run, group).forward(loaded, out_)
        run.store(targets, cut)
    return out, alpha, beta, (log_sums, states)


def backward(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, mask: Tensor | None, mix: Mixture,
    saved: Sequence[Tensor], grad: Tensor, needs_alpha_beta: Sequence[bool],
) -> Sequence[Tensor | None]:  # fmt: skip
    """The gradients of q, k, v, and those of α and β that are needed."""
    run = _Run(q, mask, mix)
    grads = [fresh_result(x) for x in (q, k, v)]
    dalpha, dbeta = (
        torch.zeros(run.heads, 1, 1, dtype=run.scratch.dtype, device=q.device) if needed else None
        for needed in needs_alpha_beta
    )
    inputs, results = _flat(q, k, v, grad), _flat(*grads)
    per_head = (*run.by_head(alpha, beta), *saved)
    for group in run.groups:
        loaded, cut = run.load(group, inputs), run.cut(group, results)
        targets = run.targets(cut)
        if mix.lln_weight:
            _lln_backward(run, group, loaded, run.cut(group, per_head), targets, dalpha, dbeta)
        else:
            for target in targets:
                target.zero_()
        if mix.diag_weight:
            _BlockDiag(run, group).backward(loaded, targets)
        run.store(targets, cut)
    to_alpha = (None if x is None else x.view(alpha.shape).to(alpha.dtype) for x in (dalpha, dbeta))
    return *grads, *to_alpha


def match_moments(q: Tensor, k: Tensor, mask: Tensor | None, table: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return matched_moments(q, k, mask, table=table)


def _flat(*tensors: Tensor) -> list[Tensor]:
    """Batch and heads as one dimension."""
    return [x.flatten(0, 1) for x in tensors]


def _clear_keys(x: Tensor, padded: Tensor) -> Tensor:
    return x.masked_fill(padded, 0.0)


class _Run:
    """What one call needs: the groups of heads, their scratch memory, and padding per head."""

    def __init__(self, q: Tensor, mask: Tensor | None, mix: Mixture) -> None:
        batch, heads, n, dim = q.shape
        self.mix, self.heads = mix, batch * heads
        self.block = max(1, min(mix.block_size, n)) if mix.diag_weight else 1
        length = -(-n // self.block) * self.block
        self.scratch = Scratch(q, length)
        self.groups = list(head_groups(self.heads, length * max(dim, self.block), q))
        self.padding, self.masked, self.length = None, mask is not None, n
        if mask is not None or length != n:
            padding = q.new_zeros(batch, n, dtype=torch.bool) if mask is None else mask
            padding = torch.nn.functional.pad(padding, (0, length - n), value=True)
            self.padding = padding.repeat_interleave(heads, dim=0)

    def by_head(self, *alpha_beta: Tensor) -> list[Tensor]:
        """α, β (B, H) as they multiply (B·H, N, D)."""
        return [x.reshape(-1, 1, 1).to(self.scratch.dtype) for x in alpha_beta]

    def cut(self, group: slice, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return tensors if len(self.groups) == 1 else [x[group] for x in tensors]

    def load(self, group: slice, tensors: Sequence[Tensor]) -> list[Tensor]:
        """q, k, v and perhaps the gradient of a group, with padding that can be computed with."""
        pieces = self.cut(group, tensors)
        if self.padding is not None and self.masked:
            padded = self.padding[group, : self.length, None]
            clear = (clear_queries, _clear_keys, _clear_keys, lambda grad, _: grad)
            pieces = [f(x, padded) for f, x in zip(clear, pieces, strict=False)]
        return [self.scratch.load(f"input{i}", x) for i, x in enumerate(pieces)]

    def targets(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        return [self.scratch.target(f"result{i}", x) for i, x in enumerate(pieces)]

    def store(self, results: list[Tensor], pieces: Sequence[Tensor]) -> None:
        for result, x in zip(results, pieces, strict=True):
            self.scratch.store(result, x)


def _features(run: _Run, q: Tensor, alpha: Tensor, log_sum: Tensor) -> Tensor:
    """A = softmax_d(α q + L): every row a distribution over the features."""
    x = torch.addcmul(log_sum, q, alpha, out=run.scratch("x", *q.shape))
    return torch.softmax(x, dim=-1, out=run.scratch("a", *q.shape))


def _weights(run: _Run, group: slice, k: Tensor, beta: Tensor, shift: Tensor) -> Tensor:
    """exp(β k - shift), 0 for padded keys."""
    w = torch.addcmul(-shift, k, beta, out=run.scratch("x", *k.shape)).exp_()
    return w if run.padding is None else w.masked_fill_(run.padding[group, :, None], 0.0)


def _largest(run: _Run, group: slice, k: Tensor, beta: Tensor) -> Tensor:
    """max_j β k_j over the keys that are not padded; 0 where there is none, which makes W = 0, S = 0 and out = 0."""
    # A CPU alone may look at values: other devices would wait for it.
    if run.padding is None and not k.is_cuda and bool((beta >= 0).all()):
        return beta * k.amax(dim=1, keepdim=True)
    x = torch.mul(k, beta, out=run.scratch("x", *k.shape))
    if run.padding is not None:
        x.masked_fill_(run.padding[group, :, None], -math.inf)
    return x.amax(dim=1, keepdim=True).nan_to_num_(neginf=0.0)


def _lln_forward(run: _Run, group: slice, inputs: Sequence[Tensor], per_head: Sequence[Tensor], out: Tensor) -> None:
    """out = weight · A (Wᵀ v); fills L = logsumexp_j(β k_j) and S = weight · Wᵀ v, the last two of per_head."""
    q, k, v = inputs
    alpha, beta, log_sum, state = per_head
    top = _largest(run, group, k, beta)
    w = _weights(run, group, k, beta, top)
    # With a real key the sum is at least 1, its largest term: the clamp concerns the empty sequence alone.
    total = w.sum(dim=1, keepdim=True).clamp_min_(1.0)
    torch.bmm(w.mT, v, out=state).mul_(run.mix.lln_weight / total.mT)
    torch.add(top, total.log_(), out=log_sum)
    torch.bmm(_features(run, q, alpha, log_sum), state, out=out)


def _lln_backward(
    run: _Run, group: slice, inputs: Sequence[Tensor], per_head: Sequence[Tensor], results: Sequence[Tensor],
    dalpha: Tensor | None, dbeta: Tensor | None,
) -> None:  # fmt: skip
    """dA = do Sᵀ, dx = A (dA - Σ_d A dA), dS = Aᵀ do, dv = W dS, dy = W (v dSᵀ - g); the logsumexp terms cancel.

    g_d = Σ_i A_id Σ_d' A_id' dA_id' = Σ_i A_id dA_id - Σ_i dx_id = (S dSᵀ)_dd - Σ_i dx_id.
    """
    q, k, v, grad = inputs
    dq, dk, dv = results
    alpha, beta, log_sum, state = per_head
    a = _features(run, q, alpha, log_sum)
    dx = _softmax_backward(torch.bmm(grad, state.mT, out=dq), a)
    dstate = torch.bmm(a.mT, grad)
    g = torch.sub((state * dstate).sum(dim=-1)[:, None], dx.sum(dim=1, keepdim=True))
    if dalpha is not None:
        dalpha[group] = torch.mul(q, dx, out=a).sum(dim=(1, 2), keepdim=True)
    dx.mul_(alpha)

    w = _weights(run, group, k, beta, log_sum)
    torch.bmm(w, dstate.mul_(run.mix.lln_weight), out=dv)
    if dbeta is None:  # dk = β dy, and it is cheaper to multiply the small factors
        dstate, g = dstate.mul_(beta), g.mul_(beta)
    dy = torch.bmm(v, dstate.mT, out=dk).sub_(g).mul_(w)
    if dbeta is not None:
        dbeta[group] = torch.mul(k, dy, out=w).sum(dim=(1, 2), keepdim=True)
        dy.mul_(beta)


def _softmax_backward(grad: Tensor, p: Tensor) -> Tensor:
    """P (dP - Σ P dP), the derivative of a softmax over the last dimension, in one pass and in the memory of dP."""
    return torch.ops.aten._softmax_backward_data.out(grad, p, -1, p.dtype, grad_input=grad)


class _BlockDiag:
    """weight · softmax(q kᵀ / √D) v inside blocks, for one group of heads; results are added to what is there."""

    def __init__(self, run: _Run, group: slice) -> None:
        self.scratch, self.block = run.scratch, run.block
        self.padding = None if run.padding is None else run.padding[group].reshape(-1, 1, run.block)
        self.kept_values, self.generator, self.weight = run.mix.kept_values, None, run.mix.diag_weight
        if run.mix.dropout_p > 0:  # the same numbers in forward and backward: a seed for every group
            self.generator = torch.Generator(run.scratch.device).manual_seed(run.mix.seed + group.start)
            self.weight *= 2**16 / self.kept_values

    def forward(self, inputs: Sequence[Tensor], out: Tensor) -> None:
        q, k, v, out = (self._blocks(x) for x in (*inputs, out))
        p = self._probabilities(q, k)
        if self.generator is not None:
            p.mul_(self._kept(p))
        out.baddbmm_(p, v, alpha=self.weight)

    def backward(self, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        q, k, v, grad, dq, dk, dv = (self._blocks(x) for x in (*inputs, *results))
        scale = self.weight / math.sqrt(q.shape[-1])
        p = self._probabilities(q, k)
        # The buffer of the scores is free once their softmax is taken.
        dp = torch.bmm(grad, v.mT, out=self.scratch("scores", *p.shape))
        if self.generator is None:
            dv.baddbmm_(p.mT, grad, alpha=self.weight)
        else:
            kept = self._kept(p)
            dp.mul_(kept)
            dv.baddbmm_(kept.mul_(p).mT, grad, alpha=self.weight)
        ds = _softmax_backward(dp, p)
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
        """0 for dropped weights, 1 for the others, by 16 random bits each: several times faster than bernoulli_."""
        words = -(-p.numel() // 4)
        bits = self.scratch("bits", words * 8 // p.itemsize).view(torch.int64)
        bits = bits.random_(-(2**63), None, generator=self.generator).view(torch.int16)[: p.numel()]
        return torch.lt(bits.view(p.shape), self.kept_values - 2**15, out=self.scratch("kept", *p.shape))
