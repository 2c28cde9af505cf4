"""How the Triton kernels are launched: which tensors they take, tiles by architecture, splits, layouts, options."""

import os
from contextlib import nullcontext
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
HEAD_DIMS = (16, 32, 64, 128)
BLOCK_SIZES = range(16, 257)
_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
MAX_SPLITS = 128
LONG_BLOCK = 64  # tokens: longer blocks may take another tile


class Tile(NamedTuple):
    """Rows of a tile, warps of a program, depth of the load pipeline, the most registers of a thread (None: any)."""

    rows: int
    warps: int
    stages: int
    registers: int | None = None

    @property
    def options(self) -> dict[str, int | None]:
        """How a kernel is launched with it."""
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "num_stages": self.stages, **limit}


class Tiles(NamedTuple):
    """The tiles of the kernels that walk over tokens."""

    state: Tile
    out: Tile
    diag_out: Tile
    dstate: Tile
    dkv: Tile
    diag_bwd: Tile
    joint_out: Tile
    joint_dq: Tile
    joint_dkv: Tile
    diag_bwd_long: Tile  # from here on: for blocks of more than LONG_BLOCK tokens
    joint_out_long: Tile
    joint_dq_long: Tile
    joint_dkv_long: Tile

    def of(self, kernel: str, block_size: int) -> Tile:
        """The tile of a kernel that has one for long blocks too."""
        return getattr(self, f"{kernel}_long" if block_size > LONG_BLOCK else kernel)


# (architecture, bytes of an element, head dim up to): chosen by the machine code of the kernels, with few spilled
# registers in half precision (tests/ops/backends/test_triton_aot.py lists them; scripts/benchmarks/tiles.py times
# others). Compute capability 8.x and 12.x take the rows of 80, 9.x and 10.x those of 90. float32 works on small tiles:
# tf32x3 needs three operands for one.
_TABLE = {  # rows, warps, stages of each kernel in the order of Tiles
    (80, 2, 64): ((32, 4, 2), (64, 4, 2), (64, 4, 1), (64, 8, 2), (32, 4, 2),
                  (32, 4, 1), (64, 4, 1), (64, 4, 1), (32, 4, 1),
                  (32, 4, 1), (64, 4, 1), (64, 4, 1), (32, 4, 1)),
    (80, 2, 128): ((64, 8, 2), (64, 8, 1), (64, 8, 1), (32, 8, 2), (32, 8, 1),
                   (64, 8, 1), (32, 4, 1), (64, 8, 2), (64, 8, 1),
                   (64, 8, 2), (32, 4, 1), (64, 8, 1), (64, 8, 1)),
    (80, 4, 64): ((32, 4, 1), (32, 4, 1), (16, 8, 1), (16, 8, 1), (16, 8, 1),
                  (16, 8, 1), (16, 8, 1), (16, 8, 1), (16, 8, 1), (16, 8, 1), (16, 8, 1), (16, 8, 1), (16, 8, 1)),
    (80, 4, 128): ((16, 8, 1), (16, 8, 1), (16, 8, 1), (16, 8, 1), (16, 8, 1),
                   (16, 8, 1), (16, 8, 1), (16, 8, 1), (16, 8, 1), (16, 8, 1), (16, 8, 1), (16, 8, 1), (16, 8, 1)),
    (90, 2, 64): ((64, 4, 2), (64, 4, 2), (64, 4, 2), (32, 4, 1, 168), (64, 8, 2),
                  (64, 4, 1), (64, 4, 1), (64, 4, 1), (64, 4, 1),
                  (64, 4, 1), (64, 4, 1), (64, 4, 1), (64, 4, 1)),
    (90, 2, 128): ((64, 8, 2), (64, 8, 1), (64, 8, 1), (32, 8, 2), (32, 8, 1),
                   (64, 8, 1), (64, 8, 1), (64, 8, 1), (64, 8, 1),
                   (64, 8, 1), (64, 8, 1), (128, 8, 1), (128, 8, 1)),
}  # fmt: skip
TILES = {key: Tiles(*(Tile(*tile) for tile in tiles)) for key, tiles in _TABLE.items()}
TILES |= {(90, 4, dim): TILES[80, 4, dim] for dim in (64, 128)}


