"""Which implementation computes a call: Triton's kernels on a GPU, the C kernels on a CPU, PyTorch everywhere else."""

import functools
import importlib
import importlib.util
from types import ModuleType

from torch import Tensor

BACKENDS = ("auto", "torch", "triton", "cpu")
_AUTO = {"cuda": "triton", "cpu": "cpu"}  # by the type of the device


def choose_backend(backend: str, q: Tensor, block_size: int | None = None) -> str:
    """Answers "torch", "triton" or "cpu" for tensors like q, (B, H, N, D), and blocks of so many tokens if any.

    Raises: ValueError for an unknown backend, or with the reason if one is asked for where it cannot run.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend '{backend}', choose from {', '.join(BACKENDS)}")
    wanted = _AUTO.get(q.device.type, "torch") if backend == "auto" else backend
    if wanted == "torch":
        return wanted
    if wanted == "triton" and importlib.util.find_spec("triton") is None:
        reason = "Triton is not installed."
    else:
        reason = kernels(wanted).is_supported(q, block_size)
    if reason and backend != "auto":
        raise ValueError(f"backend '{backend}' cannot run here: {reason}")
    return "torch" if reason else wanted


@functools.cache
def kernels(backend: str) -> ModuleType:
    """lln_triton or lln_cpu, imported when needed: triton takes a moment."""
    return importlib.import_module(f"lln_fairseq.ops.lln_{backend}")
