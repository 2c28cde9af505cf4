"""Causal LLN attention: every token attends to itself and to earlier tokens, in time linear in N.

Let x = α q and y = β k, and let M_id = max_{j <= i} y_jd be the running maximum of feature d. Then

    out_i = Σ_{j <= i} Σ_d e^{x_id + y_jd - ρ_i} v_j / divisor_i
    divisor_i = Σ_{j <= i} Σ_d e^{x_id + y_jd - ρ_i}                    ρ_i = max_d (x_id + M_id)

The tokens are processed in pieces of C consecutive tokens. A piece sees the tokens before it only as a state:

    R_d = M_d at the last token before the piece          S_d = Σ_j e^{y_jd - R_d} (v_j, 1) over the tokens j before it

where (v_j, 1) is v_j with a 1 appended. The piece's own tokens contribute through a C x C matrix, the product of the
factors e^{x + r - ρ} and e^{y - r}, where r is M at the first row of the piece. The first factor is at most 1. The
second factor is at most e^MAX_RISE, because a piece in which M rises by more than MAX_RISE is halved until it does not;
M cannot rise inside a piece of one token. So a huge key does not reduce the precision of the rows before it. The
backward pass needs one state for each piece, not for each token.

Backward pass: let do be the gradient of out, K_ijd = e^{x_id + y_jd - ρ_i} and g_i = (do_i, -do_i · out_i) / divisor_i.
Then dx_id = Σ_j K_ijd g_i · (v_j, 1) and dy_jd = Σ_i K_ijd g_i · (v_j, 1), and dv_j is Σ_id K_ijd g_i without its last
number.
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

PIECE = 64  # tokens in a piece on a CPU, so that the matrices of a piece fit in the cache
PIECE_ELSEWHERE = 256  # tokens in a piece on other devices, where each kernel launch costs time
# A piece can multiply a sum by e^20. For values up to 1e28 the product stays below 3.4e38, float32's largest number.
MAX_RISE = 20.0


class CausalState(NamedTuple):
    """The sums over the earlier tokens that later tokens need.

    maximum: the running maximum R, (B, H, 1, D); -inf as long as all keys were padding.
    sums: S, (B, H, D, D + 1). The last column is the sum for the divisor.
    """

    maximum: Tensor
    sums: Tensor


class _Piece(NamedTuple):
    """The results for one piece of C tokens."""

    out: Tensor  # (B, H, C, D)
    row_max: Tensor  # ρ, (B, H, C, 1); inf for a row that sees only padding
    divisor: Tensor  # (B, H, C, 1); 1 for a row that sees only padding
    state: CausalState  # after the piece


def empty_state(x: Tensor) -> CausalState:
    """Return the state before the first token: the maximum is -inf and the sums are 0.

    x (B, H, N, D) only decides the sizes B, H and D, the dtype and the device.
    """
    batch, heads, _, dim = x.shape
    return CausalState(x.new_full((batch, heads, 1, dim), -math.inf), x.new_zeros(batch, heads, dim, dim + 1))


def causal_attention(x: Tensor, y: Tensor, v: Tensor) -> Tensor:
    """Compute causal LLN attention from x = α q and y = β k. It can be differentiated any number of times.

    Args:
        x, y, v: (B, H, N, D), all in float32 or all in float64. A key with y = -inf in all features is padding.

    Returns: (B, H, N, D) in the dtype of the inputs; 0 in a row that sees only padding.
    Raises: ValueError if operations are traced or transformed, because the lengths of the pieces depend on the values
        of y.
    """
    if is_traced_or_transformed(x, y, v):
        raise ValueError("causal attention cannot be traced, compiled or transformed: its pieces depend on the keys")
    return CausalFunction.apply(x, y, v)


@torch.no_grad()
@without_autocast
def continue_causal(x: Tensor, y: Tensor, v: Tensor, state: CausalState) -> tuple[Tensor, CausalState]:
    """Compute `causal_attention` for new tokens after the tokens that a state summarizes, without gradients.

    Args:
        x, y, v: of the new tokens only, (B, H, N, D); N may be 0.
        state: the state after the earlier tokens. It is not changed.

    Returns: the output of the new tokens, (B, H, N, D), and the state after them.
    """
    pieces = list(_pieces(x, y, v, _cuts(y, state), state))
    if pieces:
        state = pieces[-1].state
    empty = v[:, :, :0]  # the result for no tokens
    return torch.cat([empty, *(piece.out for piece in pieces)], dim=2), state


def scale_inputs(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the arguments x = α q, y = β k and v of `causal_attention`.

    Args:
        q, k, v: (B, H, N, D).
        alpha, beta: tensors that broadcast to (B, H, N).
        mask: bool (B, N), True = padded, or None.

    Returns: three tensors (B, H, N, D) in float64 if q is float64, otherwise in float32. For padding tokens, x is
        finite, y = -inf and v = 0.
    """
    dtype = compute_dtype(q.dtype)
    q, k, v = clear_padding(q.to(dtype), k.to(dtype), v.to(dtype), mask)
    x = alpha[..., None] * q
    y = beta[..., None] * k
    if mask is not None:
        y = y.masked_fill(mask[:, None, :, None], -math.inf)
    return x, y, v


