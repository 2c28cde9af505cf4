"""LLN attention of one group of heads in PyTorch, forward and backward."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lln_fairseq.ops.backends.pytorch.run import Run, softmax_backward


def features(run: Run, q: Tensor, alpha: Tensor, log_sum: Tensor) -> Tensor:
    """A = softmax_d(α q + L): every row a distribution over the features."""
    x = torch.addcmul(log_sum, q, alpha, out=run.scratch("x", *q.shape))
    return torch.softmax(x, dim=-1, out=run.scratch("a", *q.shape))


def key_weights(run: Run, group: slice, k: Tensor, beta: Tensor, shift: Tensor) -> Tensor:
    """exp(β k - shift), 0 for padded keys."""
    w = torch.addcmul(-shift, k, beta, out=run.scratch("x", *k.shape)).exp_()
    return w if run.padding is None else w.masked_fill_(run.padding[group, :, None], 0.0)


def _largest(run: Run, group: slice, k: Tensor, beta: Tensor) -> Tensor:
    """max_j β k_j over the keys that are not padded; 0 where there is none, which makes W = 0, S = 0 and out = 0."""
    # A CPU alone may look at values: other devices would wait for it.
    if run.padding is None and not k.is_cuda and bool((beta >= 0).all()):
        return beta * k.amax(dim=1, keepdim=True)
    x = torch.mul(k, beta, out=run.scratch("x", *k.shape))
    if run.padding is not None:
        x.masked_fill_(run.padding[group, :, None], -math.inf)
    return x.amax(dim=1, keepdim=True).nan_to_num_(neginf=0.0)


def sum_keys(run: Run, group: slice, inputs: Sequence[Tensor], per_head: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Fills S = weight · Wᵀ v, the last of per_head; returns t = max_j β k_j and Σ_j exp(β k_j - t), 0 without key."""
    _, k, v = inputs
    _, beta, _, state = per_head
    top = _largest(run, group, k, beta)
    w = key_weights(run, group, k, beta, top)
    total = w.sum(dim=1, keepdim=True)
    # With a real key the sum is at least 1, its largest term: the clamp concerns the empty sequence alone.
    torch.bmm(w.mT, v, out=state).mul_(run.mix.lln_weight / total.mT.clamp_min(1.0))
    return top, total


def answer_queries(run: Run, inputs: Sequence[Tensor], per_head: Sequence[Tensor], out: Tensor) -> Tensor:
    """out = A S; returns A in scratch memory."""
    alpha, _, log_sum, state = per_head
    a = features(run, inputs[0], alpha, log_sum)
    torch.bmm(a, state, out=out)
    return a


def lln_forward(
    run: Run, group: slice, inputs: Sequence[Tensor], per_head: Sequence[Tensor], out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """out = weight · A (Wᵀ v); fills L = logsumexp_j(β k_j) and S = weight · Wᵀ v, the last two of per_head.

    Returns: A in scratch memory, and L in two parts: t = max_j β k_j and Σ_j exp(β k_j - t).
    """
    top, total = sum_keys(run, group, inputs, per_head)
    torch.add(top, total.clamp_min_(1.0).log(), out=per_head[2])
    return answer_queries(run, inputs, per_head, out), top, total


def lln_backward(
    run: Run, group: slice, inputs: Sequence[Tensor], per_head: Sequence[Tensor], results: Sequence[Tensor],
    dalpha: Tensor | None, dbeta: Tensor | None,
) -> None:  # fmt: skip
    """dA = do Sᵀ, dx = A (dA - Σ_d A dA), dS = Aᵀ do, dv = W dS, dy = W (v dSᵀ - g); the logsumexp terms cancel."""
    slopes = queries_backward(run, group, inputs, per_head, results[0], dalpha)
    keys_backward(run, group, inputs, per_head, slopes, results[1:], dbeta)


def queries_backward(
    run: Run, group: slice, inputs: Sequence[Tensor], per_head: Sequence[Tensor], dq: Tensor, dalpha: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Fills dq = α dx and the group's part of dα; returns dS and g.

    g_d = Σ_i A_id Σ_d' A_id' dA_id' = Σ_i A_id dA_id - Σ_i dx_id = (S dSᵀ)_dd - Σ_i dx_id.
    """
    q, _, _, grad = inputs
    alpha, _, log_sum, state = per_head
    a = features(run, q, alpha, log_sum)
    dx = softmax_backward(torch.bmm(grad, state.mT, out=dq), a)
    dstate = torch.bmm(a.mT, grad)
    g = torch.sub((state * dstate).sum(dim=-1)[:, None], dx.sum(dim=1, keepdim=True))
    if dalpha is not None:
        dalpha[group] = torch.mul(q, dx, out=a).sum(dim=(1, 2), keepdim=True)
    dx.mul_(alpha)
    return dstate, g


def keys_backward(
    run: Run, group: slice, inputs: Sequence[Tensor], per_head: Sequence[Tensor], slopes: Sequence[Tensor],
    results: Sequence[Tensor], dbeta: Tensor | None,
) -> None:  # fmt: skip
    """Fills dk = β dy, dv and the group's part of dβ from dS and g, which it may overwrite."""
    (_, k, v, _), (dk, dv), (dstate, g) = inputs, results, slopes
    _, beta, log_sum, _ = per_head
    w = key_weights(run, group, k, beta, log_sum)
    torch.bmm(w, dstate.mul_(run.mix.lln_weight), out=dv)
    if dbeta is None:  # dk = β dy, and it is cheaper to multiply the small factors
        dstate, g = dstate.mul_(beta), g.mul_(beta)
    dy = torch.bmm(v, dstate.mT, out=dk).sub_(g).mul_(w)
    if dbeta is not None:
        dbeta[group] = torch.mul(k, dy, out=w).sum(dim=(1, 2), keepdim=True)
        dy.mul_(beta)
