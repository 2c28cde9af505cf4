"""The one differentiable function behind LLN, LLN+Diag and block-diagonal attention, whichever backend computes it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lln_fairseq.ops.backends import HybridSpec, is_traced_or_transformed, load_backend, no_tokens
from lln_fairseq.ops.dtypes import without_autocast
from lln_fairseq.ops.formula import hybrid_formula
from lln_fairseq.ops.moment_matching import match_moments
from lln_fairseq.ops.operator import compiled_hybrid_attention


@without_autocast
def hybrid_attention(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor | None, beta: Tensor | None, mask: Tensor | None, mix: HybridSpec,
    backend: str,
) -> Tensor:  # fmt: skip
    """The mixture by a backend, "cpu", "triton" or "torch": q, k, v (B, H, N, D), alpha and beta (B, H), mask (B, N).

    α and β None are matched to the moments of q and k, by the backend and in its own passes where it can.
    """
    if mix.exchange is not None and is_traced_or_transformed(q, k, v, alpha, beta, mask):
        raise ValueError("what records or imitates torch's operations cannot follow an exchange between workers")
    # A worker without tokens takes part in an exchange.
    if (q.numel() == 0 and not mix.exchange) or (
        backend == "torch" and is_traced_or_transformed(q, k, v, alpha, beta, mix.parameter, mask)
    ):
        if alpha is None or beta is None:
            alpha, beta = match_moments(q, k, mask, backend="torch")
        return hybrid_formula(q, k, v, alpha, beta, mask, mix)
    if torch.compiler.is_compiling():  # for kernels: see choose_backend
        return compiled_hybrid_attention(q, k, v, alpha, beta, mask, mix, backend)
    if mix.dropout_p and mix.seed is None:
        mix = replace(mix, seed=load_backend(backend).draw_seed(q.device))
    parameter = mix.parameter
    if parameter is not None:  # a differentiable input of its own
        mix = replace(mix, parameter=None)
    return HybridFunction.apply(q, k, v, alpha, beta, parameter, mask, mix, backend)


class HybridFunction(torch.autograd.Function):
    """Saved for the backward pass: the inputs, α, β, and what the backend asks for."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor | None, beta: Tensor | None,
        parameter: Tensor | None, mask: Tensor | None, mix: HybridSpec, backend: str,
    ) -> Tensor:  # fmt: skip
        whole = _with(mix, parameter)
        out, alpha, beta, saved = _kernels(backend, q).forward(q, k, v, alpha, beta, mask, whole)
        ctx.save_for_backward(q, k, v, alpha, beta, parameter, mask, *saved)
        ctx.mix, ctx.backend = mix, backend
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(grad, ctx), None, None, None


def _kernels(backend: str, q: Tensor) -> Any:
    return no_tokens if q.numel() == 0 else load_backend(backend)


def _with(mix: HybridSpec, parameter: Tensor | None) -> HybridSpec:
    return mix if parameter is None else replace(mix, parameter=parameter)


@without_autocast
def _gradients(grad: Tensor, ctx: Any) -> Sequence[Tensor | None]:
    """Of q, k, v, α, β and the parameter: by the backend, or differentiable where somebody asks for that
    (create_graph=True)."""
    q, k, v, alpha, beta, parameter, mask, *saved = ctx.saved_tensors
    needed, mix = ctx.needs_input_grad[:6], ctx.mix
    if not (torch.is_grad_enabled() or is_traced_or_transformed(grad)):
        backend, mix = _kernels(ctx.backend, q), _with(mix, parameter)
        return backend.backward(q, k, v, alpha, beta, mask, mix, saved, grad, needed[3:])
    if mix.dropout_p:
        raise RuntimeError("attention with dropout has no second derivative: set dropout to 0, or call model.eval()")
    if mix.exchange is not None:
        raise RuntimeError("attention over several workers has no second derivative")

    def formula(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, parameter: Tensor | None) -> Tensor:
        return hybrid_formula(q, k, v, alpha, beta, mask, _with(mix, parameter))

    return differentiable_gradients(formula, (q, k, v, alpha, beta, parameter), needed, grad)


def differentiable_gradients(
    formula: Callable[..., Tensor], inputs: Sequence[Tensor | None], needed: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    """The gradients of formula(*inputs) with respect to the inputs that need them, as differentiable tensors."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views: where one input is made of another, q of k say, each gradient must be that of its own place alone.
        inputs = [None if x is None else x.view_as(x) for x in inputs]
        wanted = [x for x, need in zip(inputs, needed, strict=True) if need and x is not None]
        found = iter(torch.autograd.grad(formula(*inputs), wanted, grad, create_graph=create_graph, allow_unused=True))
    return [next(found) if need else None for need in needed]
