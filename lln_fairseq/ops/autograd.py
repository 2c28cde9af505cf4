"""The differentiable function behind LLN, LLN+Diag and block-diagonal attention.

`hybrid_attention` selects the implementation of a call: a backend, a backend inside a graph of torch.compile, or the
plain formula. `HybridFunction` connects a backend's forward and backward pass to torch's autograd.
"""

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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    mask: Tensor | None,
    spec: HybridSpec,
    backend: str,
) -> Tensor:
    """Compute the hybrid of LLN and block-diagonal attention that `spec` describes.

    The inputs must have passed `checks.check_inputs`, and `backend` must be a result of `choose_backend`. The first
    case that applies selects the implementation:

    1. The spec has an exchange between workers: the backend is called directly. A worker that holds no tokens calls
       the module `no_tokens` instead, because the other workers wait for its sums.
    2. The tensors have no elements, or the backend is "torch" and operations are traced or transformed: the plain
       formula is computed.
    3. torch.compile is tracing: the backend becomes one operator in the compiled graph.
    4. In all other cases, the backend is called directly.

    Args:
        q, k, v: (B, H, N, D).
        alpha, beta: (B, H), or both None: then they are computed by moment matching with the scope "head" and the
            constants "calibrated". With an exchange, they must not be None.
        mask: bool (B, N), True = padded, or None.
        spec: the settings of the call. If it has dropout but no seed, a seed is drawn from torch's random generator.
        backend: "cpu", "triton" or "torch".

    Returns: (B, H, N, D) in the dtype of q. With dropout, with an exchange and under torch.compile, it can be
        differentiated only once; otherwise any number of times.
    Raises: ValueError if the spec has an exchange and operations are traced or transformed.
    """
    if spec.exchange is not None:
        if is_traced_or_transformed(q, k, v, alpha, beta, mask):
            raise ValueError("attention over several workers cannot be traced, compiled or transformed")
    elif q.numel() == 0 or (backend == "torch" and is_traced_or_transformed(q, k, v, alpha, beta, spec.offset, mask)):
        if alpha is None or beta is None:
            alpha, beta = match_moments(q, k, mask, backend="torch")
        return hybrid_formula(q, k, v, alpha, beta, mask, spec)
    elif torch.compiler.is_compiling():
        return compiled_hybrid_attention(q, k, v, alpha, beta, mask, spec, backend)
    if spec.dropout_p and spec.seed is None:
        spec = replace(spec, seed=load_backend(backend).draw_seed(q.device))
    # torch may store a tensor as its negation, marked by a bit. Kernels read only the stored numbers.
    q = q.resolve_neg()
    k = k.resolve_neg()
    v = v.resolve_neg()
    # Autograd differentiates only tensors that are arguments of the function, so the offset leaves the spec.
    offset = spec.offset
    if offset is not None:
        spec = replace(spec, offset=None)
    return HybridFunction.apply(q, k, v, alpha, beta, offset, mask, spec, backend)


class HybridFunction(torch.autograd.Function):
    """Hybrid attention computed by a backend, as an autograd function.

    For the backward pass it saves the inputs, α and β even if the backend computed them, and the tensors that the
    backend's `forward` returns as `saved`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        alpha: Tensor | None,
        beta: Tensor | None,
        offset: Tensor | None,
        mask: Tensor | None,
        spec: HybridSpec,
        backend: str,
    ) -> Tensor:
        module = _backend_module(backend, q)
        out, alpha, beta, saved = module.forward(q, k, v, alpha, beta, mask, _with_offset(spec, offset))
        ctx.save_for_backward(q, k, v, alpha, beta, offset, mask, *saved)
        ctx.spec = spec
        ctx.backend = backend
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(grad, ctx), None, None, None


def _backend_module(backend: str, q: Tensor) -> Any:
    """Return the backend's module, or `no_tokens` if q has no elements."""
    if q.numel() == 0:
        return no_tokens
    return load_backend(backend)


def _with_offset(spec: HybridSpec, offset: Tensor | None) -> HybridSpec:
    """Return a copy of the spec with this offset, or the spec itself if the offset is None."""
    if offset is None:
        return spec
    return replace(spec, offset=offset)


@without_autocast
def _gradients(grad: Tensor, ctx: Any) -> Sequence[Tensor | None]:
    """Return the gradients of q, k, v, α, β and the joint offset.

    The backend computes them, with two exceptions: if the gradients must be differentiable (create_graph=True), or if
    the incoming gradient is traced or transformed, they are computed from the plain formula.

    Args:
        grad: the gradient of the output, (B, H, N, D).
        ctx: the context that `HybridFunction.forward` filled.

    Returns: six entries. The gradient of α, β or the offset is None if autograd does not need it.
    Raises: RuntimeError if the plain formula would be needed for a call with dropout or an exchange.
    """
    q, k, v, alpha, beta, offset, mask, *saved = ctx.saved_tensors
    needed = ctx.needs_input_grad[:6]
    spec = ctx.spec
    if not (torch.is_grad_enabled() or is_traced_or_transformed(grad)):
        module = _backend_module(ctx.backend, q)
        spec = _with_offset(spec, offset)
        return module.backward(q, k, v, alpha, beta, mask, spec, saved, grad.resolve_neg(), needed[3:])
    if spec.dropout_p:
        raise RuntimeError("attention with dropout has no second derivative: set dropout to 0, or call model.eval()")
    if spec.exchange is not None:
        raise RuntimeError("attention over several workers has no second derivative: compute it with one worker")

    def formula(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, offset: Tensor | None) -> Tensor:
        return hybrid_formula(q, k, v, alpha, beta, mask, _with_offset(spec, offset))

    return differentiable_gradients(formula, (q, k, v, alpha, beta, offset), needed, grad)


def differentiable_gradients(
    formula: Callable[..., Tensor], inputs: Sequence[Tensor | None], needed: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    """Compute the gradients of formula(*inputs) with respect to the inputs, inside the backward pass of a function.

    The gradients can be differentiated again if gradients are enabled during the call.

    Args:
        formula: a function of the inputs that uses only differentiable operations of torch.
        inputs: the arguments of `formula`, each a tensor or None.
        needed: for each input, True if its gradient is needed. It must be False for an input that is None.
        grad: the gradient of the formula's result, in the shape of that result.

    Returns: one gradient for each input. The gradient is None if it is not needed, or if the result of the formula does
        not depend on the input.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # One input may be a view or a function of another, for example q of k. Fresh views separate their gradients.
        views = [None if x is None else x.view_as(x) for x in inputs]
        targets = [x for x, need in zip(views, needed, strict=True) if need and x is not None]
        out = formula(*views)
        gradients = iter(torch.autograd.grad(out, targets, grad, create_graph=create_graph, allow_unused=True))
    return [next(gradients) if need else None for need in needed]
