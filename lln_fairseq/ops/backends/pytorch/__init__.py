"""LLN and block-diagonal attention in PyTorch, forward and closed-form backward, group of heads by group of heads.

Everything here works on one group: contiguous (G, N, D) in the compute dtype, padding bool (G, N) or None. Saved for
the backward pass: q, k, v, and per head the logsumexp L (D), the state S (D x D), and for a joint form L in two parts;
the rest is recomputed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lln_fairseq.ops.backends import HybridSpec
from lln_fairseq.ops.backends.pytorch.block_diag import BlockDiag
from lln_fairseq.ops.backends.pytorch.joint import Joint
from lln_fairseq.ops.backends.pytorch.lln import lln_backward, lln_forward
from lln_fairseq.ops.backends.pytorch.run import Run
from lln_fairseq.ops.backends.pytorch.shared import shared_backward, shared_forward
from lln_fairseq.ops.dtypes import compute_dtype
from lln_fairseq.ops.layout import fresh_result
from lln_fairseq.ops.moment_matching import calibration_table, matched_moments


def is_supported(q: Tensor, block_size: int | None = None) -> str | None:
    """None: it runs everywhere."""
    return None


def draw_seed(device: torch.device) -> int:
    """A seed from torch's global CPU generator: torch.manual_seed and activation checkpointing then reproduce it."""
    return int(torch.randint(2**31 - 1, (), device="cpu"))


def forward(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor | None, beta: Tensor | None, mask: Tensor | None, mix: HybridSpec
) -> tuple[Tensor, Tensor, Tensor, Sequence[Tensor]]:
    """The mixture, α and β as given or matched, and what `backward` wants to see again."""
    if alpha is None or beta is None:
        alpha, beta = match_moments(q, k, mask, calibration_table(q.shape[-1], q.device))
    run, out, saved = Run(q, mask, mix), fresh_result(q), empty_saved(q, mix)
    inputs, results = _flat(q, k, v), _flat(out)
    per_head = (*run.by_head(alpha, beta), *saved, *run.by_head(*_parameter(mix)))
    if mix.exchange:
        shared_forward(run, inputs, per_head, results[0], mix.exchange)
        return out, alpha, beta, saved
    for group in run.groups:
        loaded, cut = run.load(group, inputs), run.cut(group, results)
        (out_,) = targets = run.targets(cut)
        if mix.joint:
            Joint(run, group, run.cut(group, per_head)).forward(loaded, out_)
        elif mix.lln_weight:
            lln_forward(run, group, loaded, run.cut(group, per_head), out_)
        else:
            out_.zero_()
        if mix.diag_weight and not mix.joint:
            BlockDiag(run, group).forward(loaded, out_)
        run.store(targets, cut)
    return out, alpha, beta, saved


def backward(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, mask: Tensor | None, mix: HybridSpec,
    saved: Sequence[Tensor], grad: Tensor, needed: Sequence[bool],
) -> Sequence[Tensor | None]:  # fmt: skip
    """The gradients of q, k, v, and those of α, β and the parameter that are needed."""
    run, grads = Run(q, mask, mix), empty_results(q, k, v)
    scalars = [
        torch.zeros(run.heads, 1, 1, dtype=run.scratch.dtype, device=q.device) if need else None for need in needed
    ]
    inputs, results = _flat(q, k, v, grad), _flat(*grads)
    per_head = (*run.by_head(alpha, beta), *saved, *run.by_head(*_parameter(mix)))
    if mix.exchange:
        shared_backward(run, inputs, per_head, results, scalars[:2], mix.exchange)
    for group in () if mix.exchange else run.groups:
        loaded, cut = run.load(group, inputs), run.cut(group, results)
        targets = run.targets(cut)
        if mix.joint:
            Joint(run, group, run.cut(group, per_head)).backward(loaded, targets, *scalars)
        elif mix.lln_weight:
            lln_backward(run, group, loaded, run.cut(group, per_head), targets, *scalars[:2])
        else:
            for target in targets:
                target.zero_()
        if mix.diag_weight and not mix.joint:
            BlockDiag(run, group).backward(loaded, targets)
        run.store(targets, cut)
    return *grads, *(None if x is None else x.view(alpha.shape).to(alpha.dtype) for x in scalars)


def empty_results(q: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
    return [fresh_result(x) for x in (q, k, v)]


def empty_saved(q: Tensor, mix: HybridSpec) -> Sequence[Tensor]:
    """L and S of every head, for a joint form L in two parts behind them."""
    batch, heads, _, dim = q.shape
    shapes = ((1, dim), (dim, dim), *((1, dim), (1, dim)) * bool(mix.joint))
    return [torch.empty(batch * heads, *shape, dtype=compute_dtype(q.dtype), device=q.device) for shape in shapes]


def match_moments(q: Tensor, k: Tensor, mask: Tensor | None, table: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return matched_moments(q, k, mask, table=table)


def _parameter(mix: HybridSpec) -> Sequence[Tensor]:
    return () if mix.parameter is None else (mix.parameter,)


def _flat(*tensors: Tensor) -> list[Tensor]:
    """Batch and heads as one dimension."""
    return [x.flatten(0, 1) for x in tensors]
