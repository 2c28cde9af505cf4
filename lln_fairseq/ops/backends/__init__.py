"""The backends that compute LLN, block-diagonal and hybrid attention, and the choice between them.

A backend is a module with the functions of the protocol `Backend`: Triton kernels for GPUs, C kernels for CPUs, and
PyTorch for everything else. To add one, write such a module and list it in MODULES; the contract tests in
tests/ops/test_backends.py then cover it.
"""

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, is_in_torch_dispatch_mode

from lln_fairseq.ops.exchange import Exchange

MODULES = {"torch": f"{__name__}.pytorch", "triton": f"{__name__}.triton", "cpu": f"{__name__}.cpu"}
BACKENDS = ("auto", *MODULES)
_AUTO_BY_DEVICE_TYPE = {"cuda": "triton", "cpu": "cpu"}  # every other device gets PyTorch
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class HybridSpec:
    """The settings of one call of hybrid attention, which combines LLN and block-diagonal softmax attention.

    The output is lln_weight · LLN + diag_weight · block-diagonal softmax. A part whose weight is 0 is not computed. If
    `joint` is true, both weights are 1, and the output is the joint form of ops/joint.py instead of this sum.
    """

    lln_weight: float
    diag_weight: float
    block_size: int = 1
    dropout_p: float = 0.0  # probability of dropping a softmax weight inside a block
    seed: int | Tensor | None = None  # seed of the dropout, a result of the backend's `draw_seed`
    joint: bool = False
    offset: Tensor | None = None  # offset o of the joint form, (B, H)
    exchange: Exchange | None = None  # exchange with the workers that hold the other tokens; not for the joint form
    # The number of global tokens of every sequence, int64 (B,), each at most N, or None. Only for the joint form.
    global_tokens: Tensor | None = None
    max_global_tokens: int = 0  # an upper bound of these numbers, at most N

    @property
    def keep_threshold(self) -> int:
        """Return the dropout threshold for 16 random bits, in [1, 65535].

        A backend keeps a softmax weight if 16 random bits, read as an unsigned number, are less than this threshold.
        The probability of dropping then differs from dropout_p by less than 1e-5.
        """
        return min(max(round((1 - self.dropout_p) * 2**16), 1), 2**16 - 1)


