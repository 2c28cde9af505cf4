"""Block-diagonal softmax attention of one group of heads in PyTorch, forward and backward.

Tensors of a group are (G, N, D) with N a multiple of the block size; "as blocks" they are (G · blocks, block size, D).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lln_fairseq.ops.backends.pytorch.call_context import CallContext


def softmax_backward(grad: Tensor, p: Tensor) -> Tensor:
    """Compute P (dP - Σ P dP), the gradient through a softmax over the last dimension, in one pass.

    Args:
        grad: dP, the gradient of the softmax's output; it is overwritten by the result
        p: P, the softmax's output, of the same shape
    """
    return torch.ops.aten._softmax_backward_data.out(grad, p, -1, p.dtype, grad_input=grad)


class BlockDiagAttention:
    """Computes diag_weight · softmax(q kᵀ / √D) v inside the blocks of one group of heads.

    With dropout, forward and backward passes of the same call and group drop the same probabilities.
    """

    def __init__(self, call: CallContext, group: slice) -> None:
        self.scratch = call.scratch
        self.block_size = call.block_size
        self.padding: Tensor | None = None
        if call.padding is not None:
            self.padding = call.padding[group].reshape(-1, 1, call.block_size)
        self.keep_threshold = call.spec.keep_threshold
        self.weight = call.spec.diag_weight
        self.generator: torch.Generator | None = None
        if call.spec.dropout_p > 0:
            # Each group has its own seed, so that forward and backward draw the same numbers.
            self.generator = torch.Generator(call.scratch.device).manual_seed(call.spec.seed + group.start)
            self.weight *= 2**16 / self.keep_threshold

    def forward(self, inputs: Sequence[Tensor], out: Tensor) -> None:
        """Add the attention's output to `out` (G, N, D); inputs are q, k and v (G, N, D)."""
        q, k, v = (self.as_blocks(x) for x in inputs)
        p = self.probabilities(q, k)
        if self.generator is not None:
            p.mul_(self._draw_dropout_mask(p))
        self.as_blocks(out).baddbmm_(p, v, alpha=self.weight)

    def backward(self, inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Add the gradients of q, k and v to `grads`; inputs are q, k, v and the gradient of the output."""
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
        """View (G, N, D) as (G · blocks, block size, D)."""
        return x.view(-1, self.block_size, x.shape[-1])

    def probabilities(self, q: Tensor, k: Tensor) -> Tensor:
        """Compute softmax(q kᵀ / √D) over the real keys of each block, without dropout or weight.

        Args:
            q, k: as blocks

        Returns: (G · blocks, block size, block size) in scratch memory; 0 for padded keys, even if all are padded
        """
        scores = self.scratch("scores", q.shape[0], self.block_size, self.block_size)
        torch.baddbmm(scores, q, k.mT, beta=0, alpha=1 / math.sqrt(q.shape[-1]), out=scores)
        if self.padding is not None:
            # The lowest finite number instead of -inf: a block without a real key would become NaN.
            scores.masked_fill_(self.padding, torch.finfo(scores.dtype).min)
        p = torch.softmax(scores, dim=-1, out=self.scratch("p", *scores.shape))
        if self.padding is not None:
            p.masked_fill_(self.padding, 0.0)
        return p

    def dropout_factors(self, p: Tensor) -> Tensor | None:
        """Draw the dropout factors of the probabilities p: 0 if dropped, else diag_weight / (probability of keeping).

        Returns: a tensor like p in scratch memory; None without dropout
        """
        if self.generator is None:
            return None
        return self._draw_dropout_mask(p).mul_(self.weight)

    def _draw_dropout_mask(self, p: Tensor) -> Tensor:
        """Draw 0 for each dropped probability and 1 for each kept one, in scratch memory of p's shape and dtype.

        Each takes 16 random bits, which is several times faster than bernoulli_.
        """
        words = -(-p.numel() // 4)
        bits = self.scratch("bits", words * 8 // p.itemsize).view(torch.int64)
        bits = bits.random_(-(2**63), None, generator=self.generator).view(torch.int16)[: p.numel()]
        return torch.lt(bits.view(p.shape), self.keep_threshold - 2**15, out=self.scratch("kept", *p.shape))
