"""Hybrid attention in PyTorch for a sequence whose tokens are on several workers.

Each pass loops twice over the groups of heads: before and after the workers exchange their sums (ops/exchange.py). The
first loop of the forward pass reads the keys and values, and the first loop of the backward pass the queries.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lln_fairseq.ops.backends import WEIGHTS
from lln_fairseq.ops.backends.pytorch.block_diag import BlockDiagPasses
from lln_fairseq.ops.backends.pytorch.call_context import CallContext, HeadGradients, HeadTensors
from lln_fairseq.ops.backends.pytorch.lln import LLNPasses
from lln_fairseq.ops.exchange import Exchange


def sharded_forward(
    call: CallContext, inputs: Sequence[Tensor], heads: HeadTensors, out: Tensor, exchange: Exchange
) -> None:
    """Compute the output of this worker's tokens.

    Args:
        inputs: q, k and v of this worker's tokens, (B·H, N, D).
        heads: the tensors of all heads. log_sum and state are overwritten with their values over the keys of all
            workers.
        out: (B·H, N, D), is overwritten.
    """
    key_max = torch.empty_like(heads.log_sum)
    key_sum = torch.empty_like(heads.log_sum)
    for group in call.groups:
        _, k, v = call.load_inputs(group, inputs)
        key_max[group], key_sum[group] = LLNPasses(call, group, heads.select(group)).sum_keys(k, v)
    key_max, key_sum, state = exchange.merge_states(key_max[:, 0], key_sum[:, 0], heads.state)
    heads.state.copy_(state)
    torch.add(key_max[:, None], key_sum[:, None].clamp_min(1.0).log(), out=heads.log_sum)
    for group in call.groups:
        loaded = call.load_inputs(group, inputs)
        outputs = call.select(group, [out])
        buffers = call.output_buffers(outputs)
        LLNPasses(call, group, heads.select(group)).answer_queries(loaded[0], buffers[0])
        if WEIGHTS[call.spec.form][1] and call.length:
            BlockDiagPasses(call, group).forward(loaded, buffers[0])
        call.store_outputs(buffers, outputs)


def sharded_backward(
    call: CallContext,
    inputs: Sequence[Tensor],
    heads: HeadTensors,
    grads: Sequence[Tensor],
    scalar_grads: HeadGradients,
    exchange: Exchange,
) -> None:
    """Compute the gradients of this worker's tokens, and this worker's terms of the gradients of α and β.

    Args:
        inputs: q, k, v and the gradient of the output, (B·H, N, D).
        heads: the tensors of all heads, as the forward pass left them.
        grads: three tensors (B·H, N, D), which are overwritten with the gradients of q, k and v.
        scalar_grads: the gradients of the scalars. Those of α and β are overwritten if they are not None.
    """
    grad_state = torch.empty_like(heads.state)
    g = torch.empty_like(heads.log_sum)
    for group in call.groups:
        q, _, _, grad_out = call.load_inputs(group, inputs)
        outputs = call.select(group, grads[:1])
        buffers = call.output_buffers(outputs)
        lln = LLNPasses(call, group, heads.select(group))
        grad_state[group], g[group] = lln.queries_backward(q, grad_out, buffers[0], scalar_grads.alpha)
        call.store_outputs(buffers, outputs)
    grad_state, g = exchange.sum(grad_state, g)
    for group in call.groups:
        loaded = call.load_inputs(group, inputs)
        outputs = call.select(group, grads)
        buffers = call.output_buffers(outputs)
        lln = LLNPasses(call, group, heads.select(group))
        lln.keys_backward(loaded[1], loaded[2], grad_state[group], g[group], buffers[1:], scalar_grads.beta)
        # The first loop has already computed the gradient of q: the block-diagonal part is added to it.
        buffers[0] = call.scratch.load("result0", outputs[0])
        if WEIGHTS[call.spec.form][1] and call.length:
            BlockDiagPasses(call, group).backward(loaded, buffers)
        call.store_outputs(buffers, outputs)
