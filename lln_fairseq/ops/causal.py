"""Causal LLN attention: every token sees itself and those before it, in time linear in N.

With x = α q, y = β k, and M_id = max_{j <= i} y_jd the running maximum of every feature,

    out_i = Σ_{j <= i} Σ_d e^{x_id + y_jd - ρ_i} v_j / the same sum without v_j        ρ_i = max_d (x_id + M_id)

The tokens are taken piece by piece. A piece of C tokens sees those before it through a state: R, the M of the last of
them, and S_d = Σ_j e^{y_jd - R_d} (v_j, 1). Its own tokens it sees through the C x C matrix of e^{x + r - ρ} times
e^{y - r}, with r the M of its first row. The first factor is at most 1; the second is at most e^MAX_RISE, since a piece
in which M rises by more is cut into smaller ones, and within one token nothing rises. So a huge key costs the rows
before it no digit, and the result is exact for all keys. For the backward pass N / C states are kept, not N.

Backward: with K_ijd = e^{x_id + y_jd - ρ_i} and g_i = (do_i, -do_i · out_i) / the divisor,
dx_id = Σ_j K_ijd g_i · (v_j, 1),  dy_jd = Σ_i K_ijd g_i · (v_j, 1),  (dv_j, .) = Σ_id K_ijd g_i.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lln_fairseq.ops.autograd import differentiable_gradients
from lln_fairseq.ops.backends import is_traced_or_transformed
from lln_fairseq.ops.dtypes import compute_dtype, without_autocast
from lln_fairseq.ops.padding import clear_padding

# Tokens of a piece: on a CPU what the cache holds, elsewhere fewer launches.
PIECE, PIECE_ELSEWHERE = 64, 256
# e^20 times what a piece adds up of values up to 1e28 is below e^88, float32's largest number.
MAX_RISE = 20.0


class CausalState(NamedTuple):
    """What tokens leave to those after them: R (B, H, 1, D), -inf before the first key, and S (B, H, D, D + 1)."""

    maximum: Tensor
    sums: Tensor


def empty_state(x: Tensor) -> CausalState:
    """The state before the first token of x (B, H, N, D)."""
    batch, heads, _, dim = x.shape
    return CausalState(x.new_full((batch, heads, 1, dim), -math.inf), x.new_zeros(batch, heads, dim, dim + 1))


def causal_attention(x: Tensor, y: Tensor, v: Tensor) -> Tensor:
    """Causal LLN attention of x = α q, y = β k and v (B, H, N, D), all in float32 or float64.

    A key of -inf in all features is padding; a row that sees no other gives 0. Differentiable any number of times.
    Raises: ValueError where operations are recorded: where pieces end depends on the numbers.
    """
    if is_traced_or_transformed(x, y, v):
        raise ValueError("what records or imitates torch's operations cannot follow causal attention")
    return CausalFunction.apply(x, y, v)


@torch.no_grad()
@without_autocast
def continue_causal(x: Tensor, y: Tensor, v: Tensor, state: CausalState) -> tuple[Tensor, CausalState]:
    """`causal_attention` of tokens after those that the state stands for, and the state after them; no gradients."""
    pieces = list(_pieces(x, y, v, _cuts(y, state), state))
    return torch.cat([v[:, :, :0], *(part for part, *_ in pieces)], dim=2), pieces[-1][-1] if pieces else state


def scaled(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """x, y, v as `causal_attention` takes them, for α and β that broadcast to (B, H, N), mask bool (B, N) or None."""
    dtype = compute_dtype(q.dtype)
    q, k, v = clear_padding(q.to(dtype), k.to(dtype), v.to(dtype), mask)
    x, y = alpha[..., None] * q, beta[..., None] * k
    return x, y if mask is None else y.masked_fill(mask[:, None, :, None], -math.inf), v


class CausalFunction(torch.autograd.Function):
    """Saved for the backward pass: the inputs, the result, ρ and the divisor (B, H, N, 1), and the state before every
    piece."""

    @staticmethod
    @without_autocast
    def forward(ctx: Any, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        state = empty_state(x)
        out = torch.empty_like(x)
        row, divisor = torch.empty_like(x[..., :1]), torch.empty_like(x[..., :1])
        ctx.cuts, states = _cuts(y, state), list[Tensor]()
        for cut, (*parts, after) in zip(ctx.cuts, _pieces(x, y, v, ctx.cuts, state), strict=True):
            for whole, part in zip((out, row, divisor), parts, strict=True):
                whole[:, :, slice(*cut)] = part
            states += state
            state = after
        ctx.save_for_backward(x, y, v, out, row, divisor, *states)
        return out

    @staticmethod
    @without_autocast
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y, v, *saved = ctx.saved_tensors
        if torch.is_grad_enabled():  # somebody wants to differentiate the gradients

            def formula(x: Tensor, y: Tensor, v: Tensor) -> Tensor:
                return torch.cat([part for part, *_ in _pieces(x, y, v, ctx.cuts, empty_state(x))], dim=2)

            return tuple(differentiable_gradients(formula, (x, y, v), ctx.needs_input_grad, grad))
        return _backward(x, y, v, saved, ctx.cuts, grad)


def _cuts(y: Tensor, state: CausalState) -> list[tuple[int, int]]:
    """Where pieces begin and end: in none of them the running maximum of a feature rises by more than MAX_RISE."""
    size, length = PIECE if y.device.type == "cpu" else PIECE_ELSEWHERE, y.shape[2]
    cuts = [(start, min(start + size, length)) for start in range(0, length, size)]
    while any(too_far := _rises_too_far(y, state.maximum, cuts)):
        cuts = [half for cut, far in zip(cuts, too_far, strict=True) for half in (_halves(*cut) if far else (cut,))]
    return cuts


def _halves(start: int, stop: int) -> Sequence[tuple[int, int]]:
    middle = (start + stop) // 2
    return (start, middle), (middle, stop)


def _rises_too_far(y: Tensor, before: Tensor, cuts: Sequence[tuple[int, int]]) -> list[bool]:
    """Of every piece; what is no number rises nowhere. Waits for the device, once."""
    if not cuts:
        return []
    y = y.detach()
    tops = torch.stack([before, *(y[:, :, start:stop].amax(dim=2, keepdim=True) for start, stop in cuts)])
    maxima = tops.cummax(dim=0).values
    firsts = torch.stack([y[:, :, start : start + 1] for start, _ in cuts])
    rise = maxima[1:] - maxima[:-1].maximum(firsts)
    return (rise > MAX_RISE).flatten(1).any(dim=1).tolist()


def _pieces(
    x: Tensor, y: Tensor, v: Tensor, cuts: Sequence[tuple[int, int]], state: CausalState
) -> Iterator[tuple[Tensor, Tensor, Tensor, CausalState]]:
    """Result, ρ, divisor, and the state after it, of every piece."""
    for start, stop in cuts:
        piece = _piece(x[:, :, start:stop], y[:, :, start:stop], v[:, :, start:stop], state)
        yield piece
        state = piece[-1]


def _piece(x: Tensor, y: Tensor, v: Tensor, state: CausalState) -> tuple[Tensor, Tensor, Tensor, CausalState]:
    """Maxima have no gradient: the result does not depend on them."""
    values = F.pad(v, (0, 1), value=1.0)
    maxima = y.detach().cummax(dim=2).values.maximum(state.maximum)
    first, last = maxima[:, :, :1], maxima[:, :, -1:]
    row = (x.detach() + maxima).amax(dim=-1, keepdim=True)
    row = row.masked_fill(row == -math.inf, math.inf)  # without a key: e^-inf = 0
    b, w, before = _factors(x, y, row, first, state)
    total = (b @ w.mT).tril() @ values + b @ before
    divisor = total[..., -1:].masked_fill(row == math.inf, 1.0)
    after = _decay(first, last) * (before + w.mT @ values)
    return total[..., :-1] / divisor, row, divisor, CausalState(last, after)


def _factors(x: Tensor, y: Tensor, row: Tensor, first: Tensor, state: CausalState) -> tuple[Tensor, Tensor, Tensor]:
    """e^{x + r - row}, e^{y - r}, and the state's sums with r instead of R."""
    r = _finite(first)
    return (x + (r - row)).exp(), (y - r).exp(), _decay(state.maximum, first) * state.sums


