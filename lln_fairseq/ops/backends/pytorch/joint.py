"""The joint form of LLN+Diag for one group of heads in PyTorch, forward and backward: the formulas of ops/joint.py.

In addition to the symbols there (P = A Wᵀ, D, u, c, o), let M = A W_bᵀ be the block's part of P, with W_b the rows of
W that belong to the block. The part of the output from outside the block is then O = A S - M v_b, so that the block
needs only one product, (a D - c M) v_b with a = 1 - c u. In the backward pass, with E = do v_bᵀ, de_i = Σ_j D_ij E_ij
and oe_i = do_i O_i:

    du = c' oe - (c + c' u) de        dD = a E        dP = c E, in the block -du instead: c E + X, X = -(c E + du)
    dA = c do Sᵀ + X W_b              dS = Aᵀ (c do)              dv = W dS + (a D - c M)ᵀ do
    dx = A (dA - δ), δ = Σ_d A dA     g = Σ_i A δ                 dy = W (v dSᵀ + Xᵀ A_b - g)

Since the rows of P sum to 1, du may be added to any entries of a row of dP: it is added inside the block, where the
products are computed anyway.

With global tokens, a block also has the first n keys of the sequence: the matrices D, M, E and X get n more columns,
which are 0 where `global_key_padding` is True. These keys are the same rows for all blocks of a head, so that their
products need no copy of them.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lln_fairseq.ops.backends.pytorch.block_diag import BlockDiagAttention, softmax_backward
from lln_fairseq.ops.backends.pytorch.call_context import CallContext, HeadGradients, HeadTensors
from lln_fairseq.ops.backends.pytorch.lln import LLNAttention
from lln_fairseq.ops.joint import (
    BlockKinds,
    classify_blocks,
    outside_mass,
    outside_weight,
    outside_weight_gradients,
)


class JointAttention:
    """Computes the joint form for one group of G heads.

    Numbers of a block are (G · blocks, 1, 1), numbers of a query (G · blocks, block size, 1), and matrices of a block
    (G · blocks, block size, block size + n), where n is 0 without global tokens.
    """

    def __init__(self, call: CallContext, group: slice, heads: HeadTensors) -> None:
        """heads: the tensors of the group, with key_max, key_sum and offset."""
        assert heads.key_max is not None
        assert heads.key_sum is not None
        assert heads.offset is not None
        self.heads = heads
        self.group = group
        self.scratch = call.scratch
        self.lln = LLNAttention(call, group, heads)
        self.key_max = heads.key_max
        self.key_sum = heads.key_sum
        self.block_diag = BlockDiagAttention(call, group)
        self.block_size = call.block_size
        self.as_blocks = self.block_diag.as_blocks
        self.num_heads = heads.offset.shape[0]
        num_blocks = call.scratch.length // call.block_size
        self.offset = heads.offset.expand(-1, num_blocks, 1).reshape(-1, 1, 1)
        padding = heads.offset.new_zeros(1, num_blocks, call.block_size, dtype=torch.bool)
        if call.padding is not None:
            padding = call.padding[group].unflatten(1, (num_blocks, call.block_size))
        self.num_global = 0  # n
        self.key_padding: Tensor | None = None  # of the columns of a block's matrices, with global tokens
        global_padding = None
        if call.global_padding is not None:
            global_padding = call.global_padding[group]
            self.num_global = global_padding.shape[-1]
            padding = padding.expand(self.num_heads, -1, -1)
            self.key_padding = torch.cat([padding, global_padding], dim=-1).flatten(0, 1)[:, None]
        flags = classify_blocks(padding, global_padding)
        self.blocks = BlockKinds(*(x.expand(self.num_heads, num_blocks).reshape(-1, 1, 1) for x in flags))

    def forward(self, inputs: Sequence[Tensor], out: Tensor) -> None:
        """Compute the output into `out` (G, N, D), and fill log_sum, state, key_max and key_sum of the heads.

        Args:
            inputs: q, k and v (G, N, D)
        """
        q, k, v = inputs
        a, key_max, key_sum = self.lln.forward(inputs, out)
        self.key_max.copy_(key_max)
        self.key_sum.copy_(key_sum)
        m = self._lln_inside(a, self._key_features(k))
        u = outside_mass(m)
        c = outside_weight(u, self.offset, self.blocks)
        p = self._probabilities(q, k)
        dropout_factors = self.block_diag.dropout_factors(p)
        if dropout_factors is not None:
            p.mul_(dropout_factors)
        self.as_blocks(out).mul_(c)
        self._add_product(out, p.mul_(1 - c * u).addcmul_(m, c, value=-1), v)

    def backward(self, inputs: Sequence[Tensor], grads: Sequence[Tensor], scalar_grads: HeadGradients) -> None:
        """Compute the gradients of q, k and v into `grads`, and those of α, β and the offset into `scalar_grads`.

        Args:
            inputs: q, k, v and the gradient of the output, each (G, N, D)
            grads: three tensors (G, N, D)
            scalar_grads: tensors of all heads, of which the group's part is filled
        """
        q, k, v, grad_out = inputs
        grad_q, grad_k, grad_v = grads
        as_blocks = self.as_blocks
        a = self.lln.query_features(q)
        w = self._key_features(k)
        grad_a = torch.bmm(grad_out, self.heads.state.mT, out=grad_q)
        grad_scores, x, c = self._block_backward((q, k, v, grad_out, a, w, grad_a, grad_v), scalar_grads.offset)

        # Queries. grad_a and grad_x are in the memory of grad_q.
        as_blocks(grad_a).mul_(c)
        self._add_product(grad_a, x, w)
        grad_k.zero_()
        self._add_transposed_product(grad_k, x, a)
        delta = torch.linalg.vecdot(a, grad_a)[..., None]
        grad_x = softmax_backward(grad_a, a)
        g = torch.bmm(delta.mT, a)
        as_blocks(a).mul_(c)
        grad_state = torch.bmm(a.mT, grad_out)
        if scalar_grads.alpha is not None:
            scalar_grads.alpha[self.group] = torch.mul(q, grad_x, out=a).sum(dim=(1, 2), keepdim=True)
        grad_x.mul_(self.heads.alpha)

        # Keys. grad_y is in the memory of grad_k.
        grad_v.baddbmm_(w, grad_state)
        grad_y = grad_k.baddbmm_(v, grad_state.mT).sub_(g).mul_(w)
        if scalar_grads.beta is not None:
            scalar_grads.beta[self.group] = torch.mul(k, grad_y, out=a).sum(dim=(1, 2), keepdim=True)
        grad_y.mul_(self.heads.beta)

        # The softmax inside the blocks.
        scale = 1 / math.sqrt(q.shape[-1])
        self._add_product(grad_x, grad_scores, k, scale)
        self._add_transposed_product(grad_y, grad_scores, q, scale)

    def _block_backward(self, tensors: Sequence[Tensor], grad_offset: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of the blocks' matrices.

        Args:
            tensors: q, k, v, do, A, W, do Sᵀ and the gradient of v, each (G, N, D); the last is overwritten by the
                part from inside the block, (a D - c M)ᵀ do
            grad_offset: (B·H, 1, 1), of which the group's part is filled; None if it is not needed

        Returns: the gradient of the softmax's scores and X, both matrices of the blocks, and c for each query
        """
        q, k, v, grad_out, a, w, grad_a, grad_v = tensors
        m = self._lln_inside(a, w)
        p = self._probabilities(q, k)
        # The buffer of the scores is free once their softmax has been computed.
        e = self._products(grad_out, v, "scores")
        dropout_factors = self.block_diag.dropout_factors(p)
        dropped_p = p if dropout_factors is None else dropout_factors * p
        u = outside_mass(m)
        c = outside_weight(u, self.offset, self.blocks)
        c_by_u, c_by_offset = outside_weight_gradients(c, u, self.offset, self.blocks)
        diag_e = torch.linalg.vecdot(dropped_p, e)[..., None]
        out_e = torch.linalg.vecdot(self.as_blocks(a), self.as_blocks(grad_a))
        outside_e = (out_e - torch.linalg.vecdot(m, e))[..., None]
        grad_u = c_by_u * outside_e - (c + c_by_u * u) * diag_e
        if grad_offset is not None:
            grad_by_query = c_by_offset * (outside_e - u * diag_e)
            grad_offset[self.group] = grad_by_query.view(self.num_heads, -1).sum(dim=1).view(-1, 1, 1)
        m.mul_(-c).addcmul_(dropped_p, 1 - c * u)
        grad_v.zero_()
        self._add_transposed_product(grad_v, m, grad_out)
        x = torch.mul(e, -c, out=m).sub_(grad_u)
        if self.key_padding is not None:
            x.masked_fill_(self.key_padding, 0.0)
        grad_p = e.mul_(1 - c * u)
        if dropout_factors is not None:
            grad_p.mul_(dropout_factors)
        return softmax_backward(grad_p, p), x, c

    def _key_features(self, k: Tensor) -> Tensor:
        """Compute W in scratch memory, with the same bits that S was computed from.

        exp(β k - L) would differ from them by the rounding of a large L.
        """
        return self.lln.key_features(k, self.key_max).div_(self.key_sum)

    def _lln_inside(self, a: Tensor, w: Tensor) -> Tensor:
        """Compute M from A and W (G, N, D) in scratch memory."""
        m = self._products(a, w, "inside")
        if self.key_padding is not None:
            m.masked_fill_(self.key_padding, 0.0)
        return m

    def _probabilities(self, q: Tensor, k: Tensor) -> Tensor:
        """Compute D from q and k (G, N, D) in scratch memory, without dropout."""
        if self.key_padding is None:
            return self.block_diag.probabilities(self.as_blocks(q), self.as_blocks(k))
        scores = self._products(q, k, "scores").mul_(1 / math.sqrt(q.shape[-1]))
        scores.masked_fill_(self.key_padding, torch.finfo(scores.dtype).min)
        p = torch.softmax(scores, dim=-1, out=self.scratch("p", *scores.shape))
        return p.masked_fill_(self.key_padding, 0.0)

    def _products(self, x: Tensor, y: Tensor, buffer: str) -> Tensor:
        """Multiply the rows of x by those of y that are keys of the same block.

        Args:
            x, y: (G, N, D)
            buffer: name of the scratch memory of the result

        Returns: matrices of the blocks; entries of padded keys are not cleared
        """
        blocks = self.as_blocks(x)
        products = self.scratch(buffer, blocks.shape[0], self.block_size, self.block_size + self.num_global)
        if self.num_global == 0:
            return torch.bmm(blocks, self.as_blocks(y).mT, out=products)
        local, global_part = self._split(products)
        local.baddbmm_(blocks, self.as_blocks(y).mT, beta=0)
        global_part.baddbmm_(x, y[:, : self.num_global].mT, beta=0)
        return products

    def _add_product(self, out: Tensor, weights: Tensor, y: Tensor, scale: float = 1.0) -> None:
        """Add scale · weights y to out: the keys' rows of y, weighted for each query.

        Args:
            out, y: (G, N, D)
            weights: matrices of the blocks
        """
        local, global_part = self._split(weights)
        self.as_blocks(out).baddbmm_(local, self.as_blocks(y), alpha=scale)
        if self.num_global:
            out.baddbmm_(global_part, y[:, : self.num_global], alpha=scale)

    def _add_transposed_product(self, out: Tensor, weights: Tensor, x: Tensor, scale: float = 1.0) -> None:
        """Add scale · weightsᵀ x to out: the queries' rows of x, weighted for each key.

        Args:
            out, x: (G, N, D)
            weights: matrices of the blocks
        """
        local, global_part = self._split(weights)
        self.as_blocks(out).baddbmm_(local.mT, self.as_blocks(x), alpha=scale)
        if self.num_global:
            out[:, : self.num_global].baddbmm_(global_part.mT, x, alpha=scale)

    def _split(self, matrices: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of the columns of the blocks' own keys, (G · blocks, block size, block size), and of the global
        keys, (G, N, n).
        """
        global_part = matrices.view(self.num_heads, -1, matrices.shape[-1])[..., self.block_size :]
        return matrices[..., : self.block_size], global_part
