"""Softmax attention of the global tokens of LLN+Diag over all keys.

As keys, the global tokens are added to the keys of every block of the joint form (formula.py), so that all tokens
attend to them by softmax. As queries, they attend to all keys by softmax. The backends do not compute these rows of the
output: `attend_from_global_tokens` does, at the cost of M x N scores.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lln_fairseq.ops.dispatch import autocast_disabled, differentiable_gradients, is_traced_or_transformed
from lln_fairseq.ops.formula import attend_to_all_keys


def attend_from_global_tokens(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding: Tensor | None,
    global_counts: Tensor,
    max_global: int,
    dropout_p: float,
) -> Tensor:
    """Overwrite the rows of the global queries in `out` with softmax attention over all keys that are not padding.

    The first global_counts (B,) tokens of a sequence are global, at most `max_global` of them. `out` (B, H, N, D) is
    changed in place and returned. It can be differentiated any number of times, with dropout only once.
    """
    queries = q[:, :, :max_global]
    with autocast_disabled(q):
        if dropout_p or is_traced_or_transformed(out, q, k, v, padding, global_counts):
            rows = attend_to_all_keys(queries, k, v, padding, dropout_p)
        else:
            rows = _GlobalRows.apply(queries, k, v, padding)
        is_global = torch.arange(queries.shape[2], device=q.device) < global_counts[:, None]
        first_rows = out[:, :, :max_global]
        out[:, :, :max_global] = torch.where(is_global[:, None, :, None], rows, first_rows)
    return out


class _GlobalRows(torch.autograd.Function):
    """`attend_to_all_keys` without dropout, as an autograd function with derivatives of any order.

    torch's fused attention has only first derivatives. The forward pass cannot know whether the gradients will be
    differentiated again. So it saves only the inputs, and the backward pass computes the output again.
    """

    @staticmethod
    def forward(ctx: Any, queries: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> Tensor:
        ctx.save_for_backward(queries, k, v, padding)
        return attend_to_all_keys(queries, k, v, padding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        queries, k, v, padding = ctx.saved_tensors
        create_graph = torch.is_grad_enabled() or is_traced_or_transformed(grad)

        def attend(queries: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if create_graph:
                with sdpa_kernel(SDPBackend.MATH):
                    return attend_to_all_keys(queries, k, v, padding)
            return attend_to_all_keys(queries, k, v, padding)

        with autocast_disabled(grad):
            return *differentiable_gradients(attend, (queries, k, v), ctx.needs_input_grad[:3], grad), None
