"""LLN attention of one group of heads in PyTorch, forward and backward.

With A = softmax_d(α q + L) and W = exp(β k - L), where L = logsumexp_j(β k_j), the output is A S with the state
S = lln_weight · Wᵀ v. The backward pass computes, from do, the gradient of the output:

    dA = do Sᵀ        dx = A (dA - Σ_d A dA)        dS = Aᵀ do
    dv = W dS         dy = W (v dSᵀ - g)            with x = α q and y = β k

where g = -dL, the negated gradient of L, is

    g_d = Σ_i A_id Σ_d' A_id' dA_id' = Σ_i A_id dA_id - Σ_i dx_id = (S dSᵀ)_dd - Σ_i dx_id

Tensors of tokens are (G, N, D). A result in scratch memory is valid until the same method is called again.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lln_fairseq.ops.backends.pytorch.block_diag import softmax_backward
from lln_fairseq.ops.backends.pytorch.call_context import CallContext, HeadGradients, HeadTensors


class LLNAttention:
    """Computes lln_weight · LLN attention for one group of G heads."""

    def __init__(self, call: CallContext, group: slice, heads: HeadTensors) -> None:
        """heads: the tensors of the group; the forward pass fills log_sum and state."""
        self.group = group
        self.heads = heads
        self.scratch = call.scratch
        self.weight = call.spec.lln_weight
        self.padding = None if call.padding is None else call.padding[group, :, None]

    def forward(self, inputs: Sequence[Tensor], out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the output into `out`, and fill log_sum and state of the heads; inputs are q, k and v.

        Returns: A in scratch memory, then max_j β k_j and Σ_j exp(β k_j - max), clamped to at least 1, both (G, 1, D)
        """
        q, k, v = inputs
        key_max, key_sum = self.sum_keys(k, v)
        torch.add(key_max, key_sum.clamp_min_(1.0).log(), out=self.heads.log_sum)
        return self.answer_queries(q, out), key_max, key_sum

    def backward(self, inputs: Sequence[Tensor], grads: Sequence[Tensor], scalar_grads: HeadGradients) -> None:
        """Compute the gradients of q, k and v into `grads`, and those of α and β into `scalar_grads`.

        Args:
            inputs: q, k, v and the gradient of the output
        """
        q, k, v, grad_out = inputs
        grad_state, g = self.queries_backward(q, grad_out, grads[0], scalar_grads.alpha)
        self.keys_backward(k, v, grad_state, g, grads[1:], scalar_grads.beta)

    def sum_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Compute S = lln_weight · Wᵀ v into heads.state.

        Returns: max_j β k_j and Σ_j exp(β k_j - max), the parts of L = max + log Σ. Both are (G, 1, D), and 0 for a
            sequence without a real key
        """
        key_max = self._key_max(k)
        w = self.key_features(k, key_max)
        key_sum = w.sum(dim=1, keepdim=True)
        # With a real key, the sum is at least its largest term, 1: the clamp only affects sequences without one.
        torch.bmm(w.mT, v, out=self.heads.state).mul_(self.weight / key_sum.mT.clamp_min(1.0))
        return key_max, key_sum

    def answer_queries(self, q: Tensor, out: Tensor) -> Tensor:
        """Compute A S into `out`, and return A in scratch memory."""
        a = self.query_features(q)
        torch.bmm(a, self.heads.state, out=out)
        return a

    def queries_backward(
        self, q: Tensor, grad_out: Tensor, grad_q: Tensor, grad_alpha: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Compute the gradient of q into `grad_q`, and that of α into the group's part of `grad_alpha`.

        Args:
            grad_alpha: (B·H, 1, 1), or None if it is not needed

        Returns: dS (G, D, D) and g (G, 1, D)
        """
        state = self.heads.state
        a = self.query_features(q)
        grad_x = softmax_backward(torch.bmm(grad_out, state.mT, out=grad_q), a)  # in the memory of grad_q
        grad_state = torch.bmm(a.mT, grad_out)
        g = torch.sub((state * grad_state).sum(dim=-1)[:, None], grad_x.sum(dim=1, keepdim=True))
        if grad_alpha is not None:
            grad_alpha[self.group] = torch.mul(q, grad_x, out=a).sum(dim=(1, 2), keepdim=True)
        grad_x.mul_(self.heads.alpha)
        return grad_state, g

    def keys_backward(
        self, k: Tensor, v: Tensor, grad_state: Tensor, g: Tensor, grads: Sequence[Tensor], grad_beta: Tensor | None
    ) -> None:
        """Compute the gradients of k and v into `grads`, and that of β into the group's part of `grad_beta`.

        Args:
            grad_state, g: dS (G, D, D) and g (G, 1, D) of the queries; they are overwritten
            grad_beta: (B·H, 1, 1), or None if it is not needed
        """
        grad_k, grad_v = grads
        beta = self.heads.beta
        w = self.key_features(k, self.heads.log_sum)
        torch.bmm(w, grad_state.mul_(self.weight), out=grad_v)
        if grad_beta is None:
            # The gradient of k is β dy, and multiplying the small factors is cheaper than multiplying dy.
            grad_state.mul_(beta)
            g.mul_(beta)
        grad_y = torch.bmm(v, grad_state.mT, out=grad_k).sub_(g).mul_(w)  # in the memory of grad_k
        if grad_beta is not None:
            grad_beta[self.group] = torch.mul(k, grad_y, out=w).sum(dim=(1, 2), keepdim=True)
            grad_y.mul_(beta)

    def query_features(self, q: Tensor) -> Tensor:
        """Compute A = softmax_d(α q + L) in scratch memory: each row is a distribution over the features."""
        x = torch.addcmul(self.heads.log_sum, q, self.heads.alpha, out=self.scratch("x", *q.shape))
        return torch.softmax(x, dim=-1, out=self.scratch("a", *q.shape))

    def key_features(self, k: Tensor, shift: Tensor) -> Tensor:
        """Compute exp(β k - shift) in scratch memory, 0 for padded keys. With shift = L (G, 1, D), this is W."""
        w = torch.addcmul(-shift, k, self.heads.beta, out=self.scratch("x", *k.shape)).exp_()
        return w if self.padding is None else w.masked_fill_(self.padding, 0.0)

    def _key_max(self, k: Tensor) -> Tensor:
        """Compute max_j β k_j over the keys that are not padded, (G, 1, D).

        It is 0 for a sequence without a real key, which makes W = 0, S = 0 and the output 0.
        """
        beta = self.heads.beta
        # Only on a CPU: on other devices, looking at a value would wait for the device.
        if self.padding is None and not k.is_cuda and bool((beta >= 0).all()):
            return beta * k.amax(dim=1, keepdim=True)
        y = torch.mul(k, beta, out=self.scratch("x", *k.shape))
        if self.padding is not None:
            y.masked_fill_(self.padding, -math.inf)
        return y.amax(dim=1, keepdim=True).nan_to_num_(neginf=0.0)
