"""The joint form of LLN+Diag for one group of heads in PyTorch, forward and backward: the formulas of ops/joint.py.

With M = A W_bᵀ, the block's part of P, what is outside comes out as O = A S - M v_b, so that one product serves both
parts, (a D - c M) v_b with a = 1 - c u. Backward, E = do v_bᵀ, de_i = Σ_j D_ij E_ij, oe_i = do_i O_i:

    du = c' oe - (c + c' u) de        dD = a E        dP = c E, in the block -du instead: c E + X, X = -(c E + du)
    dA = c do Sᵀ + X W_b              dS = Aᵀ (c do)              dv = W dS + (a D - c M)ᵀ do
    dx = A (dA - δ), δ = Σ_d A dA     g = Σ_i A δ                 dy = W (v dSᵀ + Xᵀ A_b - g)

Since rows of P sum to 1, du may be added to any row of dP: it stands in the block, where products are anyway.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lln_fairseq.ops.backends.pytorch.block_diag import BlockDiag
from lln_fairseq.ops.backends.pytorch.lln import features, key_weights, lln_forward
from lln_fairseq.ops.backends.pytorch.run import Run, softmax_backward
from lln_fairseq.ops.joint import BlockKinds, classify_blocks, outside_mass, outside_weight, outside_weight_gradients


class Joint:
    """One group of heads; per_head is α, β, L, S, the two parts of L and the offset."""

    def __init__(self, run: Run, group: slice, per_head: Sequence[Tensor]) -> None:
        self.run, self.group, self.diag = run, group, BlockDiag(run, group)
        self.alpha, self.beta, self.log_sum, self.state, self.top, self.total, parameter = per_head
        self.heads = parameter.shape[0]
        self.blocks = self.diag.blocks
        count = self.run.scratch.length // run.block
        # One number for every block, (G * blocks, 1, 1), beside (G * blocks, block, 1).
        self.parameter = parameter.expand(-1, count, 1).reshape(-1, 1, 1)
        padding = parameter.new_zeros(1, count, run.block, dtype=torch.bool)
        if run.padding is not None:
            padding = run.padding[group].unflatten(1, (count, run.block))
        counts = (x.expand(self.heads, count).reshape(-1, 1, 1) for x in classify_blocks(padding))
        self.kinds = BlockKinds(*counts)

    def forward(self, inputs: Sequence[Tensor], out: Tensor) -> None:
        lln = (self.alpha, self.beta, self.log_sum, self.state)
        a, top, total = lln_forward(self.run, self.group, inputs, lln, out)
        self.top.copy_(top)
        self.total.copy_(total)
        inside = self._inside(a, self._key_weights(inputs[1]))
        q, k, v, out = (self.blocks(x) for x in (*inputs, out))
        u = outside_mass(inside)
        c = outside_weight(u, self.parameter, self.kinds)
        p = self.diag.kept_probabilities(q, k)
        out.mul_(c).baddbmm_(p.mul_(1 - c * u).addcmul_(inside, c, value=-1), v)

    def backward(
        self, inputs: Sequence[Tensor], results: Sequence[Tensor], dalpha: Tensor | None, dbeta: Tensor | None,
        dparameter: Tensor | None,
    ) -> None:  # fmt: skip
        """Fills dq, dk, dv, and the group's part of the others."""
        (q, k, v, grad), (dq, dk, dv), blocks = inputs, results, self.blocks
        a, w = features(self.run, q, self.alpha, self.log_sum), self._key_weights(k)
        da = torch.bmm(grad, self.state.mT, out=dq)
        ds, x, c = self._block_slopes([*map(blocks, (q, k, v, grad, a, w, da, dv))], dparameter)

        blocks(da).mul_(c).baddbmm_(x, blocks(w))
        torch.bmm(x.mT, blocks(a), out=blocks(dk))
        delta = torch.linalg.vecdot(a, da)[..., None]
        dx = softmax_backward(da, a)
        g = torch.bmm(delta.mT, a)
        blocks(a).mul_(c)
        dstate = torch.bmm(a.mT, grad)
        if dalpha is not None:
            dalpha[self.group] = torch.mul(q, dx, out=a).sum(dim=(1, 2), keepdim=True)
        dx.mul_(self.alpha)

        dv.baddbmm_(w, dstate)
        dy = dk.baddbmm_(v, dstate.mT).sub_(g).mul_(w)
        if dbeta is not None:
            dbeta[self.group] = torch.mul(k, dy, out=a).sum(dim=(1, 2), keepdim=True)
        dy.mul_(self.beta)

        scale = 1 / math.sqrt(q.shape[-1])
        blocks(dx).baddbmm_(ds, blocks(k), alpha=scale)
        blocks(dy).baddbmm_(ds.mT, blocks(q), alpha=scale)

    def _block_slopes(
        self, tensors: Sequence[Tensor], dparameter: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Gradients of the blocks' scores, X, and c; dv becomes (a D - c M)ᵀ do."""
        q, k, v, grad, a, w, da, dv = tensors
        inside, p = self._inside(a, w), self.diag.probabilities(q, k)
        # The buffer of the scores is free once their softmax is taken.
        e = torch.bmm(grad, v.mT, out=self.run.scratch("scores", *p.shape))
        kept = self.diag.scaled_kept(p)
        dropped = p if kept is None else kept * p
        u = outside_mass(inside)
        c = outside_weight(u, self.parameter, self.kinds)
        by_u, by_parameter = outside_weight_gradients(c, u, self.parameter, self.kinds)
        diag = torch.linalg.vecdot(dropped, e)[..., None]
        outside = (torch.linalg.vecdot(a, da) - torch.linalg.vecdot(inside, e))[..., None]
        du = by_u * outside - (c + by_u * u) * diag
        if dparameter is not None:
            change = by_parameter * (outside - u * diag)
            dparameter[self.group] = change.view(self.heads, -1).sum(dim=1).view(-1, 1, 1)
        inside.mul_(-c).addcmul_(dropped, 1 - c * u)
        torch.bmm(inside.mT, grad, out=dv)
        x = torch.mul(e, -c, out=inside).sub_(du)
        e.mul_(1 - c * u)
        return softmax_backward(e if kept is None else e.mul_(kept), p), x, c

    def _key_weights(self, k: Tensor) -> Tensor:
        """W to the same bits that S was made of: e^(β k - L) would differ by what rounding does to a large L."""
        return key_weights(self.run, self.group, k, self.beta, self.top).div_(self.total)

    def _inside(self, a: Tensor, w: Tensor) -> Tensor:
        """M = A W_bᵀ."""
        a, w = self.blocks(a), self.blocks(w)
        return torch.bmm(a, w.mT, out=self.run.scratch("inside", a.shape[0], a.shape[1], a.shape[1]))
