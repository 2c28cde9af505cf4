"""The backends as operators of torch, which torch.compile puts into its graphs as they are.

Only compiled calls use these operators, because dispatching one slows down an eager call. Like all compiled code, they
can be differentiated once. torch's operator schemas have no dataclasses, so the fields of a `HybridSpec` are separate
arguments.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lln_fairseq.ops.backends import HybridSpec, load_backend


def compiled_hybrid_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    mask: Tensor | None,
    spec: HybridSpec,
    backend: str,
) -> Tensor:
    """Compute hybrid attention under torch.compile.

    The arguments are those of `hybrid_attention`, for tensors that the backend supports. The spec must have no
    exchange and no global tokens, and its seed is ignored.

    Returns: (B, H, N, D) in the dtype of q.
    """
    assert spec.global_tokens is None  # choose_backend then selects "torch", which is compiled as the plain formula
    seed = None
    if spec.dropout_p:
        # The seed is an input of the operator, so that recomputing the forward pass drops the same weights.
        seed = torch.randint(2**31 - 1, (1,), device=q.device)
    settings = (spec.lln_weight, spec.diag_weight, spec.block_size, spec.dropout_p, spec.joint, backend)
    return torch.ops.lln_fairseq.hybrid_attention(q, k, v, alpha, beta, spec.offset, mask, seed, *settings)[0]


@torch.library.custom_op("lln_fairseq::hybrid_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    offset: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    lln_weight: float,
    diag_weight: float,
    block_size: int,
    dropout_p: float,
    joint: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Compute hybrid attention by a backend.

    Returns: the output, the α and β that were used (copies if they are inputs), and the tensors for the backward pass.
    """
    spec = HybridSpec(lln_weight, diag_weight, block_size, dropout_p, seed, joint, offset)
    out, used_alpha, used_beta, saved = load_backend(backend).forward(q, k, v, alpha, beta, mask, spec)
    if alpha is not None:
        # An operator must not return its own inputs.
        used_alpha = used_alpha.clone()
        used_beta = used_beta.clone()
    if not lln_weight:
        # Without LLN the saved tensors are never written or read. Do not return uninitialized memory.
        for x in saved:
            x.zero_()
    return out, used_alpha, used_beta, list(saved)


@_forward.register_fake
def _forward_shapes(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor | None, beta: Tensor | None, *other_inputs: Any
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Return empty tensors with the shapes, dtypes and strides of `_forward`'s results, for tracing."""
    lln_weight, diag_weight, block_size, _, joint, backend = other_inputs[3:]
    module = load_backend(backend)
    spec = HybridSpec(lln_weight, diag_weight, block_size, joint=joint)
    matched = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    used_alpha = torch.empty_like(matched if alpha is None else alpha)
    used_beta = torch.empty_like(matched if beta is None else beta)
    return module.empty_results(q, k, v)[0], used_alpha, used_beta, list(module.empty_saved(q, spec))


@torch.library.custom_op("lln_fairseq::hybrid_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor,
    offset: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    saved: Sequence[Tensor],
    needed: Sequence[bool],
    lln_weight: float,
    diag_weight: float,
    block_size: int,
    dropout_p: float,
    joint: bool,
    backend: str,
) -> list[Tensor]:
    """Compute the gradients of q, k, v, α, β and the joint offset by a backend.

    Args:
        grad: the gradient of the output, (B, H, N, D).
        saved: the tensors that `_forward` returned for the backward pass.
        needed: whether the gradients of α, β and the offset are needed.

    Returns: six tensors. An operator cannot return None, so a gradient that is not needed has no elements.
    """
    spec = HybridSpec(lln_weight, diag_weight, block_size, dropout_p, seed, joint, offset)
    gradients = load_backend(backend).backward(q, k, v, alpha, beta, mask, spec, saved, grad, needed)
    return [q.new_empty(0) if x is None else x for x in gradients]


@_backward.register_fake
def _backward_shapes(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, *other_inputs: Any
) -> list[Tensor]:
    """Return empty tensors with the shapes, dtypes and strides of `_backward`'s results, for tracing."""
    needed = other_inputs[4]
    backend = other_inputs[-1]
    gradients = list(load_backend(backend).empty_results(q, k, v))
    for need in needed:
        if need:
            gradients.append(torch.empty(alpha.shape, dtype=alpha.dtype, device=q.device))
        else:
            gradients.append(q.new_empty(0))
    return gradients


def _save_for_backward(ctx: Any, inputs: tuple, output: tuple) -> None:
    """Save for `_gradients` the inputs of `_forward`, the α and β that were used, and the tensors of the backend."""
    q, k, v, _, _, offset, mask, seed, *settings = inputs
    _, alpha, beta, saved = output
    ctx.save_for_backward(q, k, v, alpha, beta, offset, mask, seed, *saved)
    ctx.settings = settings


def _gradients(ctx: Any, grad: Tensor, *other_gradients: object) -> tuple[Tensor | None, ...]:
    """Return one gradient for each input of `_forward`, None for those that need none.

    `other_gradients` are those of the outputs that only the backward pass uses.
    """
    inputs = ctx.saved_tensors[:8]
    saved = list(ctx.saved_tensors[8:])
    lln_weight = ctx.settings[0]
    # Without LLN the result does not depend on α, β and the offset.
    needed = [need and lln_weight != 0 for need in ctx.needs_input_grad[3:6]]
    gradients = torch.ops.lln_fairseq.hybrid_attention_backward(grad, *inputs, saved, needed, *ctx.settings)
    per_head_gradients = [x if need else None for x, need in zip(gradients[3:], needed, strict=True)]
    mask_seed_and_settings = (None,) * (2 + len(ctx.settings))
    return *gradients[:3], *per_head_gradients, *mask_seed_and_settings


_forward.register_autograd(_gradients, setup_context=_save_for_backward)