class CausalFunction(torch.autograd.Function):
    """Causal LLN attention with a backward pass in closed form.

    For the backward pass it saves the inputs, the output, ρ and the divisor of every row, both (B, H, N, 1), and the
    state before every piece.
    """

    @staticmethod
    @without_autocast
    def forward(ctx: Any, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        state = empty_state(x)
        out = torch.empty_like(x)
        row_max = torch.empty_like(x[..., :1])
        divisor = torch.empty_like(x[..., :1])
        ctx.cuts = _cuts(y, state)
        states: list[Tensor] = []
        for (start, stop), piece in zip(ctx.cuts, _pieces(x, y, v, ctx.cuts, state), strict=True):
            out[:, :, start:stop] = piece.out
            row_max[:, :, start:stop] = piece.row_max
            divisor[:, :, start:stop] = piece.divisor
            states += state
            state = piece.state
        ctx.save_for_backward(x, y, v, out, row_max, divisor, *states)
        return out

    @staticmethod
    @without_autocast
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradients of x, y and v. With create_graph=True, they can be differentiated again."""
        x, y, v, *saved = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return _backward(x, y, v, saved, ctx.cuts, grad)

        def formula(x: Tensor, y: Tensor, v: Tensor) -> Tensor:
            return torch.cat([piece.out for piece in _pieces(x, y, v, ctx.cuts, empty_state(x))], dim=2)

        return tuple(differentiable_gradients(formula, (x, y, v), ctx.needs_input_grad, grad))


def _cuts(y: Tensor, state: CausalState) -> list[tuple[int, int]]:
    """Divide the tokens into pieces in which no running maximum rises by more than MAX_RISE.

    At first, every piece has PIECE tokens on a CPU and PIECE_ELSEWHERE tokens on other devices; the last piece may be
    shorter. Then a piece in which a maximum rises too far is halved, as often as necessary.

    Args:
        y: (B, H, N, D).
        state: the state before the first of these tokens.

    Returns: (start, stop) of every piece, in ascending order; an empty list for N = 0.
    """
    size = PIECE if y.device.type == "cpu" else PIECE_ELSEWHERE
    length = y.shape[2]
    cuts = [(start, min(start + size, length)) for start in range(0, length, size)]
    while True:
        too_far = _rises_too_far(y, state.maximum, cuts)
        if not any(too_far):
            return cuts
        halved = []
        for (start, stop), must_halve in zip(cuts, too_far, strict=True):
            if must_halve:
                middle = (start + stop) // 2
                halved += [(start, middle), (middle, stop)]
            else:
                halved.append((start, stop))
        cuts = halved


def _rises_too_far(y: Tensor, before: Tensor, cuts: Sequence[tuple[int, int]]) -> list[bool]:
    """Return True for every piece in which a running maximum rises by more than MAX_RISE after the first row.

    A rise from -inf to a finite value counts as infinite, and a maximum that stays -inf counts as no rise. The host
    waits for the device once.

    Args:
        y: (B, H, N, D).
        before: the running maximum before the first piece, (B, H, 1, D).
        cuts: (start, stop) of the pieces. No piece may be empty.
    """
    if not cuts:
        return []
    y = y.detach()
    piece_maxima = [y[:, :, start:stop].amax(dim=2, keepdim=True) for start, stop in cuts]
    maxima = torch.stack([before, *piece_maxima]).cummax(dim=0).values
    first_rows = torch.stack([y[:, :, start : start + 1] for start, _ in cuts])
    rise = maxima[1:] - maxima[:-1].maximum(first_rows)
    return (rise > MAX_RISE).flatten(1).any(dim=1).tolist()


def _pieces(x: Tensor, y: Tensor, v: Tensor, cuts: Sequence[tuple[int, int]], state: CausalState) -> Iterator[_Piece]:
    """Yield the results of the pieces in order. Each piece continues from the state that the previous piece left.

    Args:
        x, y, v: (B, H, N, D).
        cuts: (start, stop) of every piece.
        state: the state before the first piece.
    """
    for start, stop in cuts:
        piece = _piece(x[:, :, start:stop], y[:, :, start:stop], v[:, :, start:stop], state)
        yield piece
        state = piece.state


def _piece(x: Tensor, y: Tensor, v: Tensor, state: CausalState) -> _Piece:
    """Compute the results for one piece of C tokens.

    They are differentiable. Gradients do not flow through the maxima, because the output does not depend on them. A row
    that sees only padding gets ρ = inf and the divisor 1, so that its output is 0.

    Args:
        x, y, v: of the tokens of the piece, (B, H, C, D).
        state: the state before the piece.
    """
    values = F.pad(v, (0, 1), value=1.0)
    maxima = y.detach().cummax(dim=2).values.maximum(state.maximum)
    first_max = maxima[:, :, :1]
    last_max = maxima[:, :, -1:]
    row_max = (x.detach() + maxima).amax(dim=-1, keepdim=True)
    row_max = row_max.masked_fill(row_max == -math.inf, math.inf)  # a row that sees only padding: e^-inf = 0
    b, w, before = _factors(x, y, row_max, first_max, state)
    total = (b @ w.mT).tril() @ values + b @ before
    divisor = total[..., -1:].masked_fill(row_max == math.inf, 1.0)
    after = CausalState(last_max, _decay(first_max, last_max) * (before + w.mT @ values))
    return _Piece(total[..., :-1] / divisor, row_max, divisor, after)


def _factors(
    x: Tensor, y: Tensor, row_max: Tensor, first_max: Tensor, state: CausalState
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the factors e^{x + r - ρ} and e^{y - r} of a piece, and the sums of the state relative to r instead of R.

    Args:
        x, y: (B, H, C, D).
        row_max: ρ, (B, H, C, 1). Where it is inf, the first factor is 0.
        first_max: r, the running maximum at the first row of the piece, (B, H, 1, D). Where it is -inf, r = 0.
        state: the state before the piece.

    Returns: both factors, (B, H, C, D), and the sums Σ_j e^{y_j - r} (v_j, 1) over the tokens before the piece,
        (B, H, D, D + 1).
    """
    r = _finite(first_max)
    return (x + (r - row_max)).exp(), (y - r).exp(), _decay(state.maximum, first_max) * state.sums


def _decay(old: Tensor, new: Tensor) -> Tensor:
    """Return e^{old - new}, the factor that turns sums relative to the maximum `old` into sums relative to `new`.

    Args:
        old, new: maxima, (B, H, 1, D), with old <= new.

    Returns: (B, H, D, 1), so that it multiplies the rows of the sums; 0 where `old` is -inf.
    """
    return (old - _finite(new)).exp().mT


def _finite(maximum: Tensor) -> Tensor:
    """Return the maximum with 0 in place of -inf, which is the maximum if all keys were padding."""
    return maximum.masked_fill(maximum == -math.inf, 0.0)


def _backward(
    x: Tensor, y: Tensor, v: Tensor, saved: Sequence[Tensor], cuts: Sequence[tuple[int, int]], grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, y and v, all (B, H, N, D). They are computed from the last piece to the first.

    Args:
        x, y, v: (B, H, N, D).
        saved: the output, ρ and the divisor, and then for every piece the maximum and the sums of the state before the
            piece, as one flat list.
        cuts: (start, stop) of every piece.
        grad: the gradient of the output, (B, H, N, D).
    """
    dx = torch.empty_like(x)
    dy = torch.empty_like(y)
    dv = torch.empty_like(v)
    out, row_max, divisor, *states = saved
    maxima = states[::2]
    sums = states[1::2]
    grad_sums = empty_state(x).sums  # the gradient of the state's sums after the piece
    for index in reversed(range(len(cuts))):
        piece = slice(*cuts[index])
        state = CausalState(maxima[index], sums[index])
        first_max = y[:, :, piece.start : piece.start + 1].maximum(state.maximum)
        b, w, before = _factors(x[:, :, piece], y[:, :, piece], row_max[:, :, piece], first_max, state)
        values = F.pad(v[:, :, piece], (0, 1), value=1.0)
        do = grad[:, :, piece] / divisor[:, :, piece]
        g = torch.cat([do, -(do * out[:, :, piece]).sum(dim=-1, keepdim=True)], dim=-1)
        if index + 1 < len(cuts):
            grad_sums = _decay(first_max, maxima[index + 1]) * grad_sums
        grad_weights = (g @ values.mT).tril()
        dx[:, :, piece] = b * (g @ before.mT + grad_weights @ w)
        dy[:, :, piece] = w * (grad_weights.mT @ b + values @ grad_sums.mT)
        dv[:, :, piece] = (b @ w.mT).tril().mT @ do + w @ grad_sums[..., :-1]
        grad_sums = _decay(state.maximum, first_max) * (grad_sums + b.mT @ g)
    return dx, dy, dv
