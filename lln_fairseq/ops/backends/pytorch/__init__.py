"""Hybrid attention in PyTorch, with a backward pass in closed form, one group of heads after another.

This backend runs on every device and dtype. For a group of G heads, tensors are contiguous, (G, N, D), in the compute
dtype, and the padding is bool (G, N) or None. The backward pass needs q, k, v and, for each head, L (D) and the state
S (D × D), which lln.py defines. It recomputes everything else. The joint form (ops/joint.py) also needs the maximum and
the sum from which L is computed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lln_fairseq.ops.backends import HybridSpec
from lln_fairseq.ops.backends.pytorch.block_diag import BlockDiagPasses
from lln_fairseq.ops.backends.pytorch.call_context import CallContext, HeadGradients, HeadTensors
from lln_fairseq.ops.backends.pytorch.joint import JointPasses
from lln_fairseq.ops.backends.pytorch.lln import LLNPasses
from lln_fairseq.ops.backends.pytorch.sharded import sharded_backward, sharded_forward
from lln_fairseq.ops.dtypes import compute_dtype
from lln_fairseq.ops.layout import fresh_result
from lln_fairseq.ops.moment_matching import calibration_table, match_moments_pytorch


def is_supported(q: Tensor, block_size: int | None = None, max_global_tokens: int = 0) -> str | None:
    """Return None: this backend supports everything."""
    return None


def draw_seed(device: torch.device) -> int:
    """Draw a seed from torch's global CPU generator, whatever the device is.

    So torch.manual_seed and activation checkpointing reproduce the seed.
    """
    return int(torch.randint(2**31 - 1, (), device="cpu"))


def forward(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor | None, beta: Tensor | None, mask: Tensor | None, spec: HybridSpec
) -> tuple[Tensor, Tensor, Tensor, Sequence[Tensor]]:
    """Compute hybrid attention; see `Backend.forward`.

    Returns: the output, α, β, and the tensors that `empty_saved` describes.
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
    """Compute the output of one group of heads, and the tensors that the backward pass needs.

    Args:
        group: the slice of the heads.
        inputs: q, k and v of all heads, (B·H, N, D).
        heads: the tensors of all heads. For the heads of the group, all of them except alpha, beta and offset are
            overwritten, unless lln_weight is 0.
        out: (B·H, N, D). The rows of the group are overwritten.
    """
    loaded = call.load_inputs(group, inputs)
    outputs = call.select(group, [out])
    buffers = call.output_buffers(outputs)
    if call.spec.joint:
        JointPasses(call, group, heads.select(group)).forward(loaded, buffers[0])
    else:
        if call.spec.lln_weight:
            LLNPasses(call, group, heads.select(group)).forward(loaded, buffers[0])
        else:
            buffers[0].zero_()
        if call.spec.diag_weight:
            BlockDiagPasses(call, group).forward(loaded, buffers[0])
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
    """Compute the gradients of q, k, v, α, β and the offset of the mix, in this order.

    `needed` has three entries, for α, β and the offset. A gradient that is not needed can be None. `Backend.backward`
    explains the arguments.
    """
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
    """Compute the gradients of one group of heads.

    Args:
        group: the slice of the heads.
        inputs: q, k, v and the gradient of the output of all heads, (B·H, N, D).
        heads: the tensors of all heads, as the forward pass left them.
        grads: three tensors for the gradients of q, k and v, (B·H, N, D). The rows of the group are overwritten.
        scalar_grads: the gradients of the scalars of all heads. The entries of the group are overwritten.
    """
    loaded = call.load_inputs(group, inputs)
    outputs = call.select(group, grads)
    buffers = call.output_buffers(outputs)
    if call.spec.joint:
        JointPasses(call, group, heads.select(group)).backward(loaded, buffers, scalar_grads)
    else:
        if call.spec.lln_weight:
            LLNPasses(call, group, heads.select(group)).backward(loaded, buffers, scalar_grads)
        else:
            for buffer in buffers:
                buffer.zero_()
        if call.spec.diag_weight:
            BlockDiagPasses(call, group).backward(loaded, buffers)
    call.store_outputs(buffers, outputs)


def empty_results(q: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
    """Return uninitialized tensors for the gradients of q, k and v, with the layouts of q, k and v where possible."""
    return [fresh_result(x) for x in (q, k, v)]


def empty_saved(q: Tensor, spec: HybridSpec) -> Sequence[Tensor]:
    """Return uninitialized tensors for L (B·H, 1, D) and S (B·H, D, D), in the compute dtype of q.

    For the joint form, two more tensors (B·H, 1, D) follow: the maximum max_j β k_j and the sum Σ_j exp(β k_j -
    maximum), for which L = maximum + log sum.
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
    """Return zeros (B·H, 1, 1) in the compute dtype, on the device of the call."""
    return torch.zeros(call.heads, 1, 1, dtype=call.scratch.dtype, device=call.scratch.device)


def _flatten_heads(*tensors: Tensor) -> list[Tensor]:
    """Reshape each tensor (B, H, N, D) to (B·H, N, D). The result is a view if the strides allow it."""
    return [x.flatten(0, 1) for x in tensors]
