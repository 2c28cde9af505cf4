"""What a backend of LLN, block-diagonal and hybrid attention gets, and the functions that it has.

A backend is a module with the functions of the protocol `Backend`: Triton kernels for GPUs, C kernels for CPUs, and
PyTorch for everything else. To add one, write such a module and list it in MODULES; the contract tests in
tests/ops/test_backends.py then cover it. dispatch.py chooses between them.
"""

import functools
import importlib
from collections.abc import Sequence
from typing import Protocol, cast

from torch import Tensor

from lln_fairseq.ops.formula import Inputs, Spec

MODULES = {"torch": f"{__name__}.torch", "triton": f"{__name__}.triton", "cpu": f"{__name__}.cpu"}

# The number of the first tensors of `Inputs`, those that may require gradients.
NUM_DIFFERENTIABLE = 6


class Backend(Protocol):
    """The functions of a module that computes hybrid attention.

    `choose_backend` has found that the tensors are plain tensors on one device that the backend can read. q, k, v and
    the gradient of the output have any strides; α, β and the offset too, in float32, or in float64 if q is float64.
    Values at padding positions can be NaN or infinite and must not influence the results of other tokens (formula.py).
    """

    def reason_against(self, spec: Spec, q: Tensor) -> str | None:
        """Return a sentence that says why the backend cannot compute this, or None if it can.

        Only the device, the dtype and D of q matter.
        """

    def allocate(self, spec: Spec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return uninitialized tensors like the gradients of q, k and v, and like those that `forward` saves.

        The output of `forward` is laid out like the gradient of q. torch.compile needs this to plan a graph.
        """

    def forward(self, spec: Spec, inputs: Inputs) -> tuple[Tensor, Tensor | None, Tensor | None, Sequence[Tensor]]:
        """Return the output (B, H, N, D) in the dtype of q, α and β, and the tensors to save for `backward`.

        α and β are those of the inputs, or those of moment matching.
        """

    def backward(
        self,
        spec: Spec,
        inputs: Inputs,
        saved: Sequence[Tensor],
        grad: Tensor,
        needed: Sequence[bool],
    ) -> Sequence[Tensor | None]:
        """Return the gradients of q, k and v (B, H, N, D), and those of α, β and the offset (B, H).

        The inputs have the α and β that `forward` returned. `needed` has three entries, for α, β and the offset; a
        gradient that is not needed is None, or is computed anyway.
        """

    def match_moments(
        self, q: Tensor, k: Tensor, padding: Tensor | None, table: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return α and β (B, H) as `moment_matching.match_moments` does for the scope "head".

        `table` is the result of `moment_matching.calibration_table`.
        """


@functools.cache
def keep_threshold(dropout: float) -> int:
    """Return the threshold in [1, 65535] that 16 random bits must be below for a softmax weight to be kept.

    The probability of dropping then differs from `dropout`, which is not 0, by at most 2⁻¹⁶.
    """
    return min(max(round((1 - dropout) * 2**16), 1), 2**16 - 1)


@functools.cache
def load_backend(name: str) -> Backend:
    """Return the module of a backend. It is imported at the first call, because importing Triton takes long."""
    return cast(Backend, importlib.import_module(MODULES[name]))
