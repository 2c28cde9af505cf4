"""The context of one forward or backward call of the PyTorch backend.

Heads are computed in groups that fit in the cache. `CallContext` holds the groups, the scratch memory that all groups
use, and the padding of every head. `HeadTensors` holds α, β and the other tensors that have one entry per head.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lln_fairseq.ops.backends import DIAG, JOINT, LLN, Inputs, Spec
from lln_fairseq.ops.joint import count_global_keys, global_key_padding
from lln_fairseq.ops.padding import clear_queries, explicit_mask
from lln_fairseq.ops.scratch import Scratch, head_groups


class HeadTensors(NamedTuple):
    """Tensors with one entry for each of G heads: either all B·H heads of a call, or one group of heads."""

    alpha: Tensor  # (G, 1, 1)
    beta: Tensor  # (G, 1, 1)
    log_sum: Tensor  # L = logsumexp_j(β k_j), (G, 1, D)
    state: Tensor  # S = lln_weight · Wᵀ v, (G, D, D)
    key_max: Tensor | None = None  # max_j β k_j, (G, 1, D); only for the joint form
    key_sum: Tensor | None = None  # Σ_j exp(β k_j - key_max), (G, 1, D); only for the joint form
    offset: Tensor | None = None  # the offset o of the joint form, (G, 1, 1)

    def select(self, group: slice) -> "HeadTensors":
        """Return the tensors of one group of heads, as views of these tensors."""
        parts: list[Any] = [None if x is None else x[group] for x in self]
        return HeadTensors(*parts)


class HeadGradients(NamedTuple):
    """The gradients of the scalars of all heads, each (B·H, 1, 1), or None if the gradient is not needed."""

    alpha: Tensor | None
    beta: Tensor | None
    offset: Tensor | None


class CallContext:
    """The groups of heads of one call, their scratch memory, and the padding of every head.

    Attributes:
        heads: B·H.
        block_size: tokens per block, at most N; 1 if the call has no blocks.
        groups: the groups of heads, as slices of range(heads).
        length: N, the number of tokens.
        scratch: the buffers for one group. Their length is the rounded-up N: N rounded up to a multiple of block_size.
        padding: bool (B·H, rounded-up N), True for padding tokens and beyond N. None if the call has no mask and N is a
            multiple of block_size.
        global_padding: the result of `global_key_padding` for every head, bool (B·H, blocks, E). None if no block has
            global keys.
    """

    def __init__(self, spec: Spec, inputs: Inputs) -> None:
        q = inputs.q
        padding = inputs.padding
        batch, heads, length, dim = q.shape
        self.spec = spec
        self.inputs = inputs
        self.heads = batch * heads
        self.length = length
        self.block_size = 1
        if spec.form != LLN:
            self.block_size = max(1, min(spec.block_size, length))
        blocks = -(-length // self.block_size)
        padded_length = blocks * self.block_size
        self.scratch = Scratch(q, padded_length)
        keys_of_block = self.block_size + spec.max_global
        self.groups = list(head_groups(self.heads, padded_length * max(dim, keys_of_block), q))
        self.padding: Tensor | None = None
        if padding is not None or padded_length != length:
            long_padding = torch.nn.functional.pad(explicit_mask(padding, q), (0, padded_length - length), value=True)
            self.padding = long_padding.repeat_interleave(heads, dim=0)
        self.global_padding: Tensor | None = None
        num_global_keys = count_global_keys(spec.max_global, length, self.block_size)
        if inputs.global_counts is not None and num_global_keys > 0:
            global_padding = global_key_padding(inputs.global_counts, padding, q, self.block_size, num_global_keys)
            self.global_padding = global_padding.repeat_interleave(heads, dim=0)

    def head_scalars(self, x: Tensor) -> Tensor:
        """Return x (B, H) as a tensor (B·H, 1, 1) in the compute dtype."""
        return x.reshape(-1, 1, 1).to(self.scratch.dtype)

    def head_tensors(self, alpha: Tensor | None, beta: Tensor | None, saved: Sequence[Tensor]) -> HeadTensors | None:
        """Return α and β (B, H) and what the forward pass saves as `HeadTensors`; None without LLN.

        The saved tensors are not copied: the forward pass fills them through the result of this method.
        """
        if self.spec.form == DIAG:
            return None
        assert alpha is not None
        assert beta is not None
        heads = HeadTensors(self.head_scalars(alpha), self.head_scalars(beta), saved[0], saved[1])
        if self.spec.form != JOINT:
            return heads
        assert self.inputs.offset is not None
        return heads._replace(key_max=saved[2], key_sum=saved[3], offset=self.head_scalars(self.inputs.offset))

    def select(self, group: slice, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the part of each tensor (B·H, ...) that belongs to the group, as a view (G, ...)."""
        if len(self.groups) == 1:
            return tensors
        return [x[group] for x in tensors]

    def load_inputs(self, group: slice, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Prepare the inputs of one group for the computation.

        Args:
            group: the slice of the heads.
            tensors: q, k, v and, in a backward pass, the gradient of the output, each (B·H, N, D).

        Returns: contiguous tensors (G, rounded-up N, D) in the compute dtype, in the order of the arguments, with 0
            beyond N. At padding positions, k and v are 0, and q is treated by `clear_queries`. Do not write to the
            results: a result is an input itself if nothing had to be changed, otherwise it is in scratch memory.
        """
        inputs = list(self.select(group, tensors))
        if self.padding is not None and self.inputs.padding is not None:
            padded = self.padding[group, : self.length, None]
            inputs[0] = clear_queries(inputs[0], padded)
            inputs[1] = inputs[1].masked_fill(padded, 0.0)
            inputs[2] = inputs[2].masked_fill(padded, 0.0)
        return [self.scratch.load(f"input{i}", x) for i, x in enumerate(inputs)]

    def output_buffers(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return, for each output (G, N, D) of a group, the tensor (G, rounded-up N, D) in which to compute it.

        This is the output itself if its layout and dtype allow it, otherwise scratch memory, see `Scratch.target`.
        """
        return [self.scratch.target(f"result{i}", x) for i, x in enumerate(outputs)]

    def store_outputs(self, buffers: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Copy each buffer that `output_buffers` returned to its output, unless the buffer is the output itself."""
        for buffer, output in zip(buffers, outputs, strict=True):
            self.scratch.store(buffer, output)
