"""The Triton backend: LLN and LLN+Diag attention and moment matching on a GPU. This module launches the kernels.

The functions never wait for the device, and the launches depend only on shapes, so CUDA graphs can capture them. A long
sequence is divided into splits, one program for each. Their number depends only on N and D, so that the result for a
sequence does not depend on the rest of the batch.

The state of the keys is the tensors maximum, log_total and S that device.py defines. maximum and log_total are (B H, D)
in float32, with logarithms in base 2. S is (B H, D, D) in the dtype of q.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lln_fairseq.ops.backends.triton.global_rows import (
    attend_from_global_tokens,
    empty_rows,
    global_rows_backward,
)
from lln_fairseq.ops.backends.triton.launch import device_of, launch_kernel, mask_bytes, reason_against, workspace
from lln_fairseq.ops.backends.triton.plan import (
    SplitPlan,
    have_common_strides,
    layout_of,
    plan_backward,
    plan_forward,
    plan_moments,
)
from lln_fairseq.ops.formula import DIAG, JOINT, LLN, Inputs, Spec
from lln_fairseq.ops.moment_matching import calibration_table

__all__ = ["allocate", "backward", "forward", "match_moments", "reason_against"]

StateTensors = tuple[Tensor, Tensor, Tensor]


def allocate(spec: Spec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """See `Backend.allocate`."""
    results = [q, k, v]
    if not have_common_strides(q.shape, [x.stride() for x in results]):
        results = [x.contiguous() for x in results]
    state = () if spec.form == DIAG else _empty_state(q)
    return [torch.empty_like(x) for x in results], (*state, *empty_rows(spec, q))


def _empty_state(q: Tensor) -> StateTensors:
    """Return uninitialized tensors for the state."""
    bh = q.shape[0] * q.shape[1]
    dim = q.shape[3]
    return workspace(q, bh, dim), workspace(q, bh, dim), q.new_empty(bh, dim, dim)


def forward(spec: Spec, inputs: Inputs) -> tuple[Tensor, Tensor | None, Tensor | None, Sequence[Tensor]]:
    """See `Backend.forward`. The kernels read or write N x D numbers per head 4 times, or 6 with LLN and blocks."""
    q, k, v, alpha, beta, offset, padding, counts, seed = inputs
    if spec.form != DIAG and (alpha is None or beta is None):
        table = calibration_table(q.shape[-1], q.device)
        alpha, beta = match_moments(q, k, padding, table)
    alpha_beta = (_dense(alpha), _dense(beta))
    offset = _dense(offset)
    padding = mask_bytes(padding)
    layout = layout_of(q, k, v, *alpha_beta, offset, padding, counts, seed)
    plan = plan_forward(spec, layout)
    if plan.is_copied:
        q = q.contiguous()
        k = k.contiguous()
        v = v.contiguous()
    out = torch.empty_like(q)
    state: Sequence[Tensor] = ()
    rows: Sequence[Tensor] = ()
    with device_of(q):
        if plan.state is not None:
            state = _compute_state(plan.state, k, v, padding, alpha_beta[1])
        if counts is not None:
            rows = attend_from_global_tokens(spec, inputs, out)
        num_padding = _count_padding(spec, padding)
        state_arguments = state or (None, None, None)
        tensors = (q, k, v, padding, num_padding, counts, *alpha_beta, offset, seed, *state_arguments)
        launch_kernel(plan.output, *tensors, out)  # which overwrites the rows of tokens that are not global
    return out, alpha, beta, (*state, *rows)


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _count_padding(spec: Spec, padding: Tensor | None) -> Tensor | None:
    """Return the number of padding tokens of every sequence, (B,), or None if it is not needed."""
    if spec.form != JOINT or padding is None:
        return None
    return padding.sum(dim=-1, dtype=torch.int32)


def _compute_state(plan: SplitPlan, k: Tensor, v: Tensor, padding: Tensor | None, beta: Tensor | None) -> StateTensors:
    """Compute the state of the keys."""
    state = _empty_state(k)
    parts = state
    if plan.combine is not None:
        bh = k.shape[0] * k.shape[1]
        dim = k.shape[3]
        splits = plan.splits
        parts = (workspace(k, bh, splits, dim), workspace(k, bh, splits, dim), workspace(k, bh, splits, dim, dim))
    launch_kernel(plan.kernel, k, v, padding, beta, *parts)
    if plan.combine is not None:
        launch_kernel(plan.combine, *parts, *state)
    return state


def backward(
    spec: Spec,
    inputs: Inputs,
    saved: Sequence[Tensor],
    grad: Tensor,
    needed: Sequence[bool],
) -> Sequence[Tensor | None]:
    """See `Backend.backward`.

    The kernels read or write N x D numbers per head 7 times (LLN, Diag), 9 times (average) or 13 times (joint).
    """
    q, k, v, alpha, beta, offset, padding, counts, seed = inputs
    if grad.stride(-1) != 1:  # an expanded gradient, such as that of .sum()
        grad = grad.contiguous()
    state: Sequence[Any] = saved[:3]
    rows = saved[3:]
    if spec.form == DIAG:
        state = (None, None, None)
        rows = saved
        alpha = None
        beta = None
    alpha_beta = (_dense(alpha), _dense(beta))
    offset = _dense(offset)
    padding = mask_bytes(padding)
    layout = layout_of(q, k, v, *alpha_beta, offset, padding, counts, seed, *state, grad)
    plan = plan_backward(spec, layout, tuple(needed))
    if plan.is_copied:
        q = q.contiguous()
        k = k.contiguous()
        v = v.contiguous()
    batch, heads, length, dim = q.shape
    dq = torch.empty_like(q)
    dk = torch.empty_like(k)
    dv = torch.empty_like(v)
    query_stats = None
    if plan.stats:
        query_stats = workspace(q, plan.stats, batch * heads, length)
    g = None
    grad_state = None
    global_sums = None
    dalpha = workspace(q, *plan.alpha_terms) if plan.alpha_terms else None
    dbeta = workspace(q, *plan.beta_terms) if plan.beta_terms else None
    doffset = workspace(q, *plan.offset_terms) if plan.offset_terms else None
    with device_of(q):
        tensors = (q, k, v, grad, padding, _count_padding(spec, padding), counts, *alpha_beta, offset, seed, *state)
        if plan.queries is not None:
            launch_kernel(plan.queries, *tensors, None, None, query_stats, None, dq, None, None, dalpha, None, doffset)
        if plan.grad_state is not None:
            g = workspace(q, batch * heads, dim)
            grad_state = torch.empty_like(state[2])
            results = (dq, dalpha) if spec.form == LLN else (None, None)
            inner = (q, grad, padding, counts, alpha_beta[0], *state, query_stats if spec.form == JOINT else None)
            _compute_grad_state(plan.grad_state, inner, state, g, grad_state, results)
        if plan.global_keys is not None:
            global_sums = workspace(q, *plan.global_sums)
            inner = (q, k, v, grad, padding, counts, *alpha_beta, seed, *state[:2], query_stats)
            launch_kernel(plan.global_keys, *inner, global_sums)
        if plan.queries is None and spec.form != LLN:
            launch_kernel(plan.keys, *tensors, g, grad_state, query_stats, None, dq, dk, dv, dalpha, dbeta, None)
        else:
            launch_kernel(plan.keys, *tensors, g, grad_state, query_stats, global_sums, None, dk, dv, None, dbeta, None)
        if counts is not None:
            global_rows_backward(spec, inputs, rows, grad, (dq, dk, dv))
    return dq, dk, dv, *(_sum_programs(x, batch, heads) for x in (dalpha, dbeta, doffset))


def _compute_grad_state(
    plan: SplitPlan,
    tensors: Sequence[Tensor | None],
    state: Sequence[Tensor],
    g: Tensor,
    grad_state: Tensor,
    results: tuple[Tensor | None, Tensor | None],
) -> None:
    """Compute the sums over the queries that backward_kernels.py defines.

    Args:
        tensors: the inputs of the kernel.
        g, grad_state: outputs. g is (B H, D) in float32, grad_state is state_scale · dS / total (B H, D, D) in the
            dtype of q. Both are multiplied by the weight of LLN.
        results: outputs, dq and the terms of the gradient of α; None if they are not computed here.
    """
    parts = (g, grad_state)
    if plan.combine is not None:
        bh, dim = g.shape
        parts = (workspace(g, bh, plan.splits, dim), workspace(g, bh, plan.splits, dim, dim))
    launch_kernel(plan.kernel, *tensors, *parts, *results)
    if plan.combine is not None:
        launch_kernel(plan.combine, *parts, *state[1:], g, grad_state)


def _sum_programs(terms: Tensor | None, batch: int, heads: int) -> Tensor | None:
    """Sum the terms (B H, programs) of the programs, always in the same order. None stays None."""
    if terms is None:
        return None
    return terms.sum(-1).view(batch, heads)


def match_moments(q: Tensor, k: Tensor, padding: Tensor | None, table: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Compute α = σ̃ / (√2 σ_q) and β = σ̃ / (√2 σ_k) by moment matching; see `Backend.match_moments`.

    σ_q and σ_k are the population standard deviations over the features and the tokens of a sequence and head, without
    padding tokens; at least MIN_SIGMA. log σ̃² is interpolated linearly at log s with s = σ_q² σ_k². Outside the table,
    the nearest segment continues, up to LOG_SIGMA2_LIMIT.

    Args:
        q, k: (B, H, N, D) with any strides.
        padding: bool (B, N), True = padded, or None.
        table: ascending log s and log σ̃², both (T,) with T >= 2. They are copied to the device of q if necessary.

    Returns: α and β, both (B, H) in float32, without gradient.
    """
    log_s, log_sigma2 = table
    if log_s.device != q.device or log_s.dtype != torch.float32:
        log_s = log_s.to(device=q.device, dtype=torch.float32)
        log_sigma2 = log_sigma2.to(device=q.device, dtype=torch.float32)
    padding = mask_bytes(padding)
    is_copied, plan = plan_moments(layout_of(q, k, padding, log_s, log_sigma2), log_s.shape[0])
    if is_copied:
        q = q.contiguous()
        k = k.contiguous()
    batch, heads, _, _ = q.shape
    alpha = workspace(q, batch, heads)
    beta = workspace(q, batch, heads)
    part = None
    if plan.combine is not None:
        part = workspace(q, 5, batch * heads, plan.splits)
    with device_of(q):
        launch_kernel(plan.kernel, q, k, padding, log_s, log_sigma2, part, alpha, beta)
        if plan.combine is not None:
            launch_kernel(plan.combine, part, log_s, log_sigma2, alpha, beta)
    return alpha, beta
