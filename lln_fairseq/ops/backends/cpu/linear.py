"""Linear layers on a CPU in float32, with packed weights: the Python side of csrc/linear.c.

A packed weight is a copy of the weight in the order in which the kernel reads it. With it, a linear layer takes three
quarters of the time of torch's for 16 tokens, and nine tenths for hundreds of tokens. There is no backward pass.
"""

import ctypes
import functools
import logging
import struct
from pathlib import Path

import torch
from torch import Tensor

from lln_fairseq.ops.backends.cpu import num_threads
from lln_fairseq.ops.backends.cpu.compile import CannotCompile, load_library

SOURCE = Path(__file__).with_name("csrc") / "linear.c"
MIN_PANEL_COLUMNS = 16  # a CPU without AVX has fewer, and torch's own product is faster there
_PROBLEM = struct.Struct("5q4P")  # the struct `problem` of csrc/linear.c

logger = logging.getLogger(__name__)


@functools.cache
def _load_kernel() -> ctypes.CDLL | None:
    """Return the kernel, which the first call compiles or loads from the cache, or None if it cannot be compiled."""
    try:
        library = load_library(SOURCE)
    except CannotCompile as error:
        logger.info("linear layers on this CPU run in PyTorch: %s", error)
        return None
    library.panel_columns.restype = ctypes.c_int64
    return library


def pack_weight(weight: Tensor) -> Tensor | None:
    """Return a weight (columns, inner) in the order of csrc/linear.c, or None if the kernel does not support it.

    The kernel supports float32 on a CPU with AVX, if a C compiler is installed and the number of columns is a multiple
    of 32 (16 on a CPU without AVX-512).
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return None
    kernel = _load_kernel()
    if kernel is None:
        return None
    columns, inner = weight.shape
    panel_columns = kernel.panel_columns()
    if panel_columns < MIN_PANEL_COLUMNS or weight.numel() == 0 or columns % panel_columns:
        return None
    panels = weight.detach().reshape(columns // panel_columns, panel_columns, inner)
    return panels.transpose(1, 2).contiguous()


def packed_linear(x: Tensor, packed_weight: Tensor, bias: Tensor, gelu: bool = False) -> Tensor:
    """Compute x Wᵀ + bias, followed by GELU if `gelu` is true. The result has no gradient.

    Args:
        x: (..., inner), float32 on the CPU.
        packed_weight: what `pack_weight` returned for W (columns, inner).
        bias: (columns), float32 on the CPU.

    Returns: (..., columns), contiguous.
    """
    x = x.contiguous()
    bias = bias.contiguous()
    inner = packed_weight.shape[1]
    columns = bias.shape[0]
    out = x.new_empty(*x.shape[:-1], columns)
    sizes = (x.numel() // inner, inner, columns, num_threads(), gelu)
    pointers = (x.data_ptr(), packed_weight.data_ptr(), bias.data_ptr(), out.data_ptr())
    kernel = _load_kernel()
    assert kernel is not None  # pack_weight has loaded it
    kernel.linear(_PROBLEM.pack(*sizes, *pointers))
    return out
