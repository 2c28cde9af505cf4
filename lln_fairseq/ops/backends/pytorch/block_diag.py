"""Softmax inside blocks for one group of heads in PyTorch, forward and backward."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lln_fairseq.ops.backends.pytorch.run import Run, softmax_backward


class BlockDiag:
    """weight · softmax(q kᵀ / √D) v inside blocks, for one group of heads; results are added to what is there."""

    def __init__(self, run: Run, group: slice) -> None:
        self.scratch, self.block = run.scratch, run.block
        self.padding = None if run.padding is None else run.padding[group].reshape(-1, 1, run.block)
        self.keep_threshold, self.generator, self.weight = run.mix.keep_threshold, None, run.mix.diag_weight
        if run.mix.dropout_p > 0:  # the same numbers in forward and backward: a seed for every group
            self.generator = torch.Generator(run.scratch.device).manual_seed(run.mix.seed + group.start)
            self.weight *= 2**16 / self.keep_threshold

    def forward(self, inputs: Sequence[Tensor], out: Tensor) -> None:
        q, k, v, out = (self.blocks(x) for x in (*inputs, out))
        p = self.probabilities(q, k)
        if self.generator is not None:
            p.mul_(self.draw_kept(p))
        out.baddbmm_(p, v, alpha=self.weight)

    def backward(self, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        q, k, v, grad, dq, dk, dv = (self.blocks(x) for x in (*inputs, *results))
        scale = self.weight / math.sqrt(q.shape[-1])
        p = self.probabilities(q, k)
        # The buffer of the scores is free once their softmax is taken.
        dp = torch.bmm(grad, v.mT, out=self.scratch("scores", *p.shape))
        if self.generator is None:
            dv.baddbmm_(p.mT, grad, alpha=self.weight)
        else:
            kept = self.draw_kept(p)
            dp.mul_(kept)
            dv.baddbmm_(kept.mul_(p).mT, grad, alpha=self.weight)
        ds = softmax_backward(dp, p)
        dq.baddbmm_(ds, k, alpha=scale)
        dk.baddbmm_(ds.mT, q, alpha=scale)

    def kept_probabilities(self, q: Tensor, k: Tensor) -> Tensor:
        """weight · softmax after dropout, of blocks."""
        p = self.probabilities(q, k)
        kept = self.scaled_kept(p)
        return p if kept is None else p.mul_(kept)

    def scaled_kept(self, p: Tensor) -> Tensor | None:
        """What dropout multiplies the weights by, `weight` included; None without dropout."""
        return None if self.generator is None else self.draw_kept(p).mul_(self.weight)

    def blocks(self, x: Tensor) -> Tensor:
        return x.view(-1, self.block, x.shape[-1])

    def probabilities(self, q: Tensor, k: Tensor) -> Tensor:
        scores = self.scratch("scores", q.shape[0], self.block, self.block)
        torch.baddbmm(scores, q, k.mT, beta=0, alpha=1 / math.sqrt(q.shape[-1]), out=scores)
        if self.padding is not None:
            # The lowest finite number, not -inf: a block without a real key must not become NaN ...
            scores.masked_fill_(self.padding, torch.finfo(scores.dtype).min)
        p = torch.softmax(scores, dim=-1, out=self.scratch("p", *scores.shape))
        # ... and gives 0 because its weights are set to 0 here.
        return p if self.padding is None else p.masked_fill_(self.padding, 0.0)

    def draw_kept(self, p: Tensor) -> Tensor:
        """0 for dropped weights, 1 for the others, by 16 random bits each: several times faster than bernoulli_."""
        words = -(-p.numel() // 4)
        bits = self.scratch("bits", words * 8 // p.itemsize).view(torch.int64)
        bits = bits.random_(-(2**63), None, generator=self.generator).view(torch.int16)[: p.numel()]
        return torch.lt(bits.view(p.shape), self.keep_threshold - 2**15, out=self.scratch("kept", *p.shape))
