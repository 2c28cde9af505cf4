"""The tile sizes of the Triton kernels, by GPU, dtype and head dimension.

`python -m scripts.benchmarks.tiles` times other sizes on the GPU at hand.
"""

import os
from typing import NamedTuple

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
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
# tiles of architecture 80, GPUs of 9.x to 11.x the tiles of architecture 90. float32 has small tiles because tf32x3
# needs three operands in place of one. Its tiles are the same on both architectures.
COLUMNS = ((80, 2, 64), (80, 2, 128), (80, 4, 64), (80, 4, 128), (90, 2, 64), (90, 2, 128))
# The fields of the `Tile` of each kernel, in the order of COLUMNS. A name has the kernel or the pass and, if its tile
# depends on it, the form; "long" marks blocks of more than LONG_BLOCK tokens. They were chosen from the compiled code,
# so that half precision spills few registers. tests/ops/backends/test_triton_aot.py lists the spills. On an H200, those
# of output and of backward were the best of 12 with D = 64 and half precision. MEASURED_ON_H200 replaces others there.
TILES = {
    "state": ((32, 4, 2), (64, 8, 2), (32, 4, 1), (16, 8, 1), (64, 4, 2), (64, 8, 2)),
    "moments": ((64, 4, 2),) * 6,
    "output_lln": ((64, 4, 2), (64, 8, 1), (32, 4, 1), (16, 8, 1), (64, 4, 2), (64, 8, 1)),
    "output_average": ((64, 4, 1), (64, 8, 1), (16, 8, 1), (16, 8, 1), (64, 4, 2), (64, 8, 1)),
    "output_joint": ((64, 4, 1), (32, 4, 1), (16, 8, 1), (16, 8, 1), (64, 4, 1), (64, 8, 1)),
    "grad_state": ((64, 8, 2), (32, 8, 2), (16, 8, 1), (16, 8, 1), (32, 4, 1, 168), (32, 8, 2)),
    "grad_state_splits": ((64, 8, 2), (32, 8, 2), (16, 8, 1), (16, 8, 1), (32, 4, 1, 168), (32, 8, 2)),
    "keys_lln": ((32, 4, 2), (32, 8, 1), (16, 8, 1), (16, 8, 1), (64, 8, 2), (32, 8, 1)),
    "output_diag": ((64, 4, 1), (64, 8, 1), (16, 8, 1), (16, 8, 1), (64, 4, 2), (64, 8, 1)),
    "both_diag": ((32, 4, 1), (64, 8, 1), (16, 8, 1), (16, 8, 1), (64, 4, 1), (64, 8, 1)),
    "queries_diag": ((64, 4, 1), (64, 8, 1), (16, 8, 1), (16, 8, 1), (64, 4, 1), (64, 8, 1)),
    "keys_diag": ((32, 4, 1), (64, 8, 1), (16, 8, 1), (16, 8, 1), (64, 4, 1), (64, 8, 1)),
    "both_average": ((32, 4, 1), (64, 8, 1), (16, 8, 1), (16, 8, 1), (64, 4, 1), (64, 8, 1)),
    "both_average_long": ((32, 4, 1), (64, 8, 2), (16, 8, 1), (16, 8, 1), (64, 4, 1), (64, 8, 1)),
    "queries_joint": ((64, 4, 1), (64, 8, 2), (16, 8, 1), (16, 8, 1), (64, 4, 1), (64, 8, 1)),
    "queries_joint_long": ((64, 4, 1), (64, 8, 1), (16, 8, 1), (16, 8, 1), (64, 4, 1), (128, 8, 1)),
    "keys_joint": ((32, 4, 1), (64, 8, 1), (16, 8, 1), (16, 8, 1), (64, 4, 1), (64, 8, 1)),
    "keys_joint_long": ((32, 4, 1), (64, 8, 1), (16, 8, 1), (16, 8, 1), (64, 4, 1), (128, 8, 1)),
}
# For compute capability 9.0, half precision and D <= 64: the fastest of the candidates on an H200.
MEASURED_ON_H200: dict[str, tuple[int, int, int]] = {
    "moments": (128, 4, 1),
    "state": (128, 4, 1),
    "grad_state": (64, 4, 3),  # a single split
    "grad_state_splits": (32, 4, 3),
}


def capability(device: torch.device) -> int:
    """Return the compute capability of a GPU as one number, for example 90 for capability 9.0."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def select_tile(name: str, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int = 0) -> Tile:
    """Return the tile that TILES or, with compute capability 9.0, MEASURED_ON_H200 has under this name.

    Blocks of more than LONG_BLOCK tokens get that of NAME_long, if there is one. Triton's interpreter always gets the
    same tile.
    """
    if INTERPRETED:
        # The interpreter's time depends on the number of operations, not on their size.
        return Tile(64, 4, 1)
    if block_size > LONG_BLOCK and f"{name}_long" in TILES:
        name = f"{name}_long"
    arch = capability(device)
    element_size = dtype.itemsize
    dim = 64 if head_dim <= 64 else 128
    if (arch, element_size, dim) == (90, 2, 64) and name in MEASURED_ON_H200:
        return Tile(*MEASURED_ON_H200[name])
    is_arch_90 = 90 <= arch < 120 and element_size == 2
    return Tile(*TILES[name][COLUMNS.index((90 if is_arch_90 else 80, element_size, dim))])
