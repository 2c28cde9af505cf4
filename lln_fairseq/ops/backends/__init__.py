"""What a backend of LLN, block-diagonal and hybrid attention gets, and the functions that it has.

A backend is a module with the functions of the protocol `Backend`: Triton kernels for GPUs, C kernels for CPUs, and
PyTorch for everything else. To add one, write such a module and list it in MODULES; the contract tests in
tests/ops/test_backends.py then cover it. dispatch.py chooses between them.
"""

import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

from torch import Tensor

from lln_fairseq.ops.exchange import Exchange

MODULES = {"torch": f"{__name__}.torch", "triton": f"{__name__}.triton", "cpu": f"{__name__}.cpu"}

LLN = "lln"
DIAG = "diag"  # block-diagonal softmax
AVERAGE = "average"  # ½ (LLN + block-diagonal softmax)
JOINT = "joint"  # the joint form of joint.py
# The weights of LLN and of block-diagonal softmax; a part whose weight is 0 is not computed. In the joint form, both
# parts are computed, but not added.
WEIGHTS = {LLN: (1.0, 0.0), DIAG: (0.0, 1.0), AVERAGE: (0.5, 0.5), JOINT: (1.0, 1.0)}


@dataclass(frozen=True)
class Spec:
    """What a call computes: its settings, never a tensor."""

    form: str  # a key of WEIGHTS
    block_size: int = 1
    dropout: float = 0.0  # probability of dropping a softmax weight inside a block
    matched: bool = False  # the backend computes α and β by moment matching, while it reads q and k in any case
    max_global: int = 0  # an upper bound of the global tokens of a sequence, at most N; only for the joint form


class Inputs(NamedTuple):
    """The tensors of a call. The first six may require gradients."""

    q: Tensor  # (B, H, N, D)
    k: Tensor  # (B, H, N, D)
    v: Tensor  # (B, H, N, D)
    alpha: Tensor | None = None  # (B, H); None if the backend matches it, and without LLN
    beta: Tensor | None = None  # (B, H), as alpha
    offset: Tensor | None = None  # o of the joint form, (B, H)
    padding: Tensor | None = None  # bool (B, N), True = padded; None if nothing is padded
    global_counts: Tensor | None = None  # the global tokens of every sequence, int64 (B,), each at most N
    seed: Tensor | None = None  # of the dropout, int64 (1,)


NUM_DIFFERENTIABLE = 6


class Backend(Protocol):
    """The functions of a module that computes hybrid attention.

    `choose_backend` has found that the tensors are plain tensors on one device that the backend can read. q, k, v and
    the gradient of the output have any strides; α, β and the offset too, in float32, or in float64 if q is float64.
    Values at padding positions can be NaN or infinite and must not influence the results of other tokens (padding.py).

    With an exchange, α and β are given, and N may be 0. `forward` then calls `Exchange.merge_states` once, after it has
    summed over the keys of this worker. `backward` calls `Exchange.sum` once, after it has summed over the queries of
    this worker. It exchanges dS, the gradient of the state S, and -dL, the negated gradient of L = logsumexp_j(β k_j).
    """

    def reason_against(self, spec: Spec, q: Tensor) -> str | None:
        """Return a sentence that says why the backend cannot compute this, or None if it can.

        Only the device, the dtype and D of q matter.
        """

    def allocate(self, spec: Spec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return uninitialized tensors like the gradients of q, k and v, and like those that `forward` saves.

        The output of `forward` is laid out like the gradient of q. torch.compile needs this to plan a graph.
        """

    def forward(
        self, spec: Spec, inputs: Inputs, exchange: Exchange | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Sequence[Tensor]]:
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
        exchange: Exchange | None = None,
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
def load_backend(name: str) -> Backend:
    """Return the module of a backend. It is imported at the first call, because importing Triton takes long."""
    return cast(Backend, importlib.import_module(MODULES[name]))
