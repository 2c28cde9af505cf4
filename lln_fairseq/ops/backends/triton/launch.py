"""The launch settings of the Triton kernels: supported tensors, tile sizes, splits of the tokens, and layouts."""

import math
import os
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from lln_fairseq.ops.formula import DIAG, LLN, WEIGHTS, Spec, count_global_keys

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
HEAD_DIMS = (16, 32, 64, 128)
BLOCK_SIZES = range(16, 257)
_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
MAX_SPLITS = 128
LONG_BLOCK = 64  # tokens; for blocks longer than this, the kernels that walk over blocks have another tile


class Tile(NamedTuple):
    """The size of a kernel's tiles, and the settings of Triton with which that kernel is launched."""

    rows: int  # tokens in a tile
    warps: int  # warps of a program
    stages: int  # stages of the pipeline that loads tiles
    registers: int | None = None  # the maximum number of registers of a thread; None = no limit

    @property
    def options(self) -> dict[str, int | None]:
        """Return the launch options num_warps, num_stages and, if the registers are limited, maxnreg."""
        options: dict[str, int | None] = {"num_warps": self.warps, "num_stages": self.stages}
        if self.registers is not None:
            options["maxnreg"] = self.registers
        return options


# Architecture, bytes of an element, and the largest head dimension. GPUs of compute capability 8.x and 12.x use the
# tiles of architecture 80, GPUs of 9.x and 10.x the tiles of architecture 90. float32 has small tiles because tf32x3
# needs three operands in place of one. Its tiles are the same on both architectures.
_COLUMNS = ((80, 2, 64), (80, 2, 128), (80, 4, 64), (80, 4, 128), (90, 2, 64), (90, 2, 128))
# The fields of the `Tile` of each kernel, in the order of _COLUMNS. A name has the kernel or the pass and, if its tile
# depends on it, the form; "long" marks blocks of more than LONG_BLOCK tokens. They were chosen from the compiled code,
# so that half precision spills few registers. tests/ops/backends/test_triton_aot.py lists the spills.
_TILES = {
    "state": ((32, 4, 2), (64, 8, 2), (32, 4, 1), (16, 8, 1), (64, 4, 2), (64, 8, 2)),
    "moments": ((64, 4, 2),) * 6,
    "output_lln": ((64, 4, 2), (64, 8, 1), (32, 4, 1), (16, 8, 1), (64, 4, 2), (64, 8, 1)),
    "output_average": ((64, 4, 1), (64, 8, 1), (16, 8, 1), (16, 8, 1), (64, 4, 2), (64, 8, 1)),
    "output_joint": ((64, 4, 1), (32, 4, 1), (16, 8, 1), (16, 8, 1), (64, 4, 1), (64, 8, 1)),
    "grad_state": ((64, 8, 2), (32, 8, 2), (16, 8, 1), (16, 8, 1), (32, 4, 1, 168), (32, 8, 2)),
    "keys_lln": ((32, 4, 2), (32, 8, 1), (16, 8, 1), (16, 8, 1), (64, 8, 2), (32, 8, 1)),
    "both_average": ((32, 4, 1), (64, 8, 1), (16, 8, 1), (16, 8, 1), (64, 4, 1), (64, 8, 1)),
    "both_average_long": ((32, 4, 1), (64, 8, 2), (16, 8, 1), (16, 8, 1), (64, 4, 1), (64, 8, 1)),
    "queries_joint": ((64, 4, 1), (64, 8, 2), (16, 8, 1), (16, 8, 1), (64, 4, 1), (64, 8, 1)),
    "queries_joint_long": ((64, 4, 1), (64, 8, 1), (16, 8, 1), (16, 8, 1), (64, 4, 1), (128, 8, 1)),
    "keys_joint": ((32, 4, 1), (64, 8, 1), (16, 8, 1), (16, 8, 1), (64, 4, 1), (64, 8, 1)),
    "keys_joint_long": ((32, 4, 1), (64, 8, 1), (16, 8, 1), (16, 8, 1), (64, 4, 1), (128, 8, 1)),
}


class Settings(NamedTuple):
    """What a kernel is compiled for: the argument META of the kernels."""

    dim: int  # D
    rows: int  # tokens in a tile
    dot: tl.dtype  # the dtype of the operands of tl.dot
    has_padding: bool
    form: str = LLN
    weight: float = 1.0  # of LLN and of the softmax in the form
    block: int = 1  # tokens in a block
    chunk: int = 1  # tokens of one program, a multiple of the block size
    has_global: bool = False  # True if there are global tokens before the last chunk's blocks
    dropout: float = 0.0

    @property
    def scale(self) -> float:
        return self.dim**-0.5

    @property
    def chunk_rows(self) -> int:
        """Return the number of rows of the tiles of a chunk."""
        return math.ceil(self.chunk / self.rows) * self.rows


