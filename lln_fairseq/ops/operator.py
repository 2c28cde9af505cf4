"""The backends as custom operators of torch, which torch.compile puts into its graphs without looking inside.

Only compiled calls use these operators, because dispatching an operator would slow down an eager call. Like all
compiled code, they can be differentiated only once. A custom operator cannot have a dataclass as an argument, so the
fields of `HybridSpec` are separate arguments.
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

    Args:
        q, k, v, alpha, beta, mask: the same as in `hybrid_attention`.
        spec: the settings of the call, without an exchange and without global tokens. Its seed is ignored: with
            dropout, a new seed is drawn.
        backend: the name of a backend that supports these tensors.

    Returns: (B, H, N, D) in the dtype of q.
    """
    assert spec.global_tokens is None  # with global tokens, choose_backend selects "torch" while compiling
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
    """Compute hybrid attention with a backend.

    The arguments are those of `hybrid_attention`, with the fields of the `HybridSpec` in place of the spec.

    Returns: the output (B, H, N, D), α and β (B, H), and the tensors that the backend saves for the backward pass. If
        α and β were passed, copies of them are returned, because an operator must not return its inputs.
    """
    spec = HybridSpec(lln_weight, diag_weight, block_size, dropout_p, seed, joint, offset)
    out, used_alpha, used_beta, saved = load_backend(backend).forward(q, k, v, alpha, beta, mask, spec)
    if alpha is not None:
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
    """Compute the gradients of q, k, v, α, β and the joint offset with a backend.

    Args:
        grad: the gradient of the output, (B, H, N, D).
        alpha, beta: (B, H), as `_forward` returned them.
        saved: the tensors that `_forward` returned for the backward pass.
        needed: three values, which say whether the gradients of α, β and the offset are needed.

    Returns: six tensors. An operator cannot return None, so a gradient that is not needed is an empty tensor.
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
    """Store in `ctx` what `_gradients` needs: the inputs of `_forward`, the returned α and β, and the saved tensors."""
    q, k, v, _, _, offset, mask, seed, *settings = inputs
    _, alpha, beta, saved = output
    ctx.save_for_backward(q, k, v, alpha, beta, offset, mask, seed, *saved)
    ctx.settings = settings


def _gradients(ctx: Any, grad: Tensor, *other_gradients: object) -> tuple[Tensor | None, ...]:
    """Return one gradient for each input of `_forward`; None for an input whose gradient is not needed.

    Args:
        ctx: the context that `_save_for_backward` filled.
        grad: the gradient of the first output of `_forward`, (B, H, N, D).
        other_gradients: the gradients of the other outputs. They are not used, because only the backward pass uses
            these outputs.
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
