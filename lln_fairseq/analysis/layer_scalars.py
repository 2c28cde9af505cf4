"""The six numbers that say how concentrated a layer's attention is, read off while it runs."""

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

# In the order of the vectors below. τ_lln, α and β are NaN for an attention without them.
NAMES = ("sigma_q", "sigma_k", "tau_sm", "tau_lln", "alpha", "beta")


@torch.no_grad()
def layer_scalars(attention: Attention, q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
    """Return the means over sequences and heads, in the order of NAMES.

    τ_sm = 1/(σ_q σ_k)   the temperature of softmax attention, eq. 5
    τ_lln = 1/σ_lln      the same for LLN attention with α, β (B, H), eq. 11 (concentration.py)

    Where several workers hold the sequences together, these are the values of the whole sequences.

    Args:
        attention: the mechanism, with α and β or without
        q: queries (B, H, N, D)
        k: keys (B, H, N, D)
        key_padding_mask: bool (B, N), True = padded
    Returns: (6,) float32
    """
    exchange = create_exchange(attention.group, q)
    sigma_q, sigma_k = standard_deviations((q, k), key_padding_mask, exchange=exchange)
    alpha_beta = attention.alpha_beta(q, k, key_padding_mask)
    if alpha_beta is None:
        rest = [torch.full_like(sigma_q, torch.nan)] * 3
    else:
        alpha, beta = alpha_beta
        sigma_tilde2 = (alpha * sigma_q).square() + (beta * sigma_k).square()
        rest = [lln_log_variance(sigma_tilde2, q.shape[-1], attention.constants).rsqrt(), alpha, beta]
    values = torch.stack([sigma_q, sigma_k, 1 / (sigma_q * sigma_k), *rest])
    return values.mean(dim=(1, 2)).float()


def queries_keys_mask(attention: Attention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """q, k and the mask of a call of the attention, whichever of them it gives by keyword."""
    call = inspect.signature(attention.forward).bind(*args, **kwargs)
    call.apply_defaults()
    q, k, _, mask, *_ = call.arguments.values()
    return q, k, mask


@contextmanager
def observe(model: nn.Module) -> Iterator[list[Tensor]]:
    """Within it every call of an attention of the model adds its `layer_scalars` to the list, in the order of calls."""
    seen: list[Tensor] = []

    def look(module: Attention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(layer_scalars(module, *queries_keys_mask(module, args, kwargs)))

    hooks = [m.register_forward_pre_hook(look, with_kwargs=True) for m in model.modules() if isinstance(m, Attention)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
