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


def lln_forward(
    run: Run, group: slice, inputs: Sequence[Tensor], per_head: Sequence[Tensor], out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """out = weight · A (Wᵀ v); fills L = logsumexp_j(β k_j) and S = weight · Wᵀ v, the last two of per_head.

    Returns: A in scratch memory, and L in two parts: t = max_j β k_j and Σ_j exp(β k_j - t).
    """
    q, k, v = inputs
    alpha, beta, log_sum, state = per_head
    top = _largest(run, group, k, beta)
    w = key_weights(run, group, k, beta, top)
    # With a real key the sum is at least 1, its largest term: the clamp concerns the empty sequence alone.
    total = w.sum(dim=1, keepdim=True).clamp_min_(1.0)
    torch.bmm(w.mT, v, out=state).mul_(run.mix.lln_weight / total.mT)
    torch.add(top, total.log(), out=log_sum)
    a = features(run, q, alpha, log_sum)
    torch.bmm(a, state, out=out)
    return a, top, total


def lln_backward(
    run: Run, group: slice, inputs: Sequence[Tensor], per_head: Sequence[Tensor], results: Sequence[Tensor],
    dalpha: Tensor | None, dbeta: Tensor | None,
) -> None:  # fmt: skip
    """dA = do Sᵀ, dx = A (dA - Σ_d A dA), dS = Aᵀ do, dv = W dS, dy = W (v dSᵀ - g); the logsumexp terms cancel.

    g_d = Σ_i A_id Σ_d' A_id' dA_id' = Σ_i A_id dA_id - Σ_i dx_id = (S dSᵀ)_dd - Σ_i dx_id.
    """
    q, k, v, grad = inputs
    dq, dk, dv = results
    alpha, beta, log_sum, state = per_head
    a = features(run, q, alpha, log_sum)
    dx = softmax_backward(torch.bmm(grad, state.mT, out=dq), a)
    dstate = torch.bmm(a.mT, grad)
    g = torch.sub((state * dstate).sum(dim=-1)[:, None], dx.sum(dim=1, keepdim=True))
    if dalpha is not None:
        dalpha[group] = torch.mul(q, dx, out=a).sum(dim=(1, 2), keepdim=True)
    dx.mul_(alpha)

    w = key_weights(run, group, k, beta, log_sum)
    torch.bmm(w, dstate.mul_(run.mix.lln_weight), out=dv)
    if dbeta is None:  # dk = β dy, and it is cheaper to multiply the small factors
        dstate, g = dstate.mul_(beta), g.mul_(beta)
    dy = torch.bmm(v, dstate.mT, out=dk).sub_(g).mul_(w)
    if dbeta is not None:
        dbeta[group] = torch.mul(k, dy, out=w).sum(dim=(1, 2), keepdim=True)
        dy.mul_(beta)
