"""The launch of a Triton kernel, and its settings: supported tensors, and splits of the tokens."""

import functools
import math
from contextlib import nullcontext
from typing import Any, NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver

from lln_fairseq.ops.backends.triton import tiles
from lln_fairseq.ops.formula import LLN, Spec

# The versions of Triton whose compiled kernels take the arguments of `launch_kernel`.
CAN_CALL_COMPILED = triton.__version__.startswith(("3.6.", "3.7."))
HEAD_DIMS = (16, 32, 64, 128)
BLOCK_SIZES = range(16, 257)
_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
MAX_SPLITS = 128


class _SettingsFields(NamedTuple):
    dim: int  # D
    rows: int  # tokens in a tile
    dot: tl.dtype  # the dtype of the operands of tl.dot
    has_padding: bool
    form: str = LLN
    weight: float = 1.0  # of LLN and of the softmax in the form
    block: int = 1  # tokens in a block
    chunk: int = 1  # tokens of one program, a multiple of the block size
    reach: int = 0  # tokens on each side of a block that are keys of the block too, a multiple of the block size
    band: int = -1  # the largest distance of a query's keys in tokens, or -1 for no such limit
    has_global: bool = False  # True if there are global tokens before the last chunk's blocks
    has_global_rows: bool = False  # True if the rows of global tokens are left out: see global_rows.py
    dropout: float = 0.0
    scale: float = 1.0  # 1 / √D
    chunk_rows: int = 1  # rows of the tiles of a chunk and of the tokens that it reaches


class Settings(_SettingsFields):
    """What a kernel is compiled for: the argument META of the kernels.

    `scale` and `chunk_rows` are computed from the other fields. They are fields, because Triton 3.8 copies the fields
    into a tuple of its own, which has no properties.
    """

    def __new__(cls, *given: Any, **options: Any) -> Self:
        fields = _SettingsFields(*given, **options)
        chunk_rows = math.ceil((fields.chunk + 2 * fields.reach) / fields.rows) * fields.rows
        return super().__new__(cls, *fields._replace(scale=fields.dim**-0.5, chunk_rows=chunk_rows))


def shared_memory(device: torch.device) -> int:
    """Return the largest number of bytes of shared memory that a program may use on a GPU."""
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin")  # noqa: B009 - no stub


def reason_against(spec: Spec, q: Tensor) -> str | None:
    """See `Backend.reason_against`."""
    return _reason_against(spec.form, spec.block_size, q.dtype, q.shape[-1], q.device)


@functools.lru_cache(256)
def _reason_against(form: str, block_size: int, dtype: torch.dtype, dim: int, device: torch.device) -> str | None:
    if dtype not in _DTYPES:
        return f"The Triton kernels support float16, bfloat16 and float32, not {dtype}."
    if dim not in HEAD_DIMS:
        return f"The Triton kernels support the head dims {HEAD_DIMS}, not {dim}."
    if device.type != "cuda" and not (tiles.INTERPRETED and device.type == "cpu"):
        return f"The Triton kernels need CUDA, not {device.type}."
    if torch.version.hip is not None:
        return "The Triton kernels support NVIDIA's GPUs only."
    if not tiles.INTERPRETED and tiles.capability(device) < 80:
        return "The Triton kernels need compute capability 8.0: Triton does not use the tensor cores of older GPUs."
    if not tiles.INTERPRETED and dtype.itemsize * dim == 512 and shared_memory(device) < 147456:
        return "float32 with head dim 128 needs 144 KB of shared memory, which this device does not have."
    if form != LLN and block_size not in BLOCK_SIZES:
        return f"The Triton kernels support blocks of 16 to 256 tokens, not {block_size}."
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


def dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """Return a dtype as Triton's. In the interpreter, which multiplies bfloat16 wrongly, that one becomes float32."""
    if tiles.INTERPRETED and dtype == torch.bfloat16:
        return tl.float32
    return _DTYPES[dtype]


class Kernel:
    """A kernel with everything that stays the same from call to call: the grid, the numbers and the constants.

    Args:
        function: the kernel. Its arguments are tensors, then numbers, then constants.
        grid: three numbers.
        device: the device of the tensors.
        numbers: the arguments that are numbers, in order.
        constants: the arguments that are `tl.constexpr`, by name, and Triton's options, such as num_warps.
    """

    def __init__(
        self,
        function: Any,
        grid: tuple[int, int, int],
        device: torch.device,
        numbers: tuple[Any, ...],
        constants: dict[str, Any],
    ) -> None:
        self.function = function
        self.grid = grid
        self.device_index = device.index or 0
        self.numbers = numbers
        self.constants = constants
        # The numbers and constants in the order of the arguments.
        names = function.arg_names
        self.arguments = (*numbers, *(constants[name] for name in names if name in constants))
        self.compiled: CompiledKernel | None = None  # from the first launch on, if it can be called directly


def launch_kernel(kernel: Kernel, *tensors: Tensor | None) -> None:
    """Launch a kernel with its tensors, in the order of its arguments. Every launch goes through this function.

    The first launch goes through Triton, which compiles the kernel, or interprets it. Later ones call the compiled
    kernel as `JITFunction.run` does, without computing again which compiled kernel belongs to these arguments.
    """
    compiled = kernel.compiled
    if compiled is None:
        result = kernel.function.run(*tensors, *kernel.numbers, grid=kernel.grid, warmup=False, **kernel.constants)
        if CAN_CALL_COMPILED and isinstance(result, CompiledKernel):
            kernel.compiled = result
        return
    stream = driver.active.get_current_stream(kernel.device_index)
    arguments = (*tensors, *kernel.arguments)
    runtime = triton.knobs.runtime
    compiled.run(
        *kernel.grid,
        stream,
        compiled.function,
        compiled.packed_metadata,
        compiled.launch_metadata(kernel.grid, stream, *arguments),
        runtime.launch_enter_hook,
        runtime.launch_exit_hook,
        *arguments,
    )


def device_of(x: Tensor) -> torch.cuda.device | nullcontext:
    """Return a context manager under which kernels are launched on the device of x."""
    if x.is_cuda:
        return torch.cuda.device(x.device)
    return nullcontext()


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
