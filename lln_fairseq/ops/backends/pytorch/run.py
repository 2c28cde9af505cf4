"""What one call of the PyTorch backend needs: groups of heads, their scratch memory, padding per head."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lln_fairseq.ops.backends import HybridSpec
from lln_fairseq.ops.padding import clear_queries, explicit_mask
from lln_fairseq.ops.scratch import Scratch, head_groups


def _clear_keys(x: Tensor, padded: Tensor) -> Tensor:
    return x.masked_fill(padded, 0.0)


class Run:
    """What one call needs: the groups of heads, their scratch memory, and padding per head."""

    def __init__(self, q: Tensor, mask: Tensor | None, mix: HybridSpec) -> None:
        batch, heads, n, dim = q.shape
        self.mix, self.heads = mix, batch * heads
        self.block = max(1, min(mix.block_size, n)) if mix.diag_weight else 1
        length = -(-n // self.block) * self.block
        self.scratch = Scratch(q, length)
        self.groups = list(head_groups(self.heads, length * max(dim, self.block), q))
        self.padding, self.masked, self.length = None, mask is not None, n
        if mask is not None or length != n:
            padding = torch.nn.functional.pad(explicit_mask(mask, q), (0, length - n), value=True)
            self.padding = padding.repeat_interleave(heads, dim=0)

    def by_head(self, *alpha_beta: Tensor) -> list[Tensor]:
        """α, β (B, H) as they multiply (B·H, N, D)."""
        return [x.reshape(-1, 1, 1).to(self.scratch.dtype) for x in alpha_beta]

    def cut(self, group: slice, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return tensors if len(self.groups) == 1 else [x[group] for x in tensors]

    def load(self, group: slice, tensors: Sequence[Tensor]) -> list[Tensor]:
        """q, k, v and perhaps the gradient of a group, with padding that can be computed with."""
        pieces = self.cut(group, tensors)
        if self.padding is not None and self.masked:
            padded = self.padding[group, : self.length, None]
            clear = (clear_queries, _clear_keys, _clear_keys, lambda grad, _: grad)
            pieces = [f(x, padded) for f, x in zip(clear, pieces, strict=False)]
        return [self.scratch.load(f"input{i}", x) for i, x in enumerate(pieces)]

    def targets(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        return [self.scratch.target(f"result{i}", x) for i, x in enumerate(pieces)]

    def store(self, results: list[Tensor], pieces: Sequence[Tensor]) -> None:
        for result, x in zip(results, pieces, strict=True):
            self.scratch.store(result, x)


def softmax_backward(grad: Tensor, p: Tensor) -> Tensor:
    """P (dP - Σ P dP), the derivative of a softmax over the last dimension, in one pass and in the memory of dP."""
    return torch.ops.aten._softmax_backward_data.out(grad, p, -1, p.dtype, grad_input=grad)