def _decay(old: Tensor, new: Tensor) -> Tensor:
    """e^{old - new} of maxima (B, H, 1, D), old <= new, as it multiplies sums (B, H, D, D + 1)."""
    return (old - _finite(new)).exp().mT


def _finite(maximum: Tensor) -> Tensor:
    """Without a key there is nothing to be scaled."""
    return maximum.masked_fill(maximum == -math.inf, 0.0)


def _backward(
    x: Tensor, y: Tensor, v: Tensor, saved: Sequence[Tensor], cuts: Sequence[tuple[int, int]], grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x, y and v, from the last piece to the first; `later` is that of the state between two."""
    results = dx, dy, dv = torch.empty_like(x), torch.empty_like(y), torch.empty_like(v)
    out, row, divisor, *states = saved
    maxima, sums, later = states[::2], states[1::2], empty_state(x).sums
    for index in reversed(range(len(cuts))):
        piece = slice(*cuts[index])
        state = CausalState(maxima[index], sums[index])
        first = y[:, :, piece.start : piece.start + 1].maximum(state.maximum)
        b, w, before = _factors(x[:, :, piece], y[:, :, piece], row[:, :, piece], first, state)
        values, do = F.pad(v[:, :, piece], (0, 1), value=1.0), grad[:, :, piece] / divisor[:, :, piece]
        g = torch.cat([do, -(do * out[:, :, piece]).sum(dim=-1, keepdim=True)], dim=-1)
        if index + 1 < len(cuts):
            later = _decay(first, maxima[index + 1]) * later
        slopes = (g @ values.mT).tril()
        dx[:, :, piece] = b * (g @ before.mT + slopes @ w)
        dy[:, :, piece] = w * (slopes.mT @ b + values @ later.mT)
        dv[:, :, piece] = (b @ w.mT).tril().mT @ do + w @ later[..., :-1]
        later = _decay(state.maximum, first) * (later + b.mT @ g)
    return results