def capability(device: torch.device) -> int:
    """Return the compute capability of a GPU as one number, for example 90 for capability 9.0."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def shared_memory(device: torch.device) -> int:
    """Return the largest number of bytes of shared memory that a program may use on a GPU."""
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin")  # noqa: B009 - no stub


def select_tile(q: Tensor, name: str, block_size: int = 0) -> Tile:
    """Return the tile with this name in _TILES for the device, the dtype and the head dimension of q (B, H, N, D)."""
    if INTERPRETED:
        # The interpreter's time depends on the number of operations, not on their size.
        return Tile(64, 4, 1)
    if block_size > LONG_BLOCK and f"{name}_long" in _TILES:
        name = f"{name}_long"
    element_size = q.element_size()
    is_arch_90 = 90 <= capability(q.device) < 120 and element_size == 2
    column = _COLUMNS.index((90 if is_arch_90 else 80, element_size, 64 if q.shape[-1] <= 64 else 128))
    return Tile(*_TILES[name][column])


def reason_against(spec: Spec, q: Tensor) -> str | None:
    """See `Backend.reason_against`."""
    if spec.form == DIAG:
        return "The Triton kernels have no block-diagonal attention without LLN."
    if q.dtype not in _DTYPES:
        return f"The Triton kernels support float16, bfloat16 and float32, not {q.dtype}."
    if q.shape[-1] not in HEAD_DIMS:
        return f"The Triton kernels support the head dims {HEAD_DIMS}, not {q.shape[-1]}."
    if q.device.type != "cuda" and not (INTERPRETED and q.device.type == "cpu"):
        return f"The Triton kernels need CUDA, not {q.device.type}."
    if not INTERPRETED and capability(q.device) < 80:
        return "The Triton kernels need compute capability 8.0: Triton does not use the tensor cores of older GPUs."
    if not INTERPRETED and q.element_size() * q.shape[-1] == 512 and shared_memory(q.device) < 147456:
        return "float32 with head dim 128 needs 144 KB of shared memory, which this device does not have."
    if spec.form != LLN and spec.block_size not in BLOCK_SIZES:
        return f"The Triton kernels support blocks of 16 to 256 tokens, not {spec.block_size}."
    return None


def split_tokens(length: int, dim: int) -> tuple[int, int]:
    """Divide a sequence into splits, each of which one program sums over.

    There are enough splits to occupy a GPU, and few enough that writing a state (D, D) for each causes little memory
    traffic. The result depends only on N and D, so that the results for a sequence do not depend on the rest of the
    batch.

    Args:
        length: N.
        dim: D.

    Returns: the number of splits, and the number of tokens in each. The last split may be shorter.
    """
    splits = min(max(length // max(1024, 16 * dim), 1), MAX_SPLITS)
    tokens = math.ceil(length / splits / 128) * 128
    return math.ceil(length / tokens), tokens


def kernel_options(q: Tensor, name: str, has_padding: bool, form: str = LLN) -> dict[str, Any]:
    """Return META and Triton's options for a kernel without chunks. `name` is that of its tile."""
    tile = select_tile(q, name)
    return {
        "META": Settings(q.shape[-1], tile.rows, _dot_dtype(q), has_padding, form, WEIGHTS[form][0]),
        **tile.options,
    }


def chunk_options(q: Tensor, name: str, spec: Spec, has_padding: bool) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return the grid (B H, chunks), and META and Triton's options, for a kernel whose programs compute chunks.

    A chunk is as many whole blocks as fit in one tile, but at least one block, which may take several tiles. Without
    blocks, a chunk is four tiles.
    """
    batch, heads, length, dim = q.shape
    tile = select_tile(q, f"{name}_{spec.form}", spec.block_size)
    chunk = 4 * tile.rows
    if spec.form != LLN:
        chunk = max(tile.rows // spec.block_size, 1) * spec.block_size
    settings = Settings(
        dim,
        tile.rows,
        _dot_dtype(q),
        has_padding,
        spec.form,
        WEIGHTS[spec.form][0],
        spec.block_size,
        chunk,
        count_global_keys(spec.max_global, length, spec.block_size) > 0,
        spec.dropout,
    )
    return (batch * heads, math.ceil(length / chunk)), {"META": settings, **tile.options}


def _dot_dtype(q: Tensor) -> tl.dtype:
    """Return the dtype of q, but float32 in place of bfloat16 in the interpreter, which multiplies bfloat16 wrongly."""
    if INTERPRETED and q.dtype == torch.bfloat16:
        return tl.float32
    return _DTYPES[q.dtype]


def device_of(x: Tensor) -> torch.cuda.device | nullcontext:
    """Return a context manager under which kernels are launched on the device of x."""
    if x.is_cuda:
        return torch.cuda.device(x.device)
    return nullcontext()


def same_layout(x: Tensor, y: Tensor) -> bool:
    """Return True if x and y have the same strides. Strides of dimensions of size 1 are not compared."""
    return all(n == 1 or s == t for n, s, t in zip(x.shape, x.stride(), y.stride(), strict=True))


def aligned(*tensors: Tensor) -> list[Tensor]:
    """Return tensors with these values that all have the same strides and dense features (the last dimension).

    If the tensors already fulfill both conditions, they are returned themselves. Otherwise all of them are made
    contiguous.
    """
    if all(x.stride(-1) == 1 and same_layout(x, tensors[0]) for x in tensors):
        return list(tensors)
    return [x.contiguous() for x in tensors]


def strides(x: Tensor, name: str = "s") -> dict[str, int]:
    """Return the strides of batch, heads and tokens of x (B, H, N, D) as the arguments name_b, name_h and name_n."""
    return {f"{name}_b": x.stride(0), f"{name}_h": x.stride(1), f"{name}_n": x.stride(2)}


def mask_bytes(padding: Tensor | None) -> Tensor | None:
    """Return a bool mask (B, N) as contiguous bytes, or None if the mask is None.

    The result shares memory with the mask if the mask is contiguous.
    """
    if padding is None:
        return None
    return padding.contiguous().view(torch.uint8)


def workspace(like: Tensor, *shape: int) -> Tensor:
    """Return an uninitialized float32 tensor of this shape on the device of `like`."""
    return torch.empty(shape, dtype=torch.float32, device=like.device)
