"""The kernels as an operator of torch: torch.compile takes them into its graphs as they are.

Eager calls do not come through here; they would pay for the dispatch. Differentiable once, as compiled code is.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lln_fairseq.ops.backends import HybridSpec, load_backend


def compiled_hybrid_attention(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor | None, beta: Tensor | None, mask: Tensor | None, mix: HybridSpec,
    backend: str,
) -> Tensor:  # fmt: skip
    """The mixture while it is compiled; arguments as of a backend's `forward`, for tensors that its kernels take."""
    # Drawn outside, so that what computes the forward pass again draws the same.
    seed = torch.randint(2**31 - 1, (1,), device=q.device) if mix.dropout_p else None
    settings = (mix.lln_weight, mix.diag_weight, mix.block_size, mix.dropout_p, mix.joint, backend)
    return torch.ops.lln_fairseq.hybrid_attention(q, k, v, alpha, beta, mix.parameter, mask, seed, *settings)[0]


@torch.library.custom_op("lln_fairseq::hybrid_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor | None, beta: Tensor | None, parameter: Tensor | None,
    mask: Tensor | None, seed: Tensor | None, lln_weight: float, diag_weight: float, block_size: int,
    dropout_p: float, joint: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """The mixture, α and β as they were used, and what the backward pass wants to see again."""
    mix = HybridSpec(lln_weight, diag_weight, block_size, dropout_p, seed, joint, parameter)
    out, used_alpha, used_beta, saved = load_backend(backend).forward(q, k, v, alpha, beta, mask, mix)
    if alpha is not None:  # no operator may return what it was given
        used_alpha, used_beta = used_alpha.clone(), used_beta.clone()
    if not lln_weight:  # nobody has written it, or reads it
        for x in saved:
            x.zero_()
    return out, used_alpha, used_beta, list(saved)


@_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor | None, beta: Tensor | None, parameter: Tensor | None,
    mask: Tensor | None, seed: Tensor | None, lln_weight: float, diag_weight: float, block_size: int,
    dropout_p: float, joint: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    kernels, mix = load_backend(backend), HybridSpec(lln_weight, diag_weight, block_size, joint=joint)
    matched = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    used_alpha, used_beta = (torch.empty_like(matched if x is None else x) for x in (alpha, beta))
    return kernels.empty_results(q, k, v)[0], used_alpha, used_beta, list(kernels.empty_saved(q, mix))


@torch.library.custom_op("lln_fairseq::hybrid_attention_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, parameter: Tensor | None,
    mask: Tensor | None, seed: Tensor | None, saved: Sequence[Tensor], needed: Sequence[bool], lln_weight: float,
    diag_weight: float, block_size: int, dropout_p: float, joint: bool, backend: str,
) -> list[Tensor]:  # fmt: skip
    """The gradients of q, k, v, α, β and the parameter; without an element for those of the last that need none."""
    mix = HybridSpec(lln_weight, diag_weight, block_size, dropout_p, seed, joint, parameter)
    found = load_backend(backend).backward(q, k, v, alpha, beta, mask, mix, saved, grad, needed)
    return [q.new_empty(0) if x is None else x for x in found]


@_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, parameter: Tensor | None,
    mask: Tensor | None, seed: Tensor | None, saved: Sequence[Tensor], needed: Sequence[bool], lln_weight: float,
    diag_weight: float, block_size: int, dropout_p: float, joint: bool, backend: str,
) -> list[Tensor]:  # fmt: skip
    of_scalars = [torch.empty(alpha.shape, dtype=alpha.dtype, device=q.device) if x else q.new_empty(0) for x in needed]
    return [*load_backend(backend).empty_results(q, k, v), *of_scalars]


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, _, _, parameter, mask, seed, *ctx.settings = inputs
    _, alpha, beta, saved = output
    ctx.save_for_backward(q, k, v, alpha, beta, parameter, mask, seed, *saved)


def _gradients(ctx: Any, grad: Tensor, *of_the_rest: object) -> tuple[Tensor | None, ...]:
    inputs, saved, lln_weight = ctx.saved_tensors[:8], list(ctx.saved_tensors[8:]), ctx.settings[0]
    needed = [need and lln_weight != 0 for need in ctx.needs_input_grad[3:6]]  # else they have no part in it
    found = torch.ops.lln_fairseq.hybrid_attention_backward(grad, *inputs, saved, needed, *ctx.settings)
    of_scalars = (x if need else None for x, need in zip(found[3:], needed, strict=True))
    return *found[:3], *of_scalars, *(None,) * (2 + len(ctx.settings))


_forward.register_autograd(_gradients, setup_context=_save)
