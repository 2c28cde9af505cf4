"""Which implementation computes a call: Triton's kernels on a GPU, the C kernels on a CPU, PyTorch everywhere else."""

import functools
import importlib
import importlib.util
from types import ModuleType

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

BACKENDS = ("auto", "torch", "triton", "cpu")
_AUTO = {"cuda": "triton", "cpu": "cpu"}  # by the type of the device
_MODULES = {"torch": "lln_pytorch", "triton": "lln_triton", "cpu": "lln_cpu"}


def choose_backend(backend: str, q: Tensor, block_size: int | None = None, *others: object) -> str:
    """Answers "torch", "triton" or "cpu" for tensors like q, (B, H, N, D), and blocks of so many tokens if any.

    Args: others: whatever else takes part; kernels read tensors alone that lie in memory as they are.
    Raises: ValueError for an unknown backend, or with the reason if one is asked for where it cannot run.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend '{backend}', choose from {', '.join(BACKENDS)}")
    wanted = _AUTO.get(q.device.type, "torch") if backend == "auto" else backend
    if wanted == "torch":
        return wanted
    if is_recorded(q, *others):
        reason = "The kernels are no operations of torch: what records or imitates those does not see them."
    elif wanted == "triton" and importlib.util.find_spec("triton") is None:
        reason = "Triton is not installed."
    else:
        reason = kernels(wanted).is_supported(q, block_size)
    if reason and backend != "auto":
        raise ValueError(f"backend '{backend}' cannot run here: {reason}")
    return "torch" if reason else wanted


def is_recorded(*values: object) -> bool:
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


_PLAIN = (Tensor, torch.nn.Parameter)


@functools.cache
def kernels(backend: str) -> ModuleType:
    """The module of a backend, imported when needed: triton takes a moment."""
    return importlib.import_module(f"lln_fairseq.ops.{_MODULES[backend]}")
