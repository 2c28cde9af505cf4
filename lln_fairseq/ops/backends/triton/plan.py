"""Plans: everything about a call that depends only on its options and on the layout of its tensors, computed once.

A plan has the kernels of a call, with their grids, settings and numbers. A call looks up its plan, allocates tensors,
and launches the kernels with these tensors. The functions plan_... keep their results. Triton compiles a kernel anew if
the address of a tensor is not a multiple of 16, so the alignment of every tensor belongs to its layout. Tensors that a
call allocates are always aligned.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from lln_fairseq.ops.backends.triton.backward_kernels import (
    _backward_kernel,
    _combine_grad_state_kernel,
    _global_keys_kernel,
    _grad_state_kernel,
)
from lln_fairseq.ops.backends.triton.launch import (
    Kernel,
    Settings,
    dot_dtype,
    split_tokens,
)
from lln_fairseq.ops.backends.triton.moment_kernels import _moments_combine_kernel, _moments_kernel
from lln_fairseq.ops.backends.triton.output_kernels import _output_kernel
from lln_fairseq.ops.backends.triton.state_kernels import _combine_state_kernel, _state_kernel
from lln_fairseq.ops.backends.triton.tiles import Tile, select_tile
from lln_fairseq.ops.formula import DIAG, JOINT, LLN, WEIGHTS, Inputs, Spec, count_global_keys

CACHED = 1024  # plans of each kind; the least recently used one is forgotten first
PADDING = Inputs._fields.index("padding")  # its place in the layouts of forward and backward passes
COLUMNS = 256  # elements of a state that a program of the kernels that combine splits computes


class TensorLayout(NamedTuple):
    """What a launch depends on besides options. `layout_of` returns it."""

    shape: torch.Size  # (B, H, N, D)
    dtype: torch.dtype
    device: torch.device
    strides: tuple[tuple[int, ...] | None, ...]  # of each tensor of the call; None for a tensor that is None
    alignment: tuple[bool | None, ...]  # of each tensor: True if its address is a multiple of 16


def layout_of(*tensors: Tensor | None) -> TensorLayout:
    """Return shape, dtype, device, strides and alignment of the tensors of a call, in their order; the first is q."""
    strides: list[tuple[int, ...] | None] = []
    alignment: list[bool | None] = []
    for x in tensors:
        if x is None:
            strides.append(None)
            alignment.append(None)
        else:
            strides.append(x.stride())
            alignment.append(x.data_ptr() % 16 == 0)
    q = tensors[0]
    assert q is not None
    return TensorLayout(q.shape, q.dtype, q.device, tuple(strides), tuple(alignment))


class SplitPlan(NamedTuple):
    """A sum over the tokens: a kernel that is launched over all splits, and one that adds up several splits."""

    splits: int
    kernel: Kernel
    combine: Kernel | None


class ForwardPlan(NamedTuple):
    """The kernels of a forward pass: the sums over the keys, and the output."""

    is_copied: bool  # True if q, k and v are made contiguous first
    state: SplitPlan | None  # None without LLN
    output: Kernel


class BackwardPlan(NamedTuple):
    """The kernels of a backward pass. The order of their launches is that of backward_kernels.py."""

    is_copied: bool
    queries: Kernel | None  # None if `keys` computes the gradients of both, and for LLN
    grad_state: SplitPlan | None  # None without LLN
    global_keys: Kernel | None  # None without global keys
    keys: Kernel
    alpha_terms: tuple[int, ...]  # the shape (B H, programs) of the terms of this gradient; () if it is not computed
    beta_terms: tuple[int, ...]
    offset_terms: tuple[int, ...]
    stats: int  # the number of statistics of each query, or 0 if they are not stored
    global_sums: tuple[int, ...]  # the shape of the output of `global_keys`


def have_common_strides(shape: torch.Size, strides: Sequence[tuple[int, ...] | None]) -> bool:
    """Return True if tensors (B, H, N, D) have the same strides and dense features. None is ignored.

    Strides of dimensions of size 1 are not compared.
    """
    first = strides[0]
    assert first is not None
    for other in strides:
        if other is None:
            continue
        if other[-1] != 1:
            return False
        for size, s, t in zip(shape, first, other, strict=True):
            if size != 1 and s != t:
                return False
    return True


def _common_strides(layout: TensorLayout, count: int) -> tuple[bool, tuple[int, ...], tuple[int, ...]]:
    """Decide whether the first `count` tensors must be copied, because their strides differ.

    Returns: True if they must be made contiguous, the strides that they then have, and those of torch.empty_like(q).
        Both have the strides of batch, heads and tokens.
    """
    is_copied = not have_common_strides(layout.shape, layout.strides[:count])
    q = torch.empty(layout.shape, device="meta")
    q_strides = layout.strides[0]
    if not is_copied and q_strides is not None:
        q = torch.empty_strided(layout.shape, q_strides, device="meta")
    return is_copied, q.stride()[:3], torch.empty_like(q).stride()[:3]


def _tile(name: str, layout: TensorLayout, block_size: int = 0) -> Tile:
    return select_tile(name, layout.device, layout.dtype, layout.shape[3], block_size)


def _settings(layout: TensorLayout, rows: int, has_padding: bool, form: str, **chunk: Any) -> Settings:
    dim = layout.shape[3]
    return Settings(dim, rows, dot_dtype(layout.dtype), has_padding, form, max(WEIGHTS[form]), **chunk)


def _chunk_kernel(
    function: Any, name: str, layout: TensorLayout, spec: Spec, has_padding: bool, *numbers: Any, **constants: Any
) -> Kernel:
    """Return a kernel each of whose programs computes one chunk of one head, on the grid (B H, chunks).

    Its tile has the name NAME_FORM. A chunk is as many whole blocks as fit in one tile. A block that is larger than a
    tile is a chunk of several tiles. Without blocks, a chunk is four tiles.
    """
    batch, heads, length, _ = layout.shape
    tile = _tile(f"{name}_{spec.form}", layout, spec.block_size)
    chunk = 4 * tile.rows
    if spec.form != LLN:
        chunk = max(tile.rows // spec.block_size, 1) * spec.block_size
    settings = _settings(
        layout,
        tile.rows,
        has_padding,
        spec.form,
        block=spec.block_size,
        chunk=chunk,
        reach=spec.neighbors * spec.block_size,
        band=-1 if spec.band is None else spec.band,
        has_global=count_global_keys(spec, length, spec.block_size) > 0,
        has_global_rows=spec.max_global > 0,
        dropout=spec.dropout,
    )
    grid = (batch * heads, math.ceil(length / chunk), 1)
    return Kernel(function, grid, layout.device, numbers, {**constants, "META": settings, **tile.options})


@functools.lru_cache(CACHED)
def plan_moments(layout: TensorLayout, size: int) -> tuple[bool, SplitPlan]:
    """Plan moment matching. The layout is that of q, k, the padding and the table, which has `size` points.

    Returns: whether q and k are made contiguous first, and the kernels.
    """
    batch, heads, length, dim = layout.shape
    is_copied, strides, _ = _common_strides(layout, 2)
    splits, tokens = split_tokens(length, dim)
    tile = _tile("moments", layout)
    constants = {"SIZE": size, "SIZE_2": triton.next_power_of_2(size)}
    settings = _settings(layout, tile.rows, layout.strides[2] is not None, LLN)
    kernel = Kernel(
        _moments_kernel,
        (batch * heads, splits, 1),
        layout.device,
        (*strides, heads, length, tokens),
        {**constants, "FINAL": splits == 1, "META": settings, **tile.options},
    )
    combine = None
    if splits > 1:
        constants["SPLITS_2"] = triton.next_power_of_2(splits)
        grid = (batch * heads, 1, 1)
        combine = Kernel(_moments_combine_kernel, grid, layout.device, (splits,), {**constants, "num_warps": 1})
    return is_copied, SplitPlan(splits, kernel, combine)


@functools.lru_cache(CACHED)
def plan_forward(spec: Spec, layout: TensorLayout) -> ForwardPlan:
    """Plan a forward pass. The layout is that of the `Inputs`."""
    batch, heads, length, dim = layout.shape
    is_copied, strides, out_strides = _common_strides(layout, 3)
    has_padding = layout.strides[PADDING] is not None
    state = None
    if spec.form != DIAG:
        splits, tokens = split_tokens(length, dim)
        tile = _tile("state", layout)
        settings = _settings(layout, tile.rows, has_padding, LLN)
        kernel = Kernel(
            _state_kernel,
            (batch * heads, splits, 1),
            layout.device,
            (*strides, heads, length, tokens),
            {"FINAL": splits == 1, "META": settings, **tile.options},
        )
        combine = None
        if splits > 1:
            combine = _combine_kernel(_combine_state_kernel, layout, (splits,))
        state = SplitPlan(splits, kernel, combine)
    numbers = (*strides, *out_strides, heads, length)
    output = _chunk_kernel(_output_kernel, "output", layout, spec, has_padding, *numbers)
    return ForwardPlan(is_copied, state, output)


def _combine_kernel(function: Any, layout: TensorLayout, numbers: tuple[int, ...], **constants: Any) -> Kernel:
    batch, heads, _, dim = layout.shape
    grid = (batch * heads, dim * dim // COLUMNS, 1)
    return Kernel(function, grid, layout.device, numbers, {**constants, "D": dim, "COLS": COLUMNS, "num_warps": 4})


@functools.lru_cache(CACHED)
def plan_backward(spec: Spec, layout: TensorLayout, needed: tuple[bool, ...]) -> BackwardPlan:
    """Plan a backward pass. The layout is that of the `Inputs`, the saved tensors and, last, the gradient.

    `needed` says which of the gradients of α, β and the offset are computed. Triton compiles a kernel anew if one of
    them is None, so a plan is made for each combination.
    """
    batch, heads, length, dim = layout.shape
    is_copied, strides, out_strides = _common_strides(layout, 3)
    has_padding = layout.strides[PADDING] is not None
    grad_strides = layout.strides[-1]
    assert grad_strides is not None
    splits, tokens = split_tokens(length, dim)
    inner = (*strides, *grad_strides[:3])

    def plan_chunks(passes: str, num_splits: int, max_rows: int) -> Kernel:
        numbers = (num_splits, max_rows, *inner, *out_strides, heads, length)
        flags = {"QUERIES": passes != "keys", "KEYS": passes != "queries"}
        return _chunk_kernel(_backward_kernel, passes, layout, spec, has_padding, *numbers, **flags)

    has_global = count_global_keys(spec, length, spec.block_size) > 0
    has_two_passes = spec.form == JOINT or has_global or spec.neighbors > 0
    queries = plan_chunks("queries", 0, 0) if has_two_passes else None
    name = "both"
    if has_two_passes or spec.form == LLN:
        name = "keys"
    keys = plan_chunks(name, 0, 0)
    settings = keys.constants["META"]
    stats = 0
    if spec.form == JOINT:
        stats = 6
    elif has_two_passes or (name == "both" and settings.chunk > settings.rows):
        stats = 2  # the statistics of the queries of a chunk do not fit in one tile
    global_keys = None
    global_sums: tuple[int, ...] = ()
    if has_global:
        chunks = math.ceil(count_global_keys(spec, length, spec.block_size) / settings.chunk)
        max_rows = chunks * settings.chunk
        global_sums = (batch * heads, splits, 3, max_rows, dim)
        keys = plan_chunks(name, splits, max_rows)
        options = {**keys.constants, "META": settings._replace(block=settings.chunk, has_global=False)}
        del options["QUERIES"], options["KEYS"]
        grid = (batch * heads, splits, chunks)
        global_keys = Kernel(_global_keys_kernel, grid, layout.device, (*inner, heads, length, tokens), options)
    grad_state = None
    if spec.form != DIAG:
        tile = _tile("grad_state", layout)
        if splits > 1:
            tile = _tile("grad_state_splits", layout)
        settings = _settings(layout, tile.rows, has_padding, spec.form, has_global_rows=spec.max_global > 0)
        kernel = Kernel(
            _grad_state_kernel,
            (batch * heads, splits, 1),
            layout.device,
            (*inner, *out_strides, heads, length, tokens),
            {"FINAL": splits == 1, "META": settings, **tile.options},
        )
        combine = None
        if splits > 1:
            weight, _ = WEIGHTS[spec.form]
            combine = _combine_kernel(_combine_grad_state_kernel, layout, (length, splits), WEIGHT=weight)
        grad_state = SplitPlan(splits, kernel, combine)
    alpha_terms: tuple[int, ...] = ()
    beta_terms: tuple[int, ...] = ()
    offset_terms: tuple[int, ...] = ()
    needs_alpha, needs_beta, needs_offset = needed
    if needs_alpha and spec.form == LLN:
        alpha_terms = (batch * heads, splits)
    elif needs_alpha and spec.form != DIAG:
        alpha_terms = (queries or keys).grid[:2]
    if needs_beta and spec.form != DIAG:
        beta_terms = keys.grid[:2]
    if needs_offset and spec.form == JOINT and queries is not None:
        offset_terms = queries.grid[:2]
    return BackwardPlan(
        is_copied=is_copied,
        queries=queries,
        grad_state=grad_state,
        global_keys=global_keys,
        keys=keys,
        alpha_terms=alpha_terms,
        beta_terms=beta_terms,
        offset_terms=offset_terms,
        stats=stats,
        global_sums=global_sums,
    )
