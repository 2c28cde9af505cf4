"""Measure σ_q, σ_k, temperatures, α and β of a layer's attention while the model runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lln_fairseq.analysis.concentration import lln_log_variance
from lln_fairseq.attention import NO_CONTEXT, Attention, Context
from lln_fairseq.ops.formula import standard_deviations

# The order of the six scalars in the vectors of this module.
NAMES = ("sigma_q", "sigma_k", "tau_sm", "tau_lln", "alpha", "beta")


@torch.no_grad()
def layer_scalars(attention: Attention, q: Tensor, k: Tensor, context: Context = NO_CONTEXT) -> Tensor:
    """Return six scalars of an attention (6,), float32, each averaged over the sequences of the batch and the heads.

    In the order of NAMES, they are:

    σ_q, σ_k    standard deviations of the queries and of the keys
    τ_sm        1/(σ_q σ_k), the temperature of softmax attention with these queries and keys (eq. 5)
    τ_lln       1/σ_lln, the temperature of LLN attention with these queries and keys (eq. 11, see `lln_log_variance`)
    α, β        the factors of LLN attention

    τ_lln, α and β are NaN for a mechanism that contains no LLN attention.
    """
    sigma_q = standard_deviations(q, context.padding)
    sigma_k = standard_deviations(k, context.padding)
    alpha_beta = attention.alpha_beta(q, k, context)
    if alpha_beta is None:
        alpha = torch.full_like(sigma_q, torch.nan)
        beta = alpha
        tau_lln = alpha
    else:
        alpha, beta = alpha_beta
        sigma_tilde2 = (alpha * sigma_q).square() + (beta * sigma_k).square()
        tau_lln = lln_log_variance(sigma_tilde2, q.shape[-1], attention.constants).rsqrt()
    values = torch.stack([sigma_q, sigma_k, 1 / (sigma_q * sigma_k), tau_lln, alpha, beta])
    return values.mean(dim=(1, 2)).float()


@contextmanager
def observe(model: nn.Module) -> Iterator[list[list[Tensor]]]:
    """Compute the `layer_scalars` of every attention that the model calls inside the `with` block.

    The list that is yielded has an empty list for each attention of the model, in the order of the layers. Each call
    appends one vector (6,) to the list of its attention. An attention can be called twice, for two towers or by the
    backward pass with activation checkpointing, or not at all, because of LayerDrop.
    """
    observed: list[list[Tensor]] = []
    hooks = []
    for module in model.modules():
        if isinstance(module, Attention):
            calls: list[Tensor] = []
            observed.append(calls)
            hooks.append(module.register_forward_pre_hook(partial(_append_scalars, calls)))
    try:
        yield observed
    finally:
        for hook in hooks:
            hook.remove()


def _append_scalars(calls: list[Tensor], attention: Attention, inputs: tuple[Any, ...]) -> None:
    q, k, _, *context = inputs
    calls.append(layer_scalars(attention, q, k, *context))
