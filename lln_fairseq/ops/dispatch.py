"""The way of one call of LLN, block-diagonal or hybrid attention: checks, the choice of a backend, and the backward.

Besides the backends, there is the plain formula of formula.py. It computes what no kernel can read: tensors that are
traced, exported or transformed, second derivatives, and tensors without elements.
"""

import functools
import importlib.util
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes, is_in_torch_dispatch_mode

from lln_fairseq.ops.autocast import autocast_disabled
from lln_fairseq.ops.backends import MODULES, NUM_DIFFERENTIABLE, load_backend
from lln_fairseq.ops.formula import Inputs, Spec, hybrid_formula, is_known
from lln_fairseq.ops.operator import compiled_attention

BACKENDS = ("auto", *MODULES)
FORMULA = "formula"  # `choose_backend` returns this if only the plain formula can compute a call
_AUTO_BY_DEVICE_TYPE = {"cuda": "triton", "cpu": "cpu"}  # every other device gets PyTorch
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

logger = logging.getLogger(__name__)


def check_inputs(q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> None:
    """Raise ValueError unless q, k and v share a shape (B, H, N, D), dtype and device, and the mask fits them."""
    if q.dim() != 4 or q.shape != k.shape or q.shape != v.shape or q.shape[3] == 0:
        shapes = f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        raise ValueError(f"q, k, v must share one shape (B, H, N, D) with D > 0, got {shapes}")
    if not (q.dtype == k.dtype == v.dtype and q.dtype in DTYPES):
        names = ", ".join(str(x).removeprefix("torch.") for x in DTYPES)
        raise ValueError(f"q, k, v must share one floating-point dtype of {names}, got {q.dtype}, {k.dtype}, {v.dtype}")
    expected = (q.shape[0], q.shape[2])
    if padding is not None and (padding.dtype != torch.bool or padding.shape != expected):
        raise ValueError(
            f"key_padding_mask must be bool of shape (B, N) = {expected}, got {padding.dtype} of {tuple(padding.shape)}"
        )
    if not (q.device == k.device == v.device and (padding is None or padding.device == q.device)):
        devices = ", ".join(str(x.device) for x in (q, k, v, padding) if x is not None)
        raise ValueError(f"q, k, v and key_padding_mask must be on one device, got {devices}")


def check_block_size(block_size: int | None, head_dim: int) -> int:
    """Return block_size, or head_dim if block_size is None. Raise ValueError if block_size is below 1."""
    if block_size is None:
        return head_dim
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    return block_size


def scalar_per_head(x: float | Tensor, q: Tensor, name: str) -> Tensor:
    """Return a parameter of the heads, such as α, as a tensor (B, H) on the device of q (B, H, N, D).

    It is in float32, or in float64 if q is float64. If x is a tensor with that dtype and device, the result is a view
    of x. Raises ValueError, with the name of the argument, if x does not broadcast to (B, H).
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if isinstance(x, int | float):
        # Created on the device, because a copy from the host would wait for the device.
        x = torch.full((), x, dtype=dtype, device=q.device)
    else:
        x = torch.as_tensor(x, dtype=dtype, device=q.device)
    try:
        return x.expand(q.shape[:2])
    except RuntimeError:
        raise ValueError(
            f"{name} of shape {tuple(x.shape)} does not broadcast to (B, H) = {tuple(q.shape[:2])}"
        ) from None


def count_global_tokens(
    global_tokens: int | Tensor | None, max_global_tokens: int | None, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor | None, int]:
    """Return the number of global tokens of every sequence, int64 (B,), and an upper bound of these numbers.

    A number above N counts as N, and a number in a tensor above max_global_tokens as that. The result is (None, 0) if
    no token is global. The values of a tensor are read only if max_global_tokens is None. If it is then traced or
    transformed, they cannot be read: they are not checked, and the upper bound is N. Raises ValueError if a number that
    is read is negative or if a tensor is not an integer tensor (B,), and TypeError for something else.
    """
    if global_tokens is None:
        return None, 0
    batch, _, length, _ = q.shape
    if not isinstance(global_tokens, Tensor):
        smallest = index(global_tokens)
        bound = min(smallest, length)
        counts = torch.full((batch,), bound, dtype=torch.int64, device=q.device)
    else:
        dtype = global_tokens.dtype
        is_integer = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
        if global_tokens.shape != (batch,) or not is_integer:
            raise ValueError(
                f"global_tokens must be a number or an integer tensor of shape (B,) = ({batch},), "
                f"got {dtype} of {tuple(global_tokens.shape)}"
            )
        smallest = 0
        bound = length
        if max_global_tokens is not None:
            smallest = max_global_tokens
            bound = max_global_tokens
            if is_known(length):
                bound = min(bound, length)
        elif batch and not is_traced_or_transformed(global_tokens, q, k, v):
            smallest, largest = torch.stack(global_tokens.aminmax()).tolist()
            bound = min(largest, length)
        counts = global_tokens.to(q.device, torch.int64).clamp(0, bound)
    if smallest < 0:
        raise ValueError(f"global_tokens must be at least 0, got {smallest}")
    if bound == 0:
        return None, 0
    return counts, bound


def fresh_result(x: Tensor) -> Tensor:
    """Return an uninitialized tensor with the shape, dtype and device of x (B, H, N, D).

    The memory layout is that of torch.empty_like if it has dense features and if batch and heads can be viewed as one
    dimension. Heads cut from fairseq's (T, B, C) have such a layout. For any other layout, the result is contiguous.
    """
    result = torch.empty_like(x)
    is_one_dimension = x.shape[0] == 1 or result.stride(0) == x.shape[1] * result.stride(1)
    if is_one_dimension and result.stride(-1) == 1:
        return result
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def choose_backend(backend: str, spec: Spec, inputs: Inputs) -> str:
    """Return the name of the backend that computes a call: "torch", "triton", "cpu" or FORMULA.

    "auto" selects the kernels for the device of q, or "torch" if they cannot run. FORMULA replaces "torch" for inputs
    that are traced or transformed, and every backend for tensors without elements. Kernels can stay selected under
    torch.compile, see operator.py. ValueError is raised if the backend is unknown, or if it names kernels that cannot
    run on these inputs, for example because they are traced.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend '{backend}', choose from {', '.join(BACKENDS)}")
    q = inputs.q
    selected = backend
    if backend == "auto":
        selected = _AUTO_BY_DEVICE_TYPE.get(q.device.type, "torch")
    is_traced = is_traced_or_transformed(*inputs)
    if selected != "torch":
        if not is_traced:
            reason = _reason_against(selected, spec, q)
        elif _can_be_operator(selected, spec, inputs):
            reason = None
            is_traced = False
        else:
            reason = (
                "Its kernels are not operations of torch, so tracing, function transforms and tensors without plain "
                "memory cannot use them."
            )
        if reason is not None:
            if backend != "auto":
                raise ValueError(f"backend '{backend}' cannot run here: {reason}")
            if selected == "triton" and not is_traced:
                _warn_of_slow_gpu(reason)
            selected = "torch"
    if is_traced or q.numel() == 0:
        return FORMULA
    return selected


@functools.cache
def _warn_of_slow_gpu(reason: str) -> None:
    """Log a reason once, as the C kernels do theirs."""
    logger.warning("attention on this GPU runs in PyTorch, several times slower: %s", reason)


def is_traced_or_transformed(*values: object) -> bool:
    """Return True if kernels cannot read these values, so that only torch's own operations may be used on them.

    This is the case while operations are traced, exported, compiled, dispatched to a Python mode or transformed by
    functorch, whatever the values are. It is also the case if one of the values is a meta tensor or a tensor subclass.
    Values that are not tensors are ignored.
    """
    for x in values:
        if isinstance(x, Tensor) and (type(x) not in _PLAIN_TYPES or x.is_meta):
            return True
    return (
        torch.jit.is_tracing()
        or torch.compiler.is_compiling()
        or is_in_torch_dispatch_mode()
        or torch._C._are_functorch_transforms_active()
    )


def _reason_against(name: str, spec: Spec, q: Tensor) -> str | None:
    if name == "triton" and importlib.util.find_spec("triton") is None:
        return "Triton is not installed."
    return load_backend(name).reason_against(spec, q)


def _can_be_operator(name: str, spec: Spec, inputs: Inputs) -> bool:
    """Return True if torch.compile, not torch.export, is tracing and can make the call one operator (operator.py).

    Tensor subclasses do not allow it, nor does dropout of global rows on a GPU: if the operator was computed again, it
    would not drop the same weights.
    """
    if not torch.compiler.is_dynamo_compiling() or (name == "triton" and spec.max_global and spec.dropout):
        return False
    if not all(type(x) in _PLAIN_TYPES for x in inputs if x is not None):
        return False
    q = inputs.q
    # torch.compile may represent sizes by symbols: index() turns them into integers.
    return _is_supported_while_compiling(name, q.device, q.dtype, index(q.shape[-1]), spec.form, index(spec.block_size))


def _is_supported_while_compiling(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, form: str, block_size: int
) -> bool:
    """Return True if the backend can run on tensors with these properties.

    torch.compile calls this function once while it traces, and treats the result as a constant. The result is always
    False inside a transform of torch.func, such as grad or vmap, and in torch.export.
    """
    # The compiler of torch 2.11 takes is_exporting() for True wherever it traces, but does not trace this function.
    if torch._C._are_functorch_transforms_active() or torch.compiler.is_exporting():
        return False
    with _disable_current_modes():
        q = torch.empty(0, 0, 0, head_dim, dtype=dtype, device=device)
        return _reason_against(name, Spec(form, block_size), q) is None


# The effect of torch.compiler.assume_constant_result, without its import of the compiler, which takes seconds.
_is_supported_while_compiling.__dict__["_dynamo_marked_constant"] = True


def attend(spec: Spec, inputs: Inputs, backend: str) -> Tensor:
    """Compute a call with a result of `choose_backend`, and return the output (B, H, N, D) in the dtype of q.

    Backends with dropout and compiled calls can be differentiated once; everything else, any number of times. FORMULA
    needs α and β.
    """
    # The test saves most calls, which have no autocast, a context.
    with autocast_disabled(inputs.q) if torch._C._is_any_autocast_enabled() else nullcontext():
        if backend == FORMULA:
            return hybrid_formula(spec, inputs)
        if spec.dropout and inputs.seed is None:
            # The seed of kernels on a GPU is drawn there, so that a CUDA graph draws a new one at each replay.
            is_on_host = backend != "triton" and not torch.compiler.is_compiling()
            device = torch.device("cpu") if is_on_host else inputs.q.device
            inputs = inputs._replace(seed=torch.randint(2**31 - 1, (1,), device=device))
        if torch.compiler.is_compiling():
            return compiled_attention(spec, inputs, backend)
        # torch may store a tensor as its negation, marked by a bit. Kernels read only the stored numbers.
        inputs = inputs._replace(q=inputs.q.resolve_neg(), k=inputs.k.resolve_neg(), v=inputs.v.resolve_neg())
        return AttentionFunction.apply(spec, backend, *inputs)


class AttentionFunction(torch.autograd.Function):
    """A call computed by a backend. The arguments are the spec, the backend and the `Inputs`.

    The backward pass gets the inputs, with the α and β that were used, and what the backend's `forward` saved.
    """

    @staticmethod
    def forward(ctx: Any, spec: Spec, backend: str, *tensors: Tensor | None) -> Tensor:
        inputs = Inputs(*tensors)  # type: ignore[arg-type]
        out, alpha, beta, saved = load_backend(backend).forward(spec, inputs)
        ctx.save_for_backward(*inputs._replace(alpha=alpha, beta=beta), *saved)
        ctx.call = (spec, backend)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with autocast_disabled(grad):
            return None, None, *_gradients(grad, ctx), None, None, None


def _gradients(grad: Tensor, ctx: Any) -> Sequence[Tensor | None]:
    """Return the gradients of the first six inputs of a call, None for those of α, β and the offset if not needed.

    The backend computes them, with two exceptions: if the gradients must be differentiable (create_graph=True), or if
    the incoming gradient is traced or transformed, they are computed from the plain formula. Raises RuntimeError if
    that is not possible, because the call has dropout.
    """
    spec, backend = ctx.call
    tensors = ctx.saved_tensors  # once, because activation checkpointing computes them for each access
    inputs = Inputs(*tensors[: len(Inputs._fields)])
    needed = ctx.needs_input_grad[2 : 2 + NUM_DIFFERENTIABLE]
    if not (torch.is_grad_enabled() or is_traced_or_transformed(grad)):
        saved = tensors[len(Inputs._fields) :]
        return load_backend(backend).backward(spec, inputs, saved, grad.resolve_neg(), needed[3:])
    if spec.dropout:
        raise RuntimeError("attention with dropout has no second derivative: set dropout to 0, or call model.eval()")

    def formula(*tensors: Tensor) -> Tensor:
        # torch's fused attention, which computes the rows of global tokens, has only first derivatives.
        with sdpa_kernel(SDPBackend.MATH) if spec.max_global else nullcontext():
            return hybrid_formula(spec, Inputs(*tensors, *inputs[NUM_DIFFERENTIABLE:]))

    return differentiable_gradients(formula, inputs[:NUM_DIFFERENTIABLE], needed, grad)


def differentiable_gradients(
    formula: Callable[..., Tensor], inputs: Sequence[Tensor | None], needed: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    """Compute the gradients of formula(*inputs) with respect to the inputs, inside the backward pass of a function.

    The gradients can be differentiated again if gradients are enabled during the call. `needed` says for each input
    whether its gradient is needed, which it must not be for an input that is None. A gradient is None if it is not
    needed, or if the result of the formula does not depend on the input.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # One input may be a view or a function of another, for example q of k. Fresh views separate their gradients.
        views = [None if x is None else x.view_as(x) for x in inputs]
        targets = [x for x, need in zip(views, needed, strict=True) if need and x is not None]
        out = formula(*views)
        gradients = iter(torch.autograd.grad(out, targets, grad, create_graph=create_graph, allow_unused=True))
    return [next(gradients) if need else None for need in needed]
