"""The joint form of LLN+Diag for one group of heads in PyTorch, with the forward and the backward pass.

ops/joint.py defines the joint form, with the LLN matrix P = A Wᵀ, the softmax inside the blocks Diag, the mass u, the
weight c and the offset o. The state is S = Wᵀ v. The index b selects the rows of a block: W_b, v_b.

Forward pass: let M = A W_bᵀ be the part of P inside the block. The part of the output from outside the block is then
O = A S - M v_b. So the output is c A S + (inner Diag - c M) v_b, with inner = 1 - c u.

Backward pass: let do be the gradient of the output, E = do v_bᵀ, de_i = Σ_j Diag_ij E_ij, oe_i = do_i O_i, c' = dc/du,
x = α q and y = β k. Then

    du = c' oe - (c + c' u) de        dDiag = inner E             X = -(c E + du)
    dA = c do Sᵀ + X W_b              dS = Aᵀ (c do)              dv = W dS + (inner Diag - c M)ᵀ do
    dx = A (dA - δ), δ = Σ_d A dA     g = Σ_i A δ                 dy = W (v dSᵀ + Xᵀ A_b - g)

The gradient of P is c E outside the block and, because u = 1 - Σ_j M_ij, -du inside the block. It is computed as the
sum of c E for all keys, which needs only the state, and X inside the block.

With global tokens, a block also has the first n keys of the sequence: the matrices Diag, M, E and X get n more columns,
which are 0 where `global_key_padding` is True. These n keys are the same for all blocks of a head, so the products need
no copies of them.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lln_fairseq.ops.backends.pytorch.block_diag import BlockDiagPasses, softmax_backward
from lln_fairseq.ops.backends.pytorch.call_context import CallContext, HeadGradients, HeadTensors
from lln_fairseq.ops.backends.pytorch.lln import LLNPasses
from lln_fairseq.ops.joint import (
    BlockKinds,
    classify_blocks,
    outside_mass,
    outside_weight,
    outside_weight_gradients,
)


class JointPasses:
    """Computes the joint form for one group of G heads.

    A tensor with one number for each block is (G · blocks, 1, 1), and a tensor with one number for each query is
    (G · blocks, block size, 1). The matrices of the blocks are (G · blocks, block size, block size + n), where n is 0
    without global tokens.

    Args:
        call: the context of the call.
        group: the slice of the heads.
        heads: the tensors of the group, with key_max, key_sum and offset. `forward` fills all of them except alpha,
            beta and offset.
    """

    def __init__(self, call: CallContext, group: slice, heads: HeadTensors) -> None:
        assert heads.key_max is not None
        assert heads.key_sum is not None
        assert heads.offset is not None
        self.heads = heads
        self.group = group
        self.scratch = call.scratch
        self.lln = LLNPasses(call, group, heads)
        self.key_max = heads.key_max
        self.key_sum = heads.key_sum
        self.block_diag = BlockDiagPasses(call, group)
        self.block_size = call.block_size
        self.as_blocks = self.block_diag.as_blocks
        self.num_heads = heads.offset.shape[0]
        num_blocks = call.scratch.length // call.block_size
        self.offset = heads.offset.expand(-1, num_blocks, 1).reshape(-1, 1, 1)
        padding = heads.offset.new_zeros(1, num_blocks, call.block_size, dtype=torch.bool)
        if call.padding is not None:
            padding = call.padding[group].unflatten(1, (num_blocks, call.block_size))
        self.num_global = 0  # n
        # With global tokens, the padding of the columns of the matrices, bool (G · blocks, 1, block size + n).
        self.key_padding: Tensor | None = None
        global_padding = None
        if call.global_padding is not None:
            global_padding = call.global_padding[group]
            self.num_global = global_padding.shape[-1]
            padding = padding.expand(self.num_heads, -1, -1)
            self.key_padding = torch.cat([padding, global_padding], dim=-1).flatten(0, 1)[:, None]
        flags = classify_blocks(padding, global_padding)
        self.blocks = BlockKinds(*(x.expand(self.num_heads, num_blocks).reshape(-1, 1, 1) for x in flags))

    def forward(self, inputs: Sequence[Tensor], out: Tensor) -> None:
        """Compute the output, and log_sum, state, key_max and key_sum of the heads.

        Args:
            inputs: q, k and v, (G, N, D).
            out: (G, N, D), is overwritten with the output.
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
        """Compute the gradients of q, k, v, α, β and the offset.

        Args:
            inputs: q, k, v and the gradient of the output, each (G, N, D).
            grads: three tensors (G, N, D), which are overwritten with the gradients of q, k and v.
            scalar_grads: the gradients of the scalars of all heads. In those that are not None, the entries of the
                group are overwritten.
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
        """Compute the gradients of the matrices of the blocks.

        Args:
            tensors: q, k, v, do, A, W, do Sᵀ and the gradient of v, each (G, N, D). Only the gradient of v is an
                output: it is overwritten with the part (inner Diag - c M)ᵀ do, which comes from inside the block.
            grad_offset: (B·H, 1, 1), or None if it is not needed. The entries of the group are overwritten.

        Returns: three tensors: the gradient of the softmax's input q kᵀ / √D and X, which are matrices of the blocks in
            scratch memory, and c, one number for each query.
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
        """Compute W in scratch memory, bit for bit the W that S was computed from.

        exp(β k - L) would differ from that W by the rounding of a large L.
        """
        return self.lln.key_features(k, self.key_max).div_(self.key_sum)

    def _lln_inside(self, a: Tensor, w: Tensor) -> Tensor:
        """Compute M in scratch memory from A and W, both (G, N, D)."""
        m = self._products(a, w, "inside")
        if self.key_padding is not None:
            m.masked_fill_(self.key_padding, 0.0)
        return m

    def _probabilities(self, q: Tensor, k: Tensor) -> Tensor:
        """Compute the softmax Diag in scratch memory from q and k, both (G, N, D), without dropout."""
        if self.key_padding is None:
            return self.block_diag.probabilities(self.as_blocks(q), self.as_blocks(k))
        scores = self._products(q, k, "scores").mul_(1 / math.sqrt(q.shape[-1]))
        scores.masked_fill_(self.key_padding, torch.finfo(scores.dtype).min)
        p = torch.softmax(scores, dim=-1, out=self.scratch("p", *scores.shape))
        return p.masked_fill_(self.key_padding, 0.0)

    def _products(self, x: Tensor, y: Tensor, buffer: str) -> Tensor:
        """Compute x_iᵀ y_j for every query i and every key j of its block, including the n global keys.

        Args:
            x, y: the vectors of the queries and of the keys, both (G, N, D).
            buffer: the name of the scratch memory for the result.

        Returns: matrices of the blocks. The entries of padding keys are not set to 0.
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
        """Add scale · Σ_j weights_ij y_j to row i of `out`, for every query i, over the keys j of its block.

        Args:
            out: (G, N, D).
            weights: matrices of the blocks.
            y: (G, N, D).
        """
        local, global_part = self._split(weights)
        self.as_blocks(out).baddbmm_(local, self.as_blocks(y), alpha=scale)
        if self.num_global:
            out.baddbmm_(global_part, y[:, : self.num_global], alpha=scale)

    def _add_transposed_product(self, out: Tensor, weights: Tensor, x: Tensor, scale: float = 1.0) -> None:
        """Add scale · Σ_i weights_ij x_i to row j of `out`, for every key j, over the queries i of its block.

        A global key is a key of several blocks and gets the sum over all of them.

        Args:
            out: (G, N, D).
            weights: matrices of the blocks.
            x: (G, N, D).
        """
        local, global_part = self._split(weights)
        self.as_blocks(out).baddbmm_(local.mT, self.as_blocks(x), alpha=scale)
        if self.num_global:
            out[:, : self.num_global].baddbmm_(global_part.mT, x, alpha=scale)

    def _split(self, matrices: Tensor) -> tuple[Tensor, Tensor]:
        """Split the columns of the matrices of the blocks, as views.

        Returns: the columns of the block's own keys, (G · blocks, block size, block size), and the columns of the n
            global keys, (G, N, n).
        """
        global_part = matrices.view(self.num_heads, -1, matrices.shape[-1])[..., self.block_size :]
        return matrices[..., : self.block_size], global_part
