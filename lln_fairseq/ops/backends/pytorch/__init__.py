"""Hybrid attention in PyTorch, with a backward pass in closed form, one group of heads after another.

This backend runs on every device and dtype. For a group of G heads, tensors are contiguous, (G, N, D), in the compute
dtype, and the padding is bool (G, N) or None. The backward pass needs q, k, v and, for each head, L (D) and the state
S (D × D), which lln.py defines. It recomputes everything else. The joint form (ops/joint.py) also needs the maximum and
the sum from which L is computed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lln_fairseq.ops.backends import AVERAGE, DIAG, JOINT, Inputs, Spec
from lln_fairseq.ops.backends.pytorch.block_diag import BlockDiagPasses
from lln_fairseq.ops.backends.pytorch.call_context import CallContext, HeadGradients, HeadTensors
from lln_fairseq.ops.backends.pytorch.joint import JointPasses
from lln_fairseq.ops.backends.pytorch.lln import LLNPasses
from lln_fairseq.ops.backends.pytorch.sharded import sharded_backward, sharded_forward
from lln_fairseq.ops.dispatch import fresh_result
from lln_fairseq.ops.dtypes import compute_dtype
from lln_fairseq.ops.exchange import Exchange
from lln_fairseq.ops.moment_matching import calibration_table, match_moments_pytorch


def reason_against(spec: Spec, q: Tensor) -> str | None:
    """Return None: this backend supports everything."""
    return None


def allocate(spec: Spec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """See `Backend.allocate`."""
    return [fresh_result(x) for x in (q, k, v)], _empty_sums(spec, q)


def _empty_sums(spec: Spec, q: Tensor) -> Sequence[Tensor]:
    """Return uninitialized tensors for L (B·H, 1, D) and S (B·H, D, D), in the compute dtype of q; none without LLN.

    For the joint form, two more tensors (B·H, 1, D) follow: the maximum max_j β k_j and the sum Σ_j exp(β k_j -
    maximum), for which L = maximum + log sum.
    """
    if spec.form == DIAG:
        return ()
    batch, heads, _, dim = q.shape
    shapes = [(1, dim), (dim, dim)]
    if spec.form == JOINT:
        shapes += [(1, dim), (1, dim)]
    return [torch.empty(batch * heads, *shape, dtype=compute_dtype(q.dtype), device=q.device) for shape in shapes]


def forward(
    spec: Spec, inputs: Inputs, exchange: Exchange | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None, Sequence[Tensor]]:
    """See `Backend.forward`."""
    q, k, v, alpha, beta, *_ = inputs
    if spec.matched:
        alpha, beta = match_moments(q, k, inputs.padding, calibration_table(q.shape[-1], q.device))
    call = CallContext(spec, inputs)
    out = fresh_result(q)
    saved = _empty_sums(spec, q)
    heads = call.head_tensors(alpha, beta, saved)
    flat_out = out.flatten(0, 1)
    flat_inputs = [x.flatten(0, 1) for x in (q, k, v)]
    if exchange is not None:
        assert heads is not None
        sharded_forward(call, flat_inputs, heads, flat_out, exchange)
    else:
        for group in call.groups:
            _forward_group(call, group, flat_inputs, heads, flat_out)
    return out, alpha, beta, saved


def _forward_group(
    call: CallContext, group: slice, inputs: Sequence[Tensor], heads: HeadTensors | None, out: Tensor
) -> None:
    """Compute the output of one group of heads, and the tensors that the backward pass needs.

    Args:
        group: the slice of the heads.
        inputs: q, k and v of all heads, (B·H, N, D).
        heads: the tensors of all heads, None without LLN. For the heads of the group, all of them except alpha, beta
            and offset are overwritten.
        out: (B·H, N, D). The rows of the group are overwritten.
    """
    loaded = call.load_inputs(group, inputs)
    outputs = call.select(group, [out])
    buffers = call.output_buffers(outputs)
    if heads is None:
        buffers[0].zero_()
        BlockDiagPasses(call, group).forward(loaded, buffers[0])
    elif call.spec.form == JOINT:
        JointPasses(call, group, heads.select(group)).forward(loaded, buffers[0])
    else:
        LLNPasses(call, group, heads.select(group)).forward(loaded, buffers[0])
        if call.spec.form == AVERAGE:
            BlockDiagPasses(call, group).forward(loaded, buffers[0])
    call.store_outputs(buffers, outputs)


def backward(
    spec: Spec,
    inputs: Inputs,
    saved: Sequence[Tensor],
    grad: Tensor,
    needed: Sequence[bool],
    exchange: Exchange | None = None,
) -> Sequence[Tensor | None]:
    """See `Backend.backward`."""
    q, k, v, alpha, beta, *_ = inputs
    call = CallContext(spec, inputs)
    grads = [fresh_result(x) for x in (q, k, v)]
    scalars: list[Tensor | None] = []
    for is_needed in needed:
        empty = torch.zeros(call.heads, 1, 1, dtype=call.scratch.dtype, device=q.device)
        scalars.append(empty if is_needed else None)
    scalar_grads = HeadGradients(*scalars)
    heads = call.head_tensors(alpha, beta, saved)
    flat_inputs = [x.flatten(0, 1) for x in (q, k, v, grad)]
    flat_grads = [x.flatten(0, 1) for x in grads]
    if exchange is not None:
        assert heads is not None
        sharded_backward(call, flat_inputs, heads, flat_grads, scalar_grads, exchange)
    else:
        for group in call.groups:
            _backward_group(call, group, flat_inputs, heads, flat_grads, scalar_grads)
    results: list[Tensor | None] = [*grads]
    for scalar_grad in scalar_grads:
        if scalar_grad is not None:
            scalar_grad = scalar_grad.view(q.shape[:2])
        results.append(scalar_grad)
    return results


def _backward_group(
    call: CallContext,
    group: slice,
    inputs: Sequence[Tensor],
    heads: HeadTensors | None,
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
    if heads is None:
        for buffer in buffers:
            buffer.zero_()
        BlockDiagPasses(call, group).backward(loaded, buffers)
    elif call.spec.form == JOINT:
        JointPasses(call, group, heads.select(group)).backward(loaded, buffers, scalar_grads)
    else:
        LLNPasses(call, group, heads.select(group)).backward(loaded, buffers, scalar_grads)
        if call.spec.form == AVERAGE:
            BlockDiagPasses(call, group).backward(loaded, buffers)
    call.store_outputs(buffers, outputs)


def match_moments(q: Tensor, k: Tensor, padding: Tensor | None, table: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """See `Backend.match_moments`."""
    return match_moments_pytorch(q, k, padding, table=table)
