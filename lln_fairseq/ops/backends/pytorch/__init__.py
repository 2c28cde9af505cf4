"""Hybrid attention in PyTorch, forward and closed-form backward, one group of heads after another.

This backend runs on every device and dtype. Within a group, tensors are contiguous (G, N, D) in the compute dtype, and
padding is bool (G, N) or None. The backward pass needs q, k, v and, per head, L (D) and the state S (D × D) of lln.py;
it recomputes everything else. The joint form (ops/joint.py) also needs the maximum and the sum that make up L.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lln_fairseq.ops.backends import HybridSpec
from lln_fairseq.ops.backends.pytorch.block_diag import BlockDiagAttention
from lln_fairseq.ops.backends.pytorch.call_context import CallContext, HeadGradients, HeadTensors
from lln_fairseq.ops.backends.pytorch.joint import JointAttention
from lln_fairseq.ops.backends.pytorch.lln import LLNAttention
from lln_fairseq.ops.backends.pytorch.sharded import sharded_backward, sharded_forward
from lln_fairseq.ops.dtypes import compute_dtype
from lln_fairseq.ops.layout import fresh_result
from lln_fairseq.ops.moment_matching import calibration_table, match_moments_pytorch


def is_supported(q: Tensor, block_size: int | None = None, max_global_tokens: int = 0) -> str | None:
    """Return None: this backend supports everything."""
    return None


def draw_seed(device: torch.device) -> int:
    """Draw a seed from torch's global CPU generator for every device.

    torch.manual_seed and activation checkpointing therefore reproduce it.
    """
    return int(torch.randint(2**31 - 1, (), device="cpu"))


def forward(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor | None, beta: Tensor | None, mask: Tensor | None, spec: HybridSpec
) -> tuple[Tensor, Tensor, Tensor, Sequence[Tensor]]:
    """Compute hybrid attention; see `Backend.forward`. If alpha or beta is None, both are matched.

    Returns: the output like q, α and β (B, H), and the tensors of `empty_saved` with their values
    """
    if alpha is None or beta is None:
        alpha, beta = match_moments(q, k, mask, calibration_table(q.shape[-1], q.device))
    call = CallContext(q, mask, spec)
    out = fresh_result(q)
    saved = empty_saved(q, spec)
    inputs = _flatten_heads(q, k, v)
    flat_out = out.flatten(0, 1)
    heads = call.head_tensors(alpha, beta, saved)
    if spec.exchange:
        sharded_forward(call, inputs, heads, flat_out, spec.exchange)
    else:
        for group in call.groups:
            _forward_group(call, group, inputs, heads, flat_out)
    return out, alpha, beta, saved


def _forward_group(call: CallContext, group: slice, inputs: Sequence[Tensor], heads: HeadTensors, out: Tensor) -> None:
    """Compute the output of one group of heads, and the tensors of `heads` that the backward pass needs.

    inputs are q, k, v (B·H, N, D). The group's part of `out` (B·H, N, D) and of the tensors of `heads` is filled.
    """
    loaded = call.load_inputs(group, inputs)
    outputs = call.select(group, [out])
    buffers = call.output_buffers(outputs)
    if call.spec.joint:
        JointAttention(call, group, heads.select(group)).forward(loaded, buffers[0])
    else:
        if call.spec.lln_weight:
            LLNAttention(call, group, heads.select(group)).forward(loaded, buffers[0])
        else:
            buffers[0].zero_()
        if call.spec.diag_weight:
            BlockDiagAttention(call, group).forward(loaded, buffers[0])
    call.store_outputs(buffers, outputs)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor,
    mask: Tensor | None,
    spec: HybridSpec,
    saved: Sequence[Tensor],
    grad: Tensor,
    needed: Sequence[bool],
) -> Sequence[Tensor | None]:
    """Compute the gradients of q, k, v, α, β and the offset; see `Backend.backward`."""
    call = CallContext(q, mask, spec)
    grads = empty_results(q, k, v)
    scalar_grads = HeadGradients(*(_zeros_per_head(call) if is_needed else None for is_needed in needed))
    inputs = _flatten_heads(q, k, v, grad)
    flat_grads = _flatten_heads(*grads)
    heads = call.head_tensors(alpha, beta, saved)
    if spec.exchange:
        sharded_backward(call, inputs, heads, flat_grads, scalar_grads, spec.exchange)
    else:
        for group in call.groups:
            _backward_group(call, group, inputs, heads, flat_grads, scalar_grads)
    results: list[Tensor | None] = [*grads]
    for scalar_grad in scalar_grads:
        if scalar_grad is not None:
            scalar_grad = scalar_grad.view(alpha.shape).to(alpha.dtype)
        results.append(scalar_grad)
    return results


def _backward_group(
    call: CallContext,
    group: slice,
    inputs: Sequence[Tensor],
    heads: HeadTensors,
    grads: Sequence[Tensor],
    scalar_grads: HeadGradients,
) -> None:
    """Compute one group's part of the gradients `grads` (B·H, N, D) and `scalar_grads`."""
    loaded = call.load_inputs(group, inputs)
    outputs = call.select(group, grads)
    buffers = call.output_buffers(outputs)
    if call.spec.joint:
        JointAttention(call, group, heads.select(group)).backward(loaded, buffers, scalar_grads)
    else:
        if call.spec.lln_weight:
            LLNAttention(call, group, heads.select(group)).backward(loaded, buffers, scalar_grads)
        else:
            for buffer in buffers:
                buffer.zero_()
        if call.spec.diag_weight:
            BlockDiagAttention(call, group).backward(loaded, buffers)
    call.store_outputs(buffers, outputs)


def empty_results(q: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
    """Return uninitialized tensors for the gradients of q, k and v, in their own memory layouts where possible."""
    return [fresh_result(x) for x in (q, k, v)]


def empty_saved(q: Tensor, spec: HybridSpec) -> Sequence[Tensor]:
    """Return uninitialized tensors for L (B·H, 1, D) and S (B·H, D, D) in the compute dtype of q.

    For the joint form, max_j β k_j and Σ_j exp(β k_j - max), both (B·H, 1, D), follow. L is max + log Σ.
    """
    batch, heads, _, dim = q.shape
    shapes = [(1, dim), (dim, dim)]
    if spec.joint:
        shapes += [(1, dim), (1, dim)]
    return [torch.empty(batch * heads, *shape, dtype=compute_dtype(q.dtype), device=q.device) for shape in shapes]


def match_moments(q: Tensor, k: Tensor, mask: Tensor | None, table: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Compute α and β (B, H) by moment matching; see `Backend.match_moments`."""
    return match_moments_pytorch(q, k, mask, table=table)


def _zeros_per_head(call: CallContext) -> Tensor:
    """Return zeros (B·H, 1, 1) in the compute dtype."""
    return torch.zeros(call.heads, 1, 1, dtype=call.scratch.dtype, device=call.scratch.device)


def _flatten_heads(*tensors: Tensor) -> list[Tensor]:
    """Merge batch and heads of each tensor: (B, H, N, D) becomes (B·H, N, D), a view if the strides allow it."""
    return [x.flatten(0, 1) for x in tensors]
