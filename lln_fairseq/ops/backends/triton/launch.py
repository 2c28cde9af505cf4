"""The launch settings of the Triton kernels: supported tensors, tile sizes, splits of the tokens, and layouts."""

import os
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lln_fairseq.ops.formula import DIAG, LLN, Spec

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


class Tiles(NamedTuple):
    """The tiles of the kernels that walk over tokens, one field for each kernel.

    The suffix _long marks the tile of a kernel for blocks longer than LONG_BLOCK.
    """

    state: Tile
    out: Tile
    diag_out: Tile  # the kernel of `out` with blocks
    dstate: Tile
    dkv: Tile
    diag_bwd: Tile
    joint_out: Tile
    joint_dq: Tile
    joint_dkv: Tile
    diag_bwd_long: Tile  # this and the following: for blocks of more than LONG_BLOCK tokens
    joint_out_long: Tile
    joint_dq_long: Tile
    joint_dkv_long: Tile

    def for_block_size(self, kernel: str, block_size: int) -> Tile:
        """Return the tile of a kernel that has two: one for blocks of at most LONG_BLOCK tokens, one for longer blocks.

        Args:
            kernel: the name of the field for short blocks, such as "joint_out".
            block_size: tokens in a block.
        """
        if block_size > LONG_BLOCK:
            return getattr(self, f"{kernel}_long")
        return getattr(self, kernel)


# Architecture, bytes of an element, and the largest head dimension. GPUs of compute capability 8.x and 12.x use the
# tiles of architecture 80, GPUs of 9.x and 10.x the tiles of architecture 90. float32 has small tiles because tf32x3
# needs three operands in place of one. Its tiles are the same on both architectures.
_COLUMNS = ((80, 2, 64), (80, 2, 128), (80, 4, 64), (80, 4, 128), (90, 2, 64), (90, 2, 128))
# The fields of the `Tile` of each kernel, in the order of _COLUMNS. They were chosen from the compiled code, so that
# half precision spills few registers. tests/ops/backends/test_triton_aot.py lists the spills.
_TABLE = {
    "state": ((32, 4, 2), (64, 8, 2), (32, 4, 1), (16, 8, 1), (64, 4, 2), (64, 8, 2)),
    "out": ((64, 4, 2), (64, 8, 1), (32, 4, 1), (16, 8, 1), (64, 4, 2), (64, 8, 1)),
    "diag_out": ((64, 4, 1), (64, 8, 1), (16, 8, 1), (16, 8, 1), (64, 4, 2), (64, 8, 1)),
    "dstate": ((64, 8, 2), (32, 8, 2), (16, 8, 1), (16, 8, 1), (32, 4, 1, 168), (32, 8, 2)),
    "dkv": ((32, 4, 2), (32, 8, 1), (16, 8, 1), (16, 8, 1), (64, 8, 2), (32, 8, 1)),
    "diag_bwd": ((32, 4, 1), (64, 8, 1), (16, 8, 1), (16, 8, 1), (64, 4, 1), (64, 8, 1)),
    "joint_out": ((64, 4, 1), (32, 4, 1), (16, 8, 1), (16, 8, 1), (64, 4, 1), (64, 8, 1)),
    "joint_dq": ((64, 4, 1), (64, 8, 2), (16, 8, 1), (16, 8, 1), (64, 4, 1), (64, 8, 1)),
    "joint_dkv": ((32, 4, 1), (64, 8, 1), (16, 8, 1), (16, 8, 1), (64, 4, 1), (64, 8, 1)),
    "diag_bwd_long": ((32, 4, 1), (64, 8, 2), (16, 8, 1), (16, 8, 1), (64, 4, 1), (64, 8, 1)),
    "joint_out_long": ((64, 4, 1), (32, 4, 1), (16, 8, 1), (16, 8, 1), (64, 4, 1), (64, 8, 1)),
    "joint_dq_long": ((64, 4, 1), (64, 8, 1), (16, 8, 1), (16, 8, 1), (64, 4, 1), (128, 8, 1)),
    "joint_dkv_long": ((32, 4, 1), (64, 8, 1), (16, 8, 1), (16, 8, 1), (64, 4, 1), (128, 8, 1)),
}
TILES: dict[tuple[int, int, int], Tiles] = {}
for _index, _key in enumerate(_COLUMNS):
    TILES[_key] = Tiles(**{kernel: Tile(*row[_index]) for kernel, row in _TABLE.items()})
for _dim in (64, 128):
    TILES[90, 4, _dim] = TILES[80, 4, _dim]


def capability(device: torch.device) -> int:
    """Return the compute capability of a GPU as one number, for example 90 for capability 9.0."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def shared_memory(device: torch.device) -> int:
    """Return the largest number of bytes of shared memory that a program may use on a GPU."""
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin")  # noqa: B009 - no stub


def tiles_for(q: Tensor) -> Tiles:
    """Return the tiles for tensors with the device, dtype and head dimension of q (B, H, N, D)."""
    if INTERPRETED:
        # The interpreter's time depends on the number of operations, not on their size.
        return Tiles(*[Tile(64, 4, 1)] * len(Tiles._fields))
    return TILES[tiles_key(q)]


def tiles_key(q: Tensor) -> tuple[int, int, int]:
    """Return the key of TILES for a CUDA tensor q (B, H, N, D).

    Returns: the architecture, the bytes of an element, and the largest head dimension that the tiles are meant for.
    """
    architecture = 90 if 90 <= capability(q.device) < 120 else 80
    largest_dim = 64 if q.shape[-1] <= 64 else 128
    return architecture, q.element_size(), largest_dim


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
    if spec.max_global:
        return "The Triton kernels do not support global tokens yet."
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
    tokens = triton.cdiv(triton.cdiv(length, splits), 128) * 128
    return triton.cdiv(length, tokens), tokens


def chunk_size(block_size: int | None, rows: int) -> int:
    """Return the number of tokens that one program processes: its chunk.

    Args:
        block_size: tokens in a block. A chunk is as many whole blocks as fit in one tile, but at least one block, which
            may take several tiles. With None, for a call without blocks, a chunk is four tiles.
        rows: tokens in a tile.
    """
    if block_size is None:
        return 4 * rows
    return max(rows // block_size, 1) * block_size


def kernel_options(q: Tensor, tile: Tile) -> dict[str, Any]:
    """Return the keyword arguments D, ROWS and DOT, which most kernels have, together with the options of the tile.

    DOT is the dtype of the operands of tl.dot. It is the dtype of q, but the interpreter gets float32 in place of
    bfloat16, which it multiplies wrongly.
    """
    dot_dtype = _DTYPES[q.dtype]
    if INTERPRETED and q.dtype == torch.bfloat16:
        dot_dtype = tl.float32
    return {"D": q.shape[-1], "ROWS": tile.rows, "DOT": dot_dtype, **tile.options}


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


def strides(x: Tensor) -> tuple[int, int, int]:
    """Return the strides of the batch, head and token dimensions of x (B, H, N, D)."""
    return x.stride(0), x.stride(1), x.stride(2)


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
