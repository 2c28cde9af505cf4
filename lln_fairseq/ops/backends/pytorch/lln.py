"""LLN attention of one group of heads in PyTorch, with the forward and the backward pass.

With A = softmax_d(α q + L) and W = exp(β k - L), where L = logsumexp_j(β k_j), the output is A S with the state
S = λ Wᵀ v, λ = lln_weight. The backward pass computes, with do the gradient of the output, x = α q and y = β k:

    dA = do Sᵀ        dx = A (dA - Σ_d A dA)        dS = Aᵀ do
    dv = λ W dS       dy = W (λ v dSᵀ - g)          dq = α dx        dk = β dy

Here g = -dL is the negated gradient of L:

    g_d = Σ_i A_id Σ_d' A_id' dA_id' = Σ_i A_id dA_id - Σ_i dx_id = (S dSᵀ)_dd - Σ_i dx_id

Unless stated otherwise, q, k, v, their gradients, the output and its gradient are (G, N, D) for a group of G heads. A
result in scratch memory is valid until the same method is called again.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lln_fairseq.ops.backends import WEIGHTS
from lln_fairseq.ops.backends.pytorch.block_diag import softmax_backward
from lln_fairseq.ops.backends.pytorch.call_context import CallContext, HeadGradients, HeadTensors


class LLNPasses:
    """Computes lln_weight · LLN attention for one group of G heads.

    Args:
        call: the context of the call.
        group: the slice of the heads.
        heads: the tensors of the group. `forward` fills log_sum and state.
    """

    def __init__(self, call: CallContext, group: slice, heads: HeadTensors) -> None:
        self.group = group
        self.heads = heads
        self.scratch = call.scratch
        self.weight = WEIGHTS[call.spec.form][0]
        self.padding = None if call.padding is None else call.padding[group, :, None]

    def forward(self, inputs: Sequence[Tensor], out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the output, and log_sum and state of the heads.

        Args:
            inputs: q, k and v.
            out: is overwritten with the output.

        Returns: A in scratch memory, then the maximum max_j β k_j and the sum Σ_j exp(β k_j - maximum), both (G, 1, D).
            The sum is at least 1, also for a sequence that is all padding.
        """
        q, k, v = inputs
        key_max, key_sum = self.sum_keys(k, v)
        torch.add(key_max, key_sum.clamp_min_(1.0).log(), out=self.heads.log_sum)
        return self.answer_queries(q, out), key_max, key_sum

    def backward(self, inputs: Sequence[Tensor], grads: Sequence[Tensor], scalar_grads: HeadGradients) -> None:
        """Compute the gradients of q, k, v, α and β.

        Args:
            inputs: q, k, v and the gradient of the output.
            grads: three tensors, which are overwritten with the gradients of q, k and v.
            scalar_grads: the gradients of the scalars of all heads. In those of α and β that are not None, the entries
                of the group are overwritten.
        """
        q, k, v, grad_out = inputs
        grad_state, g = self.queries_backward(q, grad_out, grads[0], scalar_grads.alpha)
        self.keys_backward(k, v, grad_state, g, grads[1:], scalar_grads.beta)

    def sum_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Overwrite heads.state with S = lln_weight · Wᵀ v.

        Returns: the maximum max_j β k_j and the sum Σ_j exp(β k_j - maximum), for which L = maximum + log sum. Both are
            (G, 1, D). Both are 0 for a sequence that is all padding.
        """
        key_max = self._key_max(k)
        w = self.key_features(k, key_max)
        key_sum = w.sum(dim=1, keepdim=True)
        # The sum is at least its largest term, 1. Only a sequence that is all padding needs the clamp.
        torch.bmm(w.mT, v, out=self.heads.state).mul_(self.weight / key_sum.mT.clamp_min(1.0))
        return key_max, key_sum

    def answer_queries(self, q: Tensor, out: Tensor) -> Tensor:
        """Overwrite `out` with A S, and return A in scratch memory."""
        a = self.query_features(q)
        torch.bmm(a, self.heads.state, out=out)
        return a

    def queries_backward(
        self, q: Tensor, grad_out: Tensor, grad_q: Tensor, grad_alpha: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Compute the gradients of q and α, and the sums over the queries that `keys_backward` needs.

        Args:
            q: the queries.
            grad_out: the gradient of the output.
            grad_q: is overwritten with the gradient of q.
            grad_alpha: (B·H, 1, 1), or None if it is not needed. The entries of the group are overwritten with the
                gradient of α.

        Returns: dS, (G, D, D), and g, (G, 1, D).
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
        """Compute the gradients of k, v and β.

        Args:
            k, v: the keys and values.
            grad_state: dS from `queries_backward`, summed over all workers, (G, D, D). Its contents are destroyed.
            g: g from `queries_backward`, summed over all workers, (G, 1, D). Its contents are destroyed.
            grads: two tensors, which are overwritten with the gradients of k and v.
            grad_beta: (B·H, 1, 1), or None if it is not needed. The entries of the group are overwritten with the
                gradient of β.
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
        """Compute exp(β k - shift) in scratch memory, with 0 for padding keys.

        `shift` is (G, 1, D). If it is L, the result is W.
        """
        w = torch.addcmul(-shift, k, self.heads.beta, out=self.scratch("x", *k.shape)).exp_()
        return w if self.padding is None else w.masked_fill_(self.padding, 0.0)

    def _key_max(self, k: Tensor) -> Tensor:
        """Compute max_j β k_j over the keys that are not padding, (G, 1, D).

        The maximum of a sequence that is all padding is set to 0, which makes W, S and the output 0.
        """
        beta = self.heads.beta
        if k.shape[1] == 0:  # a worker without tokens
            return torch.zeros_like(self.heads.log_sum)
        # The shortcut is not used on a GPU, because the host would wait for the values of β.
        if self.padding is None and not k.is_cuda and bool((beta >= 0).all()):
            return beta * k.amax(dim=1, keepdim=True)
        y = torch.mul(k, beta, out=self.scratch("x", *k.shape))
        if self.padding is not None:
            y.masked_fill_(self.padding, -math.inf)
        return y.amax(dim=1, keepdim=True).nan_to_num_(neginf=0.0)
