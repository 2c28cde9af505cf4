"""The Triton backend: LLN and LLN+Diag attention and moment matching on a GPU. This module launches the kernels.

The functions never wait for the device, and the launches depend only on shapes, so CUDA graphs can capture them. A long
sequence is divided into splits, one program for each. Their number depends only on N and D, so that the result for a
sequence does not depend on the rest of the batch.

The state of the keys is the tensors maximum, log_total and S that device.py defines. maximum and log_total are (B H, D)
in float32, with logarithms in base 2. S is (B H, D, D) in the dtype of q.
"""

import math
from collections.abc import Sequence
from typing import Any

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
    aligned,
    chunk_options,
    device_of,
    kernel_options,
    mask_bytes,
    reason_against,
    split_tokens,
    strides,
    workspace,
)
from lln_fairseq.ops.backends.triton.moment_kernels import _moments_combine_kernel, _moments_kernel
from lln_fairseq.ops.backends.triton.output_kernels import _output_kernel
from lln_fairseq.ops.backends.triton.state_kernels import _combine_state_kernel, _state_kernel
from lln_fairseq.ops.exchange import Exchange
from lln_fairseq.ops.formula import AVERAGE, JOINT, LLN, WEIGHTS, Inputs, Spec, count_global_keys
from lln_fairseq.ops.moment_matching import calibration_table

__all__ = ["allocate", "backward", "forward", "match_moments", "reason_against"]

StateTensors = tuple[Tensor, Tensor, Tensor]
Arguments = dict[str, Any]


def allocate(spec: Spec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """See `Backend.allocate`."""
    return [torch.empty_like(x) for x in aligned(q, k, v)], _empty_state(q)


def _empty_state(q: Tensor, dtype: torch.dtype | None = None) -> StateTensors:
    """Return uninitialized tensors for the state. S gets the dtype, by default that of q."""
    bh = q.shape[0] * q.shape[1]
    dim = q.shape[3]
    return workspace(q, bh, dim), workspace(q, bh, dim), q.new_empty(bh, dim, dim, dtype=dtype)


def forward(
    spec: Spec, inputs: Inputs, exchange: Exchange | None = None
) -> tuple[Tensor, Tensor, Tensor, Sequence[Tensor]]:
    """See `Backend.forward`. The kernels read or write N x D numbers per head 4 times, or 6 times with blocks."""
    alpha = inputs.alpha
    beta = inputs.beta
    if alpha is None or beta is None:
        table = calibration_table(inputs.q.shape[-1], inputs.q.device)
        alpha, beta = match_moments(inputs.q, inputs.k, inputs.padding, table)
    q, k, v = aligned(*inputs[:3])
    call = _call_arguments(spec, inputs._replace(q=q, k=k, v=v, alpha=alpha, beta=beta))
    out = torch.empty_like(q)
    with device_of(q):
        if exchange is None:
            state = _compute_state(call, _empty_state(q))
        else:
            state = _exchange_state(call, exchange)
        grid, options = chunk_options(q, "output", spec, inputs.padding is not None)
        _output_kernel[grid](**call, **_state_arguments(state), out=out, **strides(out, "s_out"), **options)
    return out, alpha, beta, state


def _call_arguments(spec: Spec, inputs: Inputs) -> Arguments:
    """Return the arguments that the kernels over chunks have in common. q, k and v must have common strides."""
    q, k, v, alpha, beta, offset, *_ = inputs
    assert alpha is not None
    assert beta is not None
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "padding": mask_bytes(inputs.padding),
        "num_padding": None,
        "num_global": None,
        "alpha": alpha.contiguous(),
        "beta": beta.contiguous(),
        "offset": None if offset is None else offset.contiguous(),
        "seed": inputs.seed,
        "H": q.shape[1],
        "N": q.shape[2],
        **strides(q),
    }
    if spec.form == JOINT:
        if inputs.padding is not None:
            arguments["num_padding"] = inputs.padding.sum(dim=-1, dtype=torch.int32)
        if count_global_keys(spec.max_global, q.shape[2], spec.block_size):
            arguments["num_global"] = inputs.global_counts
    return arguments


def _select(arguments: Arguments, *names: str) -> Arguments:
    return {name: arguments[name] for name in names}


def _state_arguments(state: Sequence[Tensor]) -> Arguments:
    return dict(zip(("maximum", "log_total", "S"), state, strict=True))


