"""The rows of the output that belong to global tokens, computed by torch's fused attention.

These queries attend to all keys. The kernels neither write their rows nor read their part of the gradient. Triton's
interpreter, whose tensors are on a CPU, uses the functions of the PyTorch backend instead.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lln_fairseq.ops.backends.torch import GlobalRows
from lln_fairseq.ops.formula import LLN, Inputs, Spec, clear_padding, load_heads

# These operations of torch support every dtype of the kernels, masks and dropout.
FUSED = torch.ops.aten._scaled_dot_product_efficient_attention.default
FUSED_BACKWARD = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
LOG_SUM_MULTIPLE = 32  # FUSED returns the logarithms of the sums of so many queries, or of a multiple
MASK_MULTIPLE = 16  # FUSED reads a mask whose rows begin at multiples of so many numbers


def is_fused(x: Tensor) -> bool:
    """Return True if torch's fused attention computes the rows, which it cannot do in Triton's interpreter."""
    return x.is_cuda


def empty_rows(spec: Spec, q: Tensor) -> Sequence[Tensor]:
    """Return uninitialized tensors like those that `attend_from_global_tokens` returns without dropout."""
    if not spec.max_global or not is_fused(q):
        return ()
    batch, heads, _, dim = q.shape
    sums = (spec.max_global + LOG_SUM_MULTIPLE - 1) // LOG_SUM_MULTIPLE * LOG_SUM_MULTIPLE
    rows = q.new_empty(batch, spec.max_global, heads, dim).transpose(1, 2)
    return rows, q.new_empty(batch, heads, sums, dtype=torch.float32)


def attend_from_global_tokens(spec: Spec, inputs: Inputs, out: Tensor) -> Sequence[Tensor]:
    """Write the first max_global rows of `out` (B, H, N, D), as if all of these tokens were global.

    Returns: what `global_rows_backward` needs: the rows, the logarithms of their sums and, with dropout, the state of
        its random numbers. Nothing in Triton's interpreter.
    """
    number = spec.max_global
    if not is_fused(out):
        out[:, :, :number] = _interpreted_rows(spec, inputs).attend().view_as(out[:, :, :number])
        return ()
    rows, log_sums, *random_state = FUSED(*_arguments(spec, inputs), True, spec.dropout)
    out[:, :, :number] = rows
    return rows, log_sums, *(random_state if spec.dropout else ())


def global_rows_backward(
    spec: Spec, inputs: Inputs, saved: Sequence[Tensor], grad: Tensor, gradients: Sequence[Tensor]
) -> None:
    """Add what the rows of global tokens contribute to the gradients of q, k and v.

    Args:
        saved: the result of `attend_from_global_tokens`.
        grad: the gradient of the output, (B, H, N, D).
        gradients: three tensors (B, H, N, D), which are changed in place.
    """
    number = spec.max_global
    grad_rows = grad[:, :, :number]
    if not is_fused(grad):
        row_gradients = _interpreted_rows(spec, inputs).backward(grad_rows.flatten(0, 1).float())
        for x, row_gradient in zip(gradients, row_gradients, strict=True):
            rows = x[:, :, : row_gradient.shape[1]]
            rows += row_gradient.view_as(rows)
        return
    assert inputs.global_counts is not None
    is_global = torch.arange(number, device=grad.device) < inputs.global_counts[:, None]
    if inputs.padding is not None:
        is_global &= ~inputs.padding.all(dim=1, keepdim=True)
    grad_rows = grad_rows.where(is_global[:, None, :, None], 0.0)
    rows, log_sums, *random_state = saved
    if not random_state:
        random_state = 2 * [torch.zeros((), dtype=torch.int64)]
    arguments = (*_arguments(spec, inputs), rows, log_sums, *random_state, spec.dropout, (True, True, True, False))
    dq, dk, dv, _ = FUSED_BACKWARD(grad_rows, *arguments)
    gradients[0][:, :, :number] += dq
    gradients[1].add_(dk)
    gradients[2].add_(dv)


def _interpreted_rows(spec: Spec, inputs: Inputs) -> GlobalRows:
    return GlobalRows(spec, inputs, load_heads(Spec(LLN), inputs), slice(0, None))


def _arguments(spec: Spec, inputs: Inputs) -> tuple[Any, ...]:
    """Return the queries, keys and values with cleared padding, and the mask, 0 or -inf; None without padding."""
    padding = inputs.padding
    queries = _aligned(inputs.q[:, :, : spec.max_global])
    queries, k, v = clear_padding(queries, _aligned(inputs.k), _aligned(inputs.v), padding)
    if padding is None:
        return queries, k, v, None
    # The softmax of a sequence that is all padding would be 0/0. So it has all keys, whose values are 0.
    hidden = padding & ~padding.all(dim=1, keepdim=True)
    length = hidden.shape[1]
    mask = F.pad(hidden, (0, -length % MASK_MULTIPLE))
    mask = torch.zeros(mask.shape, dtype=k.dtype, device=k.device).masked_fill(mask, float("-inf"))
    return queries, k, v, mask[:, None, None, :length].expand(*queries.shape[:3], length)


def _aligned(x: Tensor) -> Tensor:
    """Return x (B, H, N, D), or a copy if FUSED cannot read it: tokens must begin at multiples of 16 bytes."""
    batch, head, token, feature = x.stride()
    if feature == 1 and (x.data_ptr() | (batch | head | token) * x.itemsize) % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)