class Backend(Protocol):
    """The functions of a module that computes hybrid attention.

    The callers have checked the tensors: they are plain tensors on one device with at least one element. q, k, v and
    the gradient of the output are (B, H, N, D) with any strides. α and β are (B, H) with any strides, in float32, or in
    float64 if q is float64. The mask is bool (B, N), True = padded, or None. Values at padding positions can be NaN or
    infinite and must not influence the results of other tokens (ops/padding.py).

    If the spec has an exchange, the callers pass α and β. `forward` then calls `Exchange.merge_states` once, after it
    has summed over the keys of this worker. `backward` calls `Exchange.sum` once, after it has summed over the queries
    of this worker. It exchanges dS, the gradient of the state S, and -dL, the negated gradient of
    L = logsumexp_j(β k_j).
    """

    def is_supported(self, q: Tensor, block_size: int | None = None, max_global_tokens: int = 0) -> str | None:
        """Return None if the backend can run on tensors like q. Otherwise return a sentence that says why it cannot.

        Args:
            q: (B, H, N, D); only its device, dtype and D matter.
            block_size: tokens per block, or None for a call without blocks.
            max_global_tokens: an upper bound of the number of global tokens of a sequence; 0 if there are none.
        """

    def draw_seed(self, device: torch.device) -> int | Tensor:
        """Draw a seed for the dropout of one call from torch's random generator.

        Returns: an int, or an int64 tensor (1,) on the device. The Triton backend returns a tensor, because the host
            would have to wait for an int.
        """

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        alpha: Tensor | None,
        beta: Tensor | None,
        mask: Tensor | None,
        spec: HybridSpec,
    ) -> tuple[Tensor, Tensor, Tensor, Sequence[Tensor]]:
        """Compute hybrid attention.

        Args:
            q, k, v: (B, H, N, D).
            alpha, beta: (B, H). If either is None, both are computed by moment matching.
            mask: bool (B, N), True = padded, or None.
            spec: the settings of the call.

        Returns: the output, α, β and the tensors that `backward` needs as `saved`. The output is (B, H, N, D) in the
            dtype of q and, where possible, in its memory layout. α and β are (B, H): the arguments themselves, or the
            result of moment matching.
        """

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        alpha: Tensor,
        beta: Tensor,
        mask: Tensor | None,
        spec: HybridSpec,
        saved: Sequence[Tensor],
        grad: Tensor,
        needed: Sequence[bool],
    ) -> Sequence[Tensor | None]:
        """Compute the gradients of the inputs of `forward`.

        Args:
            q, k, v, mask, spec: the same as in `forward`.
            alpha, beta: (B, H), as `forward` returned them.
            saved: the tensors that `forward` returned for this purpose.
            grad: the gradient of the output, (B, H, N, D).
            needed: three values, which say whether the gradients of α, β and the offset of the spec are needed.

        Returns: the gradients of q, k and v (B, H, N, D), which are always computed, then the gradients of α, β and the
            offset (B, H). A gradient that is not needed is None, or is computed anyway.
        """

    def empty_results(self, q: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
        """Return uninitialized tensors with the memory layouts of the gradients of q, k and v that `backward` returns.

        The output of `forward` has the layout of the gradient of q.
        """

    def empty_saved(self, q: Tensor, spec: HybridSpec) -> Sequence[Tensor]:
        """Return uninitialized tensors like the tensors that `forward` saves for q (B, H, N, D).

        Their number, shapes, dtypes and strides are the same.
        """

    def match_moments(
        self, q: Tensor, k: Tensor, mask: Tensor | None, table: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Compute α and β as `moment_matching.match_moments` does for the scope "head".

        Args:
            q, k: (B, H, N, D).
            mask: bool (B, N), True = padded, or None.
            table: the two tensors that `moment_matching.calibration_table` returns.

        Returns: α and β, both (B, H).
        """


def choose_backend(
    backend: str, q: Tensor, block_size: int | None = None, *other_inputs: object, max_global_tokens: int = 0
) -> str:
    """Return the name of the backend that computes a call: "torch", "triton" or "cpu".

    Args:
        backend: one of BACKENDS. "auto" selects the kernels for the device of q, or "torch" if they cannot run.
        q: the queries, (B, H, N, D).
        block_size: tokens per block, or None for a call without blocks.
        other_inputs: all other inputs of the call. Only "torch" can run if one of them is a tensor that is not plain,
            see `is_traced_or_transformed`. Inputs that are not tensors are ignored.
        max_global_tokens: an upper bound of the number of global tokens of a sequence; 0 if there are none. With global
            tokens, only "torch" can run under torch.compile.

    Raises: ValueError if the backend is unknown, or if it is not "auto" and cannot run on these inputs.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend '{backend}', choose from {', '.join(BACKENDS)}")
    selected = backend
    if backend == "auto":
        selected = _AUTO_BY_DEVICE_TYPE.get(q.device.type, "torch")
    if selected == "torch":
        return selected
    if not max_global_tokens and _can_be_operator_in_graph(q, *other_inputs):
        # torch.compile may represent sizes by symbols: index() turns them into integers.
        block = None if block_size is None else index(block_size)
        if _is_supported_while_compiling(selected, q.device, q.dtype, index(q.shape[-1]), block):
            return selected
    if is_traced_or_transformed(q, *other_inputs):
        reason: str | None = (
            "Its kernels are not operations of torch, so tracing, function transforms and tensors without plain memory "
            "cannot use them."
        )
    else:
        reason = _unsupported_reason(selected, q, block_size, max_global_tokens)
    if reason is None:
        return selected
    if backend == "auto":
        return "torch"
    raise ValueError(f"backend '{backend}' cannot run here: {reason}")


@functools.cache
def load_backend(name: str) -> Backend:
    """Return the module of the backend `name`, a key of MODULES.

    The module is imported at the first call, because importing Triton takes long.
    """
    return cast(Backend, importlib.import_module(MODULES[name]))


def is_traced_or_transformed(*values: object) -> bool:
    """Return True if kernels cannot read these values, so that only torch's own operations may be used on them.

    This is the case while operations are traced, exported, compiled, dispatched to a Python mode or transformed by
    functorch, whatever the values are. It is also the case if one of the values is a meta tensor or a tensor subclass.
    Values that are not tensors are ignored.
    """
    return (
        torch.jit.is_tracing()
        or torch.compiler.is_compiling()
        or is_in_torch_dispatch_mode()
        or torch._C._are_functorch_transforms_active()
        or any(isinstance(x, Tensor) and (type(x) not in _PLAIN_TYPES or x.is_meta) for x in values)
    )


def _can_be_operator_in_graph(*values: object) -> bool:
    """Return True if a call with these values can become one operator in a compiled graph (ops/operator.py).

    This requires that torch.compile is tracing, not torch.export, and that the values contain no tensor subclass.
    """
    return (
        torch.compiler.is_dynamo_compiling()
        and not torch.compiler.is_exporting()
        and all(type(x) in _PLAIN_TYPES for x in values if isinstance(x, Tensor))
    )


def _unsupported_reason(name: str, q: Tensor, block_size: int | None, max_global_tokens: int = 0) -> str | None:
    """Return one sentence that says why a backend cannot run on tensors like q, or None if it can run.

    The arguments after `name` are those of `Backend.is_supported`.
    """
    if name == "triton" and importlib.util.find_spec("triton") is None:
        return "Triton is not installed."
    return load_backend(name).is_supported(q, block_size, max_global_tokens)


def _is_supported_while_compiling(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int | None
) -> bool:
    """Return True if the backend `name` can run on tensors with these properties.

    torch.compile calls this function once while it traces, and treats the result as a constant. The result is always
    False inside a transform of torch.func, such as grad or vmap.
    """
    if torch._C._are_functorch_transforms_active():
        return False
    with _disable_current_modes():
        q = torch.empty(0, 0, 0, head_dim, dtype=dtype, device=device)
        return _unsupported_reason(name, q, block_size) is None


# The effect of torch.compiler.assume_constant_result, without its import of the compiler, which takes seconds.
_is_supported_while_compiling.__dict__["_dynamo_marked_constant"] = True