def _compute_state(call: Arguments, state: StateTensors) -> StateTensors:
    """Compute the state of the keys, and return the tensors in `state`, which are overwritten."""
    k = call["k"]
    batch, heads, length, dim = k.shape
    bh = batch * heads
    splits, tokens = split_tokens(length, dim)
    parts = state
    if splits > 1:
        parts = (workspace(k, bh, splits, dim), workspace(k, bh, splits, dim), workspace(k, bh, splits, dim, dim))
    _state_kernel[bh, splits](
        **_select(call, "k", "v", "padding", "beta", "s_b", "s_h", "s_n", "H", "N"),
        **_state_arguments(parts),
        T=tokens,
        FINAL=splits == 1,
        **kernel_options(k, "state", call["padding"] is not None),
    )
    if splits > 1:
        _combine_state_kernel[bh, dim * dim // 256](*parts, *state, splits, D=dim, COLS=256, num_warps=4)
    return state


def _exchange_state(call: Arguments, exchange: Exchange) -> StateTensors:
    """Return the state over the keys of all workers.

    The workers exchange three float32 tensors: the maximum in base e, the total, and S.
    """
    k = call["k"]
    padding = call["padding"]
    maximum, log_total, state = _compute_state(call, _empty_state(k, torch.float32))
    total = log_total.exp2()
    if padding is not None:
        # The total must be 0 for a sequence that is all padding, but the kernel stores log_total = 0.
        total *= padding.eq(0).any(dim=1).repeat_interleave(k.shape[1])[:, None]
    maximum, total, state = exchange.merge_states(maximum * math.log(2), total, state)
    return maximum / math.log(2), total.log2().nan_to_num(neginf=0.0), state.to(k.dtype)


def backward(
    spec: Spec,
    inputs: Inputs,
    saved: Sequence[Tensor],
    grad: Tensor,
    needed: Sequence[bool],
    exchange: Exchange | None = None,
) -> Sequence[Tensor | None]:
    """See `Backend.backward`. The kernels read or write N x D numbers per head 7, 9 (blocks) or 13 times (joint)."""
    q, k, v = aligned(*inputs[:3])
    if grad.stride(-1) != 1:  # an expanded gradient, such as that of .sum()
        grad = grad.contiguous()
    dq = torch.empty_like(q)
    dk = torch.empty_like(k)
    dv = torch.empty_like(v)
    call = {
        **_call_arguments(spec, inputs._replace(q=q, k=k, v=v)),
        **_state_arguments(saved),
        "do": grad,
        "query_stats": None,
        **strides(grad, "s_do"),
        **strides(dq, "s_out"),
    }
    with device_of(q):
        if spec.form == LLN:
            g, grad_state, dalpha = _compute_grad_state(spec, call, exchange, dq, needed[0])
            _, dbeta, _ = _launch_backward("keys", spec, call, needed, dk=dk, dv=dv, g=g, dS=grad_state)
            return dq, dk, dv, dalpha, dbeta, None
        if spec.form == AVERAGE:
            g, grad_state, _ = _compute_grad_state(spec, call, exchange)
            scalars = _launch_backward("both", spec, call, needed, dq=dq, dk=dk, dv=dv, g=g, dS=grad_state)
            return dq, dk, dv, *scalars
        call["query_stats"] = workspace(q, 6, q.shape[0] * q.shape[1], q.shape[2])
        dalpha, _, doffset = _launch_backward("queries", spec, call, needed, dq=dq)
        g, grad_state, _ = _compute_grad_state(spec, call, exchange)
        _, dbeta, _ = _launch_backward("keys", spec, call, needed, dk=dk, dv=dv, g=g, dS=grad_state)
        return dq, dk, dv, dalpha, dbeta, doffset


def _launch_backward(
    passes: str, spec: Spec, call: Arguments, needed: Sequence[bool], **tensors: Tensor
) -> list[Tensor | None]:
    """Launch _backward_kernel for the passes "queries", "keys" or "both".

    Returns: the gradients of α, β and the offset, (B, H) float32. Each is None if it is not needed, or if these passes
        do not compute it.
    """
    q = call["q"]
    batch, heads, length, _ = q.shape
    grid, options = chunk_options(q, passes, spec, call["padding"] is not None)
    settings = options["META"]
    has_queries = passes != "keys"
    has_keys = passes != "queries"
    arguments = {**call, **dict.fromkeys(("dq", "dk", "dv", "g", "dS", "global_sums")), **tensors}
    arguments.update(num_splits=0, max_rows=0)
    if passes == "both" and settings.chunk > settings.rows:  # the statistics of the queries do not fit in one tile
        arguments["query_stats"] = workspace(q, 2, batch * heads, length)
    if has_keys and settings.has_global:
        arguments.update(_sum_global_keys(spec, call, options))
    # Each program writes its term of these gradients.
    terms: list[Tensor | None] = []
    for is_needed, is_computed in zip(needed, (has_queries, has_keys, has_queries and spec.form == JOINT), strict=True):
        terms.append(workspace(q, *grid) if is_needed and is_computed else None)
    arguments.update(zip(("dalpha", "dbeta", "doffset"), terms, strict=True))
    _backward_kernel[grid](**arguments, QUERIES=has_queries, KEYS=has_keys, **options)
    return [_sum_programs(x, batch, heads) for x in terms]


def _sum_global_keys(spec: Spec, call: Arguments, options: Arguments) -> Arguments:
    """Compute what the queries of later chunks add to the gradients of the global keys.

    `options` are those of the launch of _backward_kernel for the keys. Returns: arguments of that launch.
    """
    q = call["q"]
    batch, heads, length, dim = q.shape
    settings = options["META"]
    chunks = math.ceil(count_global_keys(spec.max_global, length, spec.block_size) / settings.chunk)
    splits, tokens = split_tokens(length, dim)
    max_rows = chunks * settings.chunk
    global_sums = workspace(q, batch * heads, splits, 3, max_rows, dim)
    names = (
        "q",
        "k",
        "v",
        "do",
        "padding",
        "num_global",
        "alpha",
        "beta",
        "seed",
        "maximum",
        "log_total",
        "query_stats",
    )
    _global_keys_kernel[batch * heads, splits, chunks](
        **_select(call, *names, "s_b", "s_h", "s_n", "s_do_b", "s_do_h", "s_do_n", "H", "N"),
        global_sums=global_sums,
        T=tokens,
        **{**options, "META": settings._replace(block=settings.chunk, has_global=False)},
    )
    return {"global_sums": global_sums, "num_splits": splits, "max_rows": max_rows}


def _compute_grad_state(
    spec: Spec, call: Arguments, exchange: Exchange | None, dq: Tensor | None = None, needs_alpha: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute the sums over the queries that backward_kernels.py defines; with an exchange, over those of all workers.

    Only for LLN, dq is a tensor to be overwritten with the gradient of q.

    Returns: g (B H, D) in float32, state_scale · dS / total (B H, D, D) in the dtype of q, and the gradient of α if it
        is needed. The first two are multiplied by the weight of LLN.
    """
    q = call["q"]
    batch, heads, length, dim = q.shape
    bh = batch * heads
    splits, tokens = split_tokens(length, dim)
    g = workspace(q, bh, dim)
    grad_state = torch.empty_like(call["S"])
    dalpha = workspace(q, bh, splits) if needs_alpha else None
    final = splits == 1 and exchange is None
    parts = (g, grad_state)
    if not final:
        parts = (workspace(q, bh, splits, dim), workspace(q, bh, splits, dim, dim))
    names = ("q", "do", "padding", "alpha", "maximum", "log_total", "S", "query_stats", "H", "N")
    _grad_state_kernel[bh, splits](
        **_select(call, *names, "s_b", "s_h", "s_n", "s_do_b", "s_do_h", "s_do_n", "s_out_b", "s_out_h", "s_out_n"),
        g=parts[0],
        dS=parts[1],
        dq=dq,
        dalpha=dalpha,
        T=tokens,
        FINAL=final,
        **kernel_options(q, "grad_state", call["padding"] is not None, spec.form),
    )
    if exchange is not None:
        # The sum over the splits and the workers takes the place of a single split.
        grad_state_sum, g_sum = exchange.sum(parts[1].sum(dim=1), parts[0].sum(dim=1))
        parts = (g_sum, grad_state_sum)
        splits = 1
    if not final:
        weight, _ = WEIGHTS[spec.form]
        _combine_grad_state_kernel[bh, dim * dim // 256](
            *parts, call["log_total"], call["S"], g, grad_state, length, splits, weight, D=dim, COLS=256, num_warps=4
        )
    return g, grad_state, _sum_programs(dalpha, batch, heads)


def _sum_programs(terms: Tensor | None, batch: int, heads: int) -> Tensor | None:
    """Sum the terms (B H, programs) of the programs, always in the same order. None stays None."""
    if terms is None:
        return None
    return terms.sum(-1).view(batch, heads)


def match_moments(q: Tensor, k: Tensor, padding: Tensor | None, table: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Compute α = σ̃ / (√2 σ_q) and β = σ̃ / (√2 σ_k) by moment matching; see `Backend.match_moments`.

    σ_q and σ_k are the population standard deviations over the features and the tokens of a sequence and head, without
    padding tokens; at least 1e-6. log σ̃² is interpolated linearly at log s with s = σ_q² σ_k². Outside the table, the
    nearest segment continues, up to log σ̃² = 24.

    Args:
        q, k: (B, H, N, D) with any strides.
        padding: bool (B, N), True = padded, or None.
        table: ascending log s and log σ̃², both (T,) with T >= 2. They are copied to the device of q if necessary.

    Returns: α and β, both (B, H) in float32, without gradient.
    """
    q, k = aligned(q, k)
    padding = mask_bytes(padding)
    batch, heads, length, dim = q.shape
    splits, tokens = split_tokens(length, dim)
    table = [x.to(device=q.device, dtype=torch.float32).contiguous() for x in table]
    size = len(table[0])
    size_2 = triton.next_power_of_2(size)
    alpha = workspace(q, batch, heads)
    beta = workspace(q, batch, heads)
    part = None
    if splits > 1:
        part = workspace(q, 5, batch * heads, splits)
    with device_of(q):
        _moments_kernel[batch * heads, splits](
            q,
            k,
            padding,
            *table,
            part,
            alpha,
            beta,
            **strides(q),
            H=heads,
            N=length,
            T=tokens,
            SIZE=size,
            SIZE_2=size_2,
            FINAL=splits == 1,
            **kernel_options(q, "moments", padding is not None),
        )
        if splits > 1:
            _moments_combine_kernel[(batch * heads,)](
                part,
                *table,
                alpha,
                beta,
                splits,
                SPLITS_2=triton.next_power_of_2(splits),
                SIZE=size,
                SIZE_2=size_2,
                num_warps=1,
            )
    return alpha, beta
