"""The backends as custom operators of torch, which torch.compile puts into its graphs without looking inside.

Only compiled calls use these operators, because dispatching an operator would slow down an eager call. Like all
compiled code, they can be differentiated only once. A custom operator cannot have a dataclass as an argument, so the
fields of `Inputs` and `Spec`, in their order, are separate arguments.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lln_fairseq.ops.backends import NUM_DIFFERENTIABLE, load_backend
from lln_fairseq.ops.formula import DIAG, Inputs, Spec


def compiled_attention(spec: Spec, inputs: Inputs, backend: str) -> Tensor:
    """Compute a call under torch.compile. The seed is an input, so that recomputing the pass drops the same weights."""
    settings = (spec.form, spec.block_size, spec.dropout, spec.max_global, spec.neighbors, spec.band)
    return torch.ops.lln_fairseq.hybrid_attention(*inputs, *settings, backend)[0]


@torch.library.custom_op("lln_fairseq::hybrid_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    offset: Tensor | None,
    padding: Tensor | None,
    global_counts: Tensor | None,
    seed: Tensor | None,
    form: str,
    block_size: int,
    dropout: float,
    max_global: int,
    neighbors: int,
    band: int | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Return the output, α and β, and the tensors that the backend saves for the backward pass.

    An operator must not return its inputs, nor None. So α and β are returned as copies, or as empty tensors without
    LLN.
    """
    spec = Spec(form, block_size, dropout, max_global, neighbors, band)
    inputs = Inputs(q, k, v, alpha, beta, offset, padding, global_counts, seed)
    out, used_alpha, used_beta, saved = load_backend(backend).forward(spec, inputs)
    if form == DIAG:
        return out, q.new_empty(0), q.new_empty(0), list(saved)
    assert used_alpha is not None
    assert used_beta is not None
    if alpha is not None:
        used_alpha = used_alpha.clone()
        used_beta = used_beta.clone()
    return out, used_alpha, used_beta, list(saved)


@_forward.register_fake
def _forward_shapes(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor | None, beta: Tensor | None, *other_inputs: Any
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Return empty tensors with the shapes, dtypes and strides of `_forward`'s results, for tracing."""
    *settings, backend = other_inputs[4:]
    spec = Spec(*settings)
    results, saved = load_backend(backend).allocate(spec, q, k, v)
    if spec.form == DIAG:
        return results[0], q.new_empty(0), q.new_empty(0), list(saved)
    matched_scalar = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    used_alpha = torch.empty_like(matched_scalar if alpha is None else alpha)
    used_beta = torch.empty_like(matched_scalar if beta is None else beta)
    return results[0], used_alpha, used_beta, list(saved)


@torch.library.custom_op("lln_fairseq::hybrid_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor,
    offset: Tensor | None,
    padding: Tensor | None,
    global_counts: Tensor | None,
    seed: Tensor | None,
    saved: Sequence[Tensor],
    needed: Sequence[bool],
    form: str,
    block_size: int,
    dropout: float,
    max_global: int,
    neighbors: int,
    band: int | None,
    backend: str,
) -> list[Tensor]:
    """Return the gradients of q, k, v, α, β and the offset; an empty tensor for one that is not needed."""
    spec = Spec(form, block_size, dropout, max_global, neighbors, band)
    inputs = Inputs(q, k, v, alpha, beta, offset, padding, global_counts, seed)
    gradients = load_backend(backend).backward(spec, inputs, saved, grad, needed)
    return [q.new_empty(0) if x is None else x for x in gradients]


@_backward.register_fake
def _backward_shapes(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, *other_inputs: Any
) -> list[Tensor]:
    """Return empty tensors with the shapes, dtypes and strides of `_backward`'s results, for tracing."""
    needed, *settings, backend = other_inputs[5:]
    results, _ = load_backend(backend).allocate(Spec(*settings), q, k, v)
    gradients = list(results)
    for need in needed:
        if need:
            gradients.append(torch.empty(alpha.shape, dtype=alpha.dtype, device=q.device))
        else:
            gradients.append(q.new_empty(0))
    return gradients


def _save_for_backward(ctx: Any, inputs: tuple, output: tuple) -> None:
    """Store what `_gradients` needs: the inputs of `_forward`, the returned α and β, and the saved tensors."""
    number = len(Inputs._fields)
    _, alpha, beta, saved = output
    tensors = Inputs(*inputs[:number])._replace(alpha=alpha, beta=beta)
    ctx.save_for_backward(*tensors, *saved)
    ctx.settings = inputs[number:]


def _gradients(ctx: Any, grad: Tensor, *other_gradients: object) -> tuple[Tensor | None, ...]:
    """Return one gradient for each input of `_forward`; None for an input whose gradient is not needed.

    The gradients of the other outputs are not used, because only the backward pass uses these outputs.
    """
    number = len(Inputs._fields)
    tensors = ctx.saved_tensors  # once, because activation checkpointing computes them for each access
    inputs = tensors[:number]
    saved = list(tensors[number:])
    needed = list(ctx.needs_input_grad[3:6])
    gradients = torch.ops.lln_fairseq.hybrid_attention_backward(grad, *inputs, saved, needed, *ctx.settings)
    scalar_gradients = [x if need else None for x, need in zip(gradients[3:], needed, strict=True)]
    others = (None,) * (number - NUM_DIFFERENTIABLE + len(ctx.settings))
    return *gradients[:3], *scalar_gradients, *others


_forward.register_autograd(_gradients, setup_context=_save_for_backward)
