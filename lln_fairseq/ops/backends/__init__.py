"""What a backend is, and which one computes a call: Triton on a GPU, the C kernels on a CPU, PyTorch everywhere else.

To add one: a module with the functions of `Backend`, and a line in MODULES; tests/ops/test_backends.py then asks of it
what it asks of all.
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
_AUTO = {"cuda": "triton", "cpu": "cpu"}  # by the type of the device
_PLAIN = (Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class HybridSpec:
    """out = lln_weight · LLN + diag_weight · block-diagonal softmax; a part of weight 0 is not computed.

    Or, where `joint` is true, the joint form of ops/joint.py, with both weights 1.
    """

    lln_weight: float
    diag_weight: float
    block_size: int = 1
    dropout_p: float = 0.0  # of the block-diagonal probabilities
    seed: int | Tensor | None = None  # of the dropout, from the backend's draw_seed
    joint: bool = False
    parameter: Tensor | None = None  # the offset of the joint form, (B, H) as α and β
    exchange: Exchange | None = None  # with the workers that hold the other tokens; not for a joint form

    @property
    def keep_threshold(self) -> int:
        """Of the 2^16 values of 16 random bits, those that keep a probability: p is right to 1e-5."""
        return min(max(round((1 - self.dropout_p) * 2**16), 1), 2**16 - 1)


class Backend(Protocol):
    """A module that computes mixtures.

    It gets tensors that are checked, plain, on one device and with at least one element: q, k, v and the gradient
    (B, H, N, D) with any strides, α and β (B, H) of any strides in float32 (float64 for float64 q), the mask bool
    (B, N) with True = padded or None. What padding holds must not get into results and gradients, see ops/padding.py.
    Where the mixture has an exchange, α and β are given; forward puts `merge_states` of it between the keys' sums and
    the queries, backward the `sum` of dS and g between the queries and the keys, each once.
    """

    def is_supported(self, q: Tensor, block_size: int | None = None) -> str | None:
        """None where it can run on tensors like q, with blocks of so many tokens if any; else why not, one sentence."""

    def draw_seed(self, device: torch.device) -> int | Tensor:
        """What the dropout of one call depends on, from torch's generator."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor | None, beta: Tensor | None, mask: Tensor | None,
        mix: HybridSpec,
    ) -> tuple[Tensor, Tensor, Tensor, Sequence[Tensor]]:  # fmt: skip
        """The mixture, in q's memory layout where it can be; α and β, as given or matched; what backward needs."""

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, mask: Tensor | None, mix: HybridSpec,
        saved: Sequence[Tensor], grad: Tensor, needed: Sequence[bool],
    ) -> Sequence[Tensor | None]:  # fmt: skip
        """The gradients of q, k, v, and those of α, β and the mixture's parameter that are needed."""

    def empty_results(self, q: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
        """Empty tensors that lie in memory as backward's gradients of q, k, v do; as the first, so forward's result."""

    def empty_saved(self, q: Tensor, mix: HybridSpec) -> Sequence[Tensor]:
        """Empty tensors for what forward saves."""

    def match_moments(
        self, q: Tensor, k: Tensor, mask: Tensor | None, table: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """α and β by `moment_matching.match_moments` of scope "head", with a `moment_matching.calibration_table`."""


def choose_backend(backend: str, q: Tensor, block_size: int | None = None, *others: object) -> str:
    """The name of the backend for tensors like q, (B, H, N, D), and blocks of so many tokens if any.

    Args: others: whatever else takes part; kernels read tensors alone that lie in memory as they are.
    Raises: ValueError for an unknown backend, or with the reason if one is asked for where it cannot run.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend '{backend}', choose from {', '.join(BACKENDS)}")
    wanted = _AUTO.get(q.device.type, "torch") if backend == "auto" else backend
    if wanted == "torch":
        return wanted
    if is_compiled(q, *others):
        block = None if block_size is None else index(block_size)  # sizes may be symbols
        if _kernels_take(wanted, q.device, q.dtype, index(q.shape[-1]), block):
            return wanted
    if is_traced_or_transformed(q, *others):
        reason: str | None = "The kernels are no operations of torch: what records or imitates those does not see them."
    else:
        reason = _reason_against(wanted, q, block_size)
    if reason and backend != "auto":
        raise ValueError(f"backend '{backend}' cannot run here: {reason}")
    return "torch" if reason else wanted


@functools.cache
def load_backend(name: str) -> Backend:
    """A backend, imported when needed: triton takes a moment."""
    return cast(Backend, importlib.import_module(MODULES[name]))


def is_traced_or_transformed(*values: object) -> bool:
    """Whether operations on these values are recorded, imitated or transformed, so that only torch's own may be used.

    Tracing, export, compilation, functorch; tensors without data; subclasses. Values that are no tensors do not count.
    """
    return (
        torch.jit.is_tracing()
        or torch.compiler.is_compiling()
        or is_in_torch_dispatch_mode()
        or torch._C._are_functorch_transforms_active()
        or any(isinstance(x, Tensor) and (type(x) not in _PLAIN or x.is_meta) for x in values)
    )


def is_compiled(*values: object) -> bool:
    """Whether torch.compile traces plain operations on these values, for which an operator can stand in its graph."""
    return (
        torch.compiler.is_dynamo_compiling()
        and not torch.compiler.is_exporting()
        and all(type(x) in _PLAIN for x in values if isinstance(x, Tensor))
    )


def _reason_against(name: str, q: Tensor, block_size: int | None) -> str | None:
    if name == "triton" and importlib.util.find_spec("triton") is None:
        return "Triton is not installed."
    return load_backend(name).is_supported(q, block_size)


def _kernels_take(name: str, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int | None) -> bool:
    """Whether a backend runs on such tensors, here; torch.compile asks once and takes the answer as it is."""
    if torch._C._are_functorch_transforms_active():
        return False
    with _disable_current_modes():
        q = torch.empty(0, 0, 0, head_dim, dtype=dtype, device=device)
        return _reason_against(name, q, block_size) is None


# What torch.compiler.assume_constant_result does, without its import of the compiler, which takes seconds.
_kernels_take.__dict__["_dynamo_marked_constant"] = True
