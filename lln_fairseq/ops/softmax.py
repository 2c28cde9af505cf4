"""Softmax attention over padded batches by torch's fused kernel, of all queries or of the global ones of LLN+Diag.

As keys, the global tokens of LLN+Diag are added to the keys of every block of the joint form (joint.py), so that all
tokens attend to them by softmax. As queries, they attend to all keys by softmax. The backends do not compute these rows
of the output: `attend_from_global_tokens` does, at the cost of M x N scores.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lln_fairseq.ops.dispatch import autocast_disabled, differentiable_gradients, is_traced_or_transformed
from lln_fairseq.ops.padding import PADDED_QUERY_LIMIT


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None = None, dropout_p: float = 0.0) -> Tensor:
    """Compute softmax(q kᵀ / √D) v over the keys that are not padding.

    Args:
        q: (B, H, M, D), any strides.
        k, v: (B, H, N, D), any strides.
        padding: bool (B, N), True = padded, or None. The values at padding positions must be finite.
        dropout_p: probability of dropping an attention weight, drawn from torch's global generator.

    Returns: (B, H, M, D) in the dtype of v; 0 for a sequence whose keys are all padding.
    """
    if padding is None:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p)
    # A sequence that is all padding uses all its keys here, since its softmax would be 0/0, and becomes 0 below.
    empty = padding.all(dim=1)
    allowed = ~padding | empty[:, None]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed[:, None, None, :], dropout_p=dropout_p)
    return out.masked_fill(empty[:, None, None, None], 0.0)


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
            rows = _attend_to_all_keys(queries, k, v, padding, dropout_p)
        else:
            rows = _GlobalRows.apply(queries, k, v, padding)
        is_global = torch.arange(queries.shape[2], device=q.device) < global_counts[:, None]
        first_rows = out[:, :, :max_global]
        out[:, :, :max_global] = torch.where(is_global[:, None, :, None], rows, first_rows)
    return out


def _attend_to_all_keys(
    queries: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, dropout_p: float = 0.0
) -> Tensor:
    """Compute softmax attention (B, H, M, D) of the first M queries over all keys that are not padding."""
    if padding is not None:
        padded = padding[:, None, :, None]
        too_large = ~(queries.abs() < PADDED_QUERY_LIMIT)
        queries = queries.masked_fill(padded[:, :, : queries.shape[2]] & too_large, 0.0)
        k = k.masked_fill(padded, 0.0)
        v = v.masked_fill(padded, 0.0)
    return softmax_attention(queries, k, v, padding, dropout_p)


class _GlobalRows(torch.autograd.Function):
    """`_attend_to_all_keys` without dropout, as an autograd function with derivatives of any order.

    torch's fused attention has only first derivatives. The forward pass cannot know whether the gradients will be
    differentiated again. So it saves only the inputs, and the backward pass computes the output again.
    """

    @staticmethod
    def forward(ctx: Any, queries: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> Tensor:
        ctx.save_for_backward(queries, k, v, padding)
        return _attend_to_all_keys(queries, k, v, padding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        queries, k, v, padding = ctx.saved_tensors
        create_graph = torch.is_grad_enabled() or is_traced_or_transformed(grad)

        def attend(queries: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if create_graph:
                with sdpa_kernel(SDPBackend.MATH):
                    return _attend_to_all_keys(queries, k, v, padding)
            return _attend_to_all_keys(queries, k, v, padding)

        with autocast_disabled(grad):
            return *differentiable_gradients(attend, (queries, k, v), ctx.needs_input_grad[:3], grad), None
