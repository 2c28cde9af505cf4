"""The C kernels as operators of torch: torch.compile takes them into its graphs as they are, but for the joint forms.

Eager calls do not come through here; they would pay for the dispatch. Differentiable once, as compiled code is.
"""

from typing import Any

import torch
from torch import Tensor

from lln_fairseq.ops.backends import Mixture, cpu
from lln_fairseq.ops.layout import fresh_result


def compiled_mixture(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor | None, beta: Tensor | None, mask: Tensor | None, mix: Mixture
) -> Tensor:
    """The mixture while it is compiled; arguments as of a backend's `forward`, for tensors that the kernels take."""
    # Drawn outside, so that what computes the forward pass again draws the same.
    seed = torch.randint(2**31 - 1, (1,), device="cpu") if mix.dropout_p else None
    settings = (mix.lln_weight, mix.diag_weight, mix.block_size, mix.dropout_p)
    return torch.ops.lln_fairseq.mixture(q, k, v, alpha, beta, mask, seed, *settings)[0]


@torch.library.custom_op("lln_fairseq::mixture", mutates_args=(), device_types="cpu")
def _forward(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor | None, beta: Tensor | None, mask: Tensor | None,
    seed: Tensor | None, lln_weight: float, diag_weight: float, block_size: int, dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The mixture, α and β as they were used, and the states for the backward pass."""
    mix = _mixture(lln_weight, diag_weight, block_size, dropout_p, seed)
    q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
    out, used_alpha, used_beta, (states,) = cpu.forward(q, k, v, alpha, beta, mask, mix)
    if alpha is not None:  # no operator may return what it was given
        used_alpha, used_beta = used_alpha.clone(), used_beta.clone()
    if not lln_weight:  # nobody has written them, or reads them
        states.zero_()
    return out, used_alpha, used_beta, states


@_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor | None, beta: Tensor | None, mask: Tensor | None,
    seed: Tensor | None, lln_weight: float, diag_weight: float, block_size: int, dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    batch, heads, _, dim = q.shape
    used_alpha, used_beta = (q.new_empty(batch, heads) if x is None else torch.empty_like(x) for x in (alpha, beta))
    return _like(q), used_alpha, used_beta, q.new_empty(batch, heads, dim + 1, dim)


@torch.library.custom_op("lln_fairseq::mixture_backward", mutates_args=(), device_types="cpu")
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, mask: Tensor | None,
    seed: Tensor | None, states: Tensor, needs_alpha: bool, needs_beta: bool, lln_weight: float, diag_weight: float,
    block_size: int, dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v, α, β; without an element for α and β where they need none."""
    mix = _mixture(lln_weight, diag_weight, block_size, dropout_p, seed)
    q, k, v, grad = q.resolve_neg(), k.resolve_neg(), v.resolve_neg(), grad.resolve_neg()
    found = cpu.backward(q, k, v, alpha, beta, mask, mix, (states,), grad, (needs_alpha, needs_beta, False))
    dq, dk, dv, dalpha, dbeta = (q.new_empty(0) if x is None else x for x in found[:5])
    return dq, dk, dv, dalpha, dbeta


@_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, mask: Tensor | None,
    seed: Tensor | None, states: Tensor, needs_alpha: bool, needs_beta: bool, lln_weight: float, diag_weight: float,
    block_size: int, dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dalpha, dbeta = (q.new_empty(q.shape[:2] if needed else 0) for needed in (needs_alpha, needs_beta))
    return _like(q), _like(k), _like(v), dalpha, dbeta


def _like(x: Tensor) -> Tensor:
    """As the kernels make their results."""
    return fresh_result(x if x.stride(-1) == 1 else x.contiguous())


def _mixture(lln_weight: float, diag_weight: float, block_size: int, dropout_p: float, seed: Tensor | None) -> Mixture:
    return Mixture(lln_weight, diag_weight, block_size, dropout_p, None if seed is None else int(seed))


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    q, k, v, _, _, mask, seed, *ctx.settings = inputs
    _, alpha, beta, states = output
    ctx.save_for_backward(q, k, v, alpha, beta, mask, seed, states)


def _gradients(ctx: Any, grad: Tensor, *of_the_rest: Tensor | None) -> tuple[Tensor | None, ...]:
    lln_weight = ctx.settings[0]
    needs = [needed and lln_weight != 0 for needed in ctx.needs_input_grad[3:5]]  # else α and β have no part in it
    dq, dk, dv, *dalpha_dbeta = torch.ops.lln_fairseq.mixture_backward(grad, *ctx.saved_tensors, *needs, *ctx.settings)
    dalpha, dbeta = (x if needed else None for x, needed in zip(dalpha_dbeta, needs, strict=True))
    return dq, dk, dv, dalpha, dbeta, *(None,) * (2 + len(ctx.settings))


_forward.register_autograd(_gradients, setup_context=_save)
