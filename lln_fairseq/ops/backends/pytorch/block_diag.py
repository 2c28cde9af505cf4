"""Block-diagonal softmax attention of one group of heads in PyTorch, with the forward and the backward pass.

Tensors of a group of G heads are (G, N, D), where N is a multiple of the block size. A tensor "as blocks" is the view
(G · blocks, block size, D) of such a tensor.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lln_fairseq.ops.backends import WEIGHTS
from lln_fairseq.ops.backends.pytorch.call_context import CallContext
from lln_fairseq.ops.dispatch import keep_threshold


def softmax_backward(grad: Tensor, p: Tensor) -> Tensor:
    """Return the gradient of the input of a softmax over the last dimension: P (dP - Σ P dP).

    Args:
        grad: dP, the gradient of the output of the softmax. It is overwritten with the result.
        p: P, the output of the softmax, in the same shape.
    """
    return torch.ops.aten._softmax_backward_data.out(grad, p, -1, p.dtype, grad_input=grad)


class BlockDiagPasses:
    """Computes diag_weight · softmax(q kᵀ / √D) v inside the blocks of one group of heads.

    With dropout, the seed of the call and the group decide which probabilities are dropped. So the forward pass and the
    backward pass drop the same probabilities, although each has its own object of this class.
    """

    def __init__(self, call: CallContext, group: slice) -> None:
        self.scratch = call.scratch
        self.block_size = call.block_size
        self.padding: Tensor | None = None
        if call.padding is not None:
            self.padding = call.padding[group].reshape(-1, 1, call.block_size)
        self.keep_threshold = keep_threshold(call.spec.dropout)
        self.weight = WEIGHTS[call.spec.form][1]
        self.generator: torch.Generator | None = None
        if call.spec.dropout > 0:
            assert call.inputs.seed is not None
            # Each group has its own seed, so that forward and backward draw the same numbers.
            self.generator = torch.Generator(call.scratch.device).manual_seed(int(call.inputs.seed) + group.start)
            self.weight *= 2**16 / self.keep_threshold

    def forward(self, inputs: Sequence[Tensor], out: Tensor) -> None:
        """Add the output of the attention to `out`.

        Args:
            inputs: q, k and v, (G, N, D).
            out: (G, N, D).
        """
        q, k, v = (self.as_blocks(x) for x in inputs)
        p = self.probabilities(q, k)
        if self.generator is not None:
            p.mul_(self._draw_dropout_mask(p))
        self.as_blocks(out).baddbmm_(p, v, alpha=self.weight)

    def backward(self, inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Add the gradients of q, k and v to `grads`.

        Args:
            inputs: q, k, v and the gradient of the output, (G, N, D).
            grads: three tensors (G, N, D).
        """
        q, k, v, grad_out = (self.as_blocks(x) for x in inputs)
        grad_q, grad_k, grad_v = (self.as_blocks(x) for x in grads)
        p = self.probabilities(q, k)
        # The buffer of the scores is free once their softmax has been computed.
        grad_p = torch.bmm(grad_out, v.mT, out=self.scratch("scores", *p.shape))
        if self.generator is None:
            grad_v.baddbmm_(p.mT, grad_out, alpha=self.weight)
        else:
            mask = self._draw_dropout_mask(p)
            grad_p.mul_(mask)
            grad_v.baddbmm_(mask.mul_(p).mT, grad_out, alpha=self.weight)
        grad_scores = softmax_backward(grad_p, p)
        scale = self.weight / math.sqrt(q.shape[-1])
        grad_q.baddbmm_(grad_scores, k, alpha=scale)
        grad_k.baddbmm_(grad_scores.mT, q, alpha=scale)

    def as_blocks(self, x: Tensor) -> Tensor:
        """Return a view of x (G, N, D) as (G · blocks, block size, D)."""
        return x.view(-1, self.block_size, x.shape[-1])

    def probabilities(self, q: Tensor, k: Tensor) -> Tensor:
        """Compute softmax(q kᵀ / √D) over the keys of each block that are not padding.

        Neither dropout nor diag_weight is applied.

        Args:
            q, k: (G · blocks, block size, D).

        Returns: (G · blocks, block size, block size) in scratch memory. It is 0 for padding keys, also in blocks whose
            keys are all padding.
        """
        scores = self.scratch("scores", q.shape[0], self.block_size, self.block_size)
        torch.baddbmm(scores, q, k.mT, beta=0, alpha=1 / math.sqrt(q.shape[-1]), out=scores)
        if self.padding is not None:
            # The lowest finite number instead of -inf: a block whose keys are all padding would become NaN.
            scores.masked_fill_(self.padding, torch.finfo(scores.dtype).min)
        p = torch.softmax(scores, dim=-1, out=self.scratch("p", *scores.shape))
        if self.padding is not None:
            p.masked_fill_(self.padding, 0.0)
        return p

    def dropout_factors(self, p: Tensor) -> Tensor | None:
        """Draw the factors by which dropout multiplies the probabilities p.

        Returns: None if the call has no dropout. Otherwise a tensor in the shape and dtype of p, in scratch memory: 0
            for a dropped probability, and diag_weight / (probability of keeping) for a kept one.
        """
        if self.generator is None:
            return None
        return self._draw_dropout_mask(p).mul_(self.weight)

    def _draw_dropout_mask(self, p: Tensor) -> Tensor:
        """Draw 0 for each dropped probability and 1 for each kept one. The call must have dropout.

        Each probability uses 16 random bits, which is several times faster than bernoulli_.

        Returns: a tensor in the shape and dtype of p, in scratch memory.
        """
        words = -(-p.numel() // 4)
        bits = self.scratch("bits", words * 8 // p.itemsize).view(torch.int64)
        bits = bits.random_(-(2**63), None, generator=self.generator).view(torch.int16)[: p.numel()]
        return torch.lt(bits.view(p.shape), self.keep_threshold - 2**15, out=self.scratch("kept", *p.shape))
