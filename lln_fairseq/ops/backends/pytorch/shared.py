"""The mixture of LLN and block-diagonal softmax where a sequence lies on several workers, in PyTorch.

In two passes over the groups of heads instead of one, with the exchange between them: see ops/exchange.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lln_fairseq.ops.backends.pytorch.block_diag import BlockDiag
from lln_fairseq.ops.backends.pytorch.lln import answer_queries, keys_backward, queries_backward, sum_keys
from lln_fairseq.ops.backends.pytorch.run import Run
from lln_fairseq.ops.exchange import Exchange


def shared_forward(
    run: Run, inputs: Sequence[Tensor], per_head: Sequence[Tensor], out: Tensor, exchange: Exchange
) -> None:  # fmt: skip
    """Fills out, and L and S of per_head = α, β, L, S, for q, k, v (B H, N, D)."""
    _, _, log_sum, state = per_head
    top, total = torch.empty_like(log_sum), torch.empty_like(log_sum)
    for group in run.groups:
        top[group], total[group] = sum_keys(run, group, run.load(group, inputs), run.cut(group, per_head))
    merged = exchange.merge_states(top[:, 0], total[:, 0], state)
    top, total = (x[:, None] for x in merged[:2])
    state.copy_(merged[2])
    torch.add(top, total.clamp_min(1.0).log(), out=log_sum)
    for group in run.groups:
        loaded, cut = run.load(group, inputs), run.cut(group, [out])
        (out_,) = targets = run.targets(cut)
        answer_queries(run, loaded, run.cut(group, per_head), out_)
        if run.mix.diag_weight:
            BlockDiag(run, group).forward(loaded, out_)
        run.store(targets, cut)


def shared_backward(
    run: Run, inputs: Sequence[Tensor], per_head: Sequence[Tensor], grads: Sequence[Tensor],
    scalars: Sequence[Tensor | None], exchange: Exchange,
) -> None:  # fmt: skip
    """Fills dq, dk, dv, and dα, dβ where they are wanted, for q, k, v and the gradient (B H, N, D)."""
    _, _, log_sum, state = per_head
    dstate, g = torch.empty_like(state), torch.empty_like(log_sum)
    for group in run.groups:
        loaded, cut = run.load(group, inputs), run.cut(group, grads[:1])
        (dq,) = targets = run.targets(cut)
        dstate[group], g[group] = queries_backward(run, group, loaded, run.cut(group, per_head), dq, scalars[0])
        run.store(targets, cut)
    slopes = exchange.sum(dstate, g)
    for group in run.groups:
        loaded, cut = run.load(group, inputs), run.cut(group, grads)
        targets = run.targets(cut)
        keys_backward(run, group, loaded, run.cut(group, per_head), run.cut(group, slopes), targets[1:], scalars[1])
        targets[0] = run.scratch.load("result0", cut[0])  # which is filled in already
        if run.mix.diag_weight:
            BlockDiag(run, group).backward(loaded, targets)
        run.store(targets, cut)
