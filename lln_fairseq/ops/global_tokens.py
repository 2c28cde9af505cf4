"""Global tokens of LLN+Diag: the first M tokens of a sequence, if the call has global tokens.

As keys, the global tokens are added to the keys of every block of the joint form (ops/joint.py), so that all tokens
attend to them by softmax. As queries, they attend to all keys by softmax. The backends do not compute these rows of the
output: `attend_from_global_tokens` does, at the cost of M x N scores.
"""

from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lln_fairseq.ops.autograd import differentiable_gradients
from lln_fairseq.ops.backends import is_traced_or_transformed
from lln_fairseq.ops.dtypes import without_autocast
from lln_fairseq.ops.padding import clear_queries
from lln_fairseq.ops.softmax import softmax_attention


def check_global_tokens(
    global_tokens: int | Tensor | None, mix: str, q: Tensor, *other_inputs: object
) -> tuple[Tensor | None, int]:
    """Return the number of global tokens of every sequence, and an upper bound of these numbers.

    Args:
        global_tokens: the number of global tokens of every sequence: an int for all sequences, an integer tensor (B,),
            or None for no global tokens. A number above N counts as N.
        mix: the mix of the call. Only "joint_offset" can have global tokens.
        q: (B, H, N, D).
        other_inputs: the other tensors of the call. If any tensor of the call is traced or transformed, the values of a
            tensor `global_tokens` cannot be read: they are not checked, and the upper bound is N.

    Returns: the numbers as int64 (B,) on the device of q, and the upper bound. (None, 0) if no token is global.
    Raises: ValueError if a number is negative, if the tensor is not an integer tensor (B,), or if the mix cannot have
        global tokens. TypeError if global_tokens is neither an integer nor a tensor.
    """
    if global_tokens is None:
        return None, 0
    if mix == "average":
        raise ValueError(f"mix '{mix}' has no global tokens, choose joint_offset")
    batch, _, length, _ = q.shape
    if not isinstance(global_tokens, Tensor):
        number = index(global_tokens)
        _require_not_negative(number)
        number = min(number, length)
        if number == 0:
            return None, 0
        return torch.full((batch,), number, dtype=torch.int64, device=q.device), number
    if global_tokens.shape != (batch,) or not _is_integer(global_tokens.dtype):
        raise ValueError(
            f"global_tokens must be a number or an integer tensor of shape (B,) = ({batch},), "
            f"got {global_tokens.dtype} of {tuple(global_tokens.shape)}"
        )
    bound = length
    if batch and not is_traced_or_transformed(global_tokens, q, *other_inputs):
        smallest, largest = torch.stack(global_tokens.aminmax()).tolist()
        _require_not_negative(smallest)
        bound = min(largest, length)
    if bound == 0:
        return None, 0
    return global_tokens.to(q.device, torch.int64).clamp(0, length), bound


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _require_not_negative(number: int) -> None:
    if number < 0:
        raise ValueError(f"global_tokens must be at least 0, got {number}")


@without_autocast
def attend_from_global_tokens(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    global_tokens: Tensor,
    max_global_tokens: int,
    dropout_p: float,
) -> Tensor:
    """Overwrite the rows of the global queries in `out` with softmax attention over all keys that are not padding.

    Args:
        out: the output of the other queries, (B, H, N, D). It is changed in place.
        q, k, v: (B, H, N, D).
        mask: bool (B, N), True = padded, or None.
        global_tokens: int64 (B,), the number of global tokens of every sequence.
        max_global_tokens: an upper bound of these numbers.
        dropout_p: probability of dropping an attention weight.

    Returns: `out`. It can be differentiated any number of times, with dropout only once.
    """
    queries = q[:, :, :max_global_tokens]
    if dropout_p or is_traced_or_transformed(out, q, k, v, mask, global_tokens):
        rows = _attend_to_all_keys(queries, k, v, mask, dropout_p)
    else:
        rows = _GlobalRows.apply(queries, k, v, mask)
    is_global = torch.arange(queries.shape[2], device=q.device) < global_tokens[:, None]
    first_rows = out[:, :, :max_global_tokens]
    out[:, :, :max_global_tokens] = torch.where(is_global[:, None, :, None], rows, first_rows)
    return out


def _attend_to_all_keys(queries: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float = 0.0) -> Tensor:
    """Compute softmax attention of the first M queries over all keys that are not padding.

    Args:
        queries: (B, H, M, D).
        k, v: (B, H, N, D); their padding may hold any values.
        mask: bool (B, N), True = padded, or None.
        dropout_p: probability of dropping an attention weight.

    Returns: (B, H, M, D).
    """
    if mask is not None:
        padded = mask[:, None, :, None]
        queries = clear_queries(queries, padded[:, :, : queries.shape[2]])
        k = k.masked_fill(padded, 0.0)
        v = v.masked_fill(padded, 0.0)
    return softmax_attention(queries, k, v, mask, dropout_p)


class _GlobalRows(torch.autograd.Function):
    """`_attend_to_all_keys` without dropout, as an autograd function with derivatives of any order.

    torch's fused attention has only first derivatives. The forward pass cannot know whether the gradients will be
    differentiated again. So it saves only the inputs, and the backward pass computes the output again.
    """

    @staticmethod
    def forward(ctx: Any, queries: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        ctx.save_for_backward(queries, k, v, mask)
        return _attend_to_all_keys(queries, k, v, mask)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(grad, ctx), None


@without_autocast
def _gradients(grad: Tensor, ctx: Any) -> list[Tensor | None]:
    """Return the gradients of the queries, k and v. A gradient that is not needed is None.

    Args:
        grad: the gradient of the output, (B, H, M, D).
        ctx: the context that `_GlobalRows.forward` filled.
    """
    queries, k, v, mask = ctx.saved_tensors
    create_graph = torch.is_grad_enabled() or is_traced_or_transformed(grad)

    def attend(queries: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if create_graph:
            with sdpa_kernel(SDPBackend.MATH):
                return _attend_to_all_keys(queries, k, v, mask)
        return _attend_to_all_keys(queries, k, v, mask)

    return differentiable_gradients(attend, (queries, k, v), ctx.needs_input_grad[:3], grad)