def capability(device: torch.device) -> int:
    """Compute capability as one number, 90 for 9.0."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def shared_memory(device: torch.device) -> int:
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin")  # noqa: B009 - no stub


def tiles_for(q: Tensor) -> Tiles:
    if INTERPRETED:  # where the number of operations counts and not their size
        return Tiles(*[Tile(64, 4, 1)] * len(Tiles._fields))
    return TILES[tiles_key(q)]


def tiles_key(q: Tensor) -> tuple[int, int, int]:
    """Which row of the table is q's."""
    arch = 90 if 90 <= capability(q.device) < 120 else 80
    return arch, q.element_size(), 64 if q.shape[-1] <= 64 else 128


def is_supported(q: Tensor, block_size: int | None = None) -> str | None:
    """None where the kernels can run on tensors like q, (B, H, N, D); otherwise the reason in one sentence."""
    if q.dtype not in _DTYPES:
        return f"The Triton kernels take float16, bfloat16 and float32, not {q.dtype}."
    if q.shape[-1] not in HEAD_DIMS:
        return f"The Triton kernels take head dims {HEAD_DIMS}, not {q.shape[-1]}."
    if q.device.type != "cuda" and not (INTERPRETED and q.device.type == "cpu"):
        return f"The Triton kernels need CUDA, not {q.device.type}."
    if not INTERPRETED and capability(q.device) < 80:
        return "The Triton kernels need compute capability 8.0: older tensor cores have no path in Triton."
    if not INTERPRETED and q.element_size() * q.shape[-1] == 512 and shared_memory(q.device) < 147456:
        return "float32 with head dim 128 needs 144 KB of shared memory, which this device does not have."
    if block_size is not None and block_size not in BLOCK_SIZES:
        return f"The Triton kernels take blocks of 16 to 256 tokens, not {block_size}."
    return None


def split_tokens(length: int, dim: int) -> tuple[int, int]:
    """Number of splits of the tokens, and tokens in each: enough programs for the device, little traffic of states."""
    splits = min(max(length // max(1024, 16 * dim), 1), MAX_SPLITS)
    tokens = triton.cdiv(triton.cdiv(length, splits), 128) * 128
    return triton.cdiv(length, tokens), tokens


def chunk_of(block_size: int | None, rows: int) -> int:
    """Tokens that a program owns: as many whole blocks as fit in one tile, or one block that needs several."""
    if block_size is None:
        return 4 * rows
    return max(rows // block_size, 1) * block_size


def dot_options(q: Tensor) -> dict[str, object]:
    """Operands of tl.dot. float32: three tf32 products (error 1e-6; one: 4e-4; `ieee` uses no tensor cores and spills).

    The interpreter multiplies bfloat16 wrongly, so there its operands are float32.
    """
    dtype = tl.float32 if INTERPRETED and q.dtype == torch.bfloat16 else _DTYPES[q.dtype]
    return {"DOT": dtype, "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32"}


def device_of(x: Tensor) -> torch.cuda.device | nullcontext:
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def same_layout(x: Tensor, y: Tensor) -> bool:
    """Whether one set of strides addresses both; the stride of a dimension of size 1 means nothing."""
    return all(n == 1 or s == t for n, s, t in zip(x.shape, x.stride(), y.stride(), strict=True))


def aligned(*tensors: Tensor) -> list[Tensor]:
    """The tensors with one set of strides and dense features; copied only where their layouts differ."""
    if all(x.stride(-1) == 1 and same_layout(x, tensors[0]) for x in tensors):
        return list(tensors)
    return [x.contiguous() for x in tensors]


def strides(x: Tensor) -> tuple[int, int, int]:
    return x.stride(0), x.stride(1), x.stride(2)


def mask_bytes(key_padding_mask: Tensor | None) -> Tensor | None:
    return None if key_padding_mask is None else key_padding_mask.contiguous().view(torch.uint8)


def workspace(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)
