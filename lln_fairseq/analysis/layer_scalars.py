"""Measure σ_q, σ_k, temperatures, α and β of a layer's attention while the model runs."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lln_fairseq.analysis.concentration import lln_log_variance
from lln_fairseq.attention import Attention
from lln_fairseq.ops.exchange import create_exchange
from lln_fairseq.ops.moment_matching import standard_deviations

# The order of the six scalars in the vectors of this module.
NAMES = ("sigma_q", "sigma_k", "tau_sm", "tau_lln", "alpha", "beta")


@torch.no_grad()
def layer_scalars(attention: Attention, q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
    """Return six scalars of an attention, each averaged over the sequences of the batch and the heads.

    In the order of NAMES, they are:

    σ_q, σ_k    standard deviations of the queries and of the keys
    τ_sm        1/(σ_q σ_k), the temperature of softmax attention with these queries and keys (eq. 5)
    τ_lln       1/σ_lln, the temperature of LLN attention with these queries and keys (eq. 11, see `lln_log_variance`)
    α, β        the factors of LLN attention

    τ_lln, α and β are NaN for a mechanism that contains no LLN attention. If several workers share the sequences
    (`attention.group`), all of them must make the call. Each worker then gets the result for the whole sequences.

    Args:
        attention: the mechanism.
        q, k: (B, H, N, D).
        key_padding_mask: bool (B, N), True = padded, or None.

    Returns: (6,) in float32.
    """
    exchange = create_exchange(attention.group, q)
    sigma_q, sigma_k = standard_deviations((q, k), key_padding_mask, exchange=exchange)
    alpha_beta = attention.alpha_beta(q, k, key_padding_mask)
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


def queries_keys_mask(attention: Attention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return (q, k, key_padding_mask) from the arguments of a call attention(*args, **kwargs). The mask may be None."""
    call = inspect.signature(attention.forward).bind(*args, **kwargs)
    call.apply_defaults()
    q, k, _, mask, *_ = call.arguments.values()
    return q, k, mask


@contextmanager
def observe(model: nn.Module) -> Iterator[list[Tensor]]:
    """Compute the `layer_scalars` of every attention that the model calls inside the `with` block.

    Yields: a list, empty at first. Each call of an attention appends one vector (6,) to it.
    """
    observed: list[Tensor] = []

    def append_scalars(module: Attention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        observed.append(layer_scalars(module, *queries_keys_mask(module, args, kwargs)))

    hooks = []
    for module in model.modules():
        if isinstance(module, Attention):
            hooks.append(module.register_forward_pre_hook(append_scalars, with_kwargs=True))
    try:
        yield observed
    finally:
        for hook in hooks:
            hook.remove()
