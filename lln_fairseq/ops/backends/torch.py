"""Hybrid attention in PyTorch on every device and dtype: formula.py for a group of heads after another, and gradients.

The gradients of LLN, and their notation, are those of head_groups.py. For the joint form (formula.py), let M be the
part of P inside the block, O = A S - M v_b, E = do v_bᵀ, de_i = Σ_j Diag_ij E_ij, oe_i = do_i O_i and c' = dc/du, where
the index b stands for the rows of a block. The gradients are

    du = c' oe - (c + c' u) de        dDiag = (1 - c u) E         dM = -(c E + du)
    dA = c do Sᵀ + dM W_b             dS = Aᵀ (c do)              dv = W dS + ((1 - c u) Diag - c M)ᵀ do
    dx = A (dA - δ), δ = Σ_d A dA     g = Σ_i A δ                 dy = W (v dSᵀ + dMᵀ A_b - g)

The gradient of P is c E outside the block and, because u = 1 - Σ_j M_ij, -du inside the block. It is computed as the
sum of c E for all keys, which needs only the state, and dM inside the block.

The rows of the global queries are softmax over all keys. In the backward pass, the gradient of the output of these rows
is 0 for the blocks.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lln_fairseq.ops import formula
from lln_fairseq.ops.backends import keep_threshold
from lln_fairseq.ops.dispatch import fresh_result
from lln_fairseq.ops.formula import (
    DIAG,
    FLOOR,
    JOINT,
    WEIGHTS,
    BlockKinds,
    Heads,
    Inputs,
    KeySums,
    Spec,
    compute_dtype,
    outside_divisor,
    outside_mass,
    outside_weight,
)
from lln_fairseq.ops.head_groups import (
    empty_sums,
    head_groups,
    join_heads,
    keys_backward,
    load_gradient,
    queries_backward,
    select_sums,
    softmax_backward,
    store_sums,
    with_joined_heads,
    write_group,
)
from lln_fairseq.ops.moment_matching import calibration_table, match_moments_pytorch


def reason_against(spec: Spec, q: Tensor) -> str | None:
    """Return None: this backend supports everything."""
    return None


def allocate(spec: Spec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """See `Backend.allocate`."""
    sums = () if spec.form == DIAG else empty_sums(q, q.shape[-1])
    return [fresh_result(x) for x in (q, k, v)], sums


def forward(spec: Spec, inputs: Inputs) -> tuple[Tensor, Tensor | None, Tensor | None, Sequence[Tensor]]:
    """See `Backend.forward`. It saves the sums over the keys."""
    if spec.form != DIAG and inputs.alpha is None:
        table = calibration_table(inputs.q.shape[-1], inputs.q.device)
        alpha, beta = match_moments(inputs.q, inputs.k, inputs.padding, table)
        inputs = inputs._replace(alpha=alpha, beta=beta)
    inputs = with_joined_heads(inputs)
    out = fresh_result(inputs.q)
    sums = None if spec.form == DIAG else empty_sums(inputs.q, inputs.q.shape[-1])
    for group in _groups(spec, inputs):
        heads = formula.load_heads(spec, inputs, group)
        group_sums = None
        if sums is not None:
            group_sums = formula.sum_keys(heads)
            store_sums(group_sums, sums, group)
        drop = _Dropout(spec, inputs, group.start)
        result = formula.attend_heads(spec, heads, group_sums, drop.apply)
        if inputs.global_counts is not None:
            rows = GlobalRows(spec, inputs, heads, group)
            result[:, : rows.number] = torch.where(rows.is_global, rows.attend(), result[:, : rows.number])
        write_group(result, out, group)
    return out, inputs.alpha, inputs.beta, sums or ()


def backward(
    spec: Spec,
    inputs: Inputs,
    saved: Sequence[Tensor],
    grad: Tensor,
    needed: Sequence[bool],
) -> Sequence[Tensor | None]:
    """See `Backend.backward`."""
    results = [fresh_result(x) for x in inputs[:3]]
    inputs = with_joined_heads(inputs)
    grad = join_heads(grad)
    scalars = [inputs.q.new_zeros(inputs.q.shape[:2], dtype=compute_dtype(inputs.q.dtype)) for _ in needed]
    sums = KeySums(*saved) if saved else None
    for group in _groups(spec, inputs):
        heads = formula.load_heads(spec, inputs, group)
        do = load_gradient(grad, heads, group)
        drop = _Dropout(spec, inputs, group.start)
        row_gradients: Sequence[Tensor] = ()
        if inputs.global_counts is not None:
            rows = GlobalRows(spec, inputs, heads, group)
            row_gradients = rows.backward(do[:, : rows.number])
            do[:, : rows.number].masked_fill_(rows.is_global, 0.0)
        if spec.form == JOINT:
            assert sums is not None
            gradients = _joint_backward(heads, select_sums(sums, group), do, drop)
        else:
            gradients = _sum_backward(spec, heads, None if sums is None else select_sums(sums, group), do, drop)
        for x, row_gradient in zip(gradients, row_gradients, strict=False):
            x[:, : row_gradient.shape[1]] += row_gradient
        for x, target in zip(gradients[:3], results, strict=True):
            write_group(x, target, group)
        for x, target in zip(gradients[3:], scalars, strict=True):
            target.view(-1)[group] = x
    return *results, *(x if is_needed else None for x, is_needed in zip(scalars, needed, strict=True))


def match_moments(q: Tensor, k: Tensor, padding: Tensor | None, table: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """See `Backend.match_moments`."""
    return match_moments_pytorch(q, k, padding, table=table)


def _sum_backward(spec: Spec, heads: Heads, sums: KeySums | None, do: Tensor, drop: "_Dropout") -> list[Any]:
    """Return the gradients of q, k, v, α, β and the offset for a sum of LLN and block-diagonal softmax."""
    lln_weight, diag_weight = WEIGHTS[spec.form]
    gradients: list[Any] = [0.0] * 6
    if sums is not None:
        dx, grad_state, g = queries_backward(heads, sums, lln_weight * do)
        dy, dv = keys_backward(heads, sums, grad_state, g)
        gradients = _scale_gradients(heads, dx, dy, dv)
    if diag_weight:
        for i, x in enumerate(_diag_backward(heads, diag_weight * do, drop)):
            gradients[i] = gradients[i] + x
    return gradients


def _scale_gradients(heads: Heads, dx: Tensor, dy: Tensor, dv: Tensor) -> list[Any]:
    """Return the gradients of q, k, v, α and β, and 0 for the offset."""
    dalpha = (heads.q * dx).sum(dim=(1, 2))
    dbeta = (heads.k * dy).sum(dim=(1, 2))
    return [heads.alpha * dx, heads.beta * dy, dv, dalpha, dbeta, 0.0]


def _diag_backward(heads: Heads, do: Tensor, drop: "_Dropout") -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v of block-diagonal softmax with the gradient `do` of its output."""
    p = formula.probabilities(heads)
    dp = formula.key_products(do, heads.v, heads)
    dv = _transposed_product(drop.apply(p), do, heads)
    grad_scores = softmax_backward(drop.apply(dp), p)
    return *_scores_backward(heads, grad_scores), dv


def _scores_backward(heads: Heads, grad_scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of q and k for the gradient of q kᵀ / √D inside the blocks."""
    grad_scores = grad_scores / math.sqrt(heads.q.shape[-1])
    return formula.times_keys(grad_scores, heads.k, heads), _transposed_product(grad_scores, heads.q, heads)


def _joint_backward(heads: Heads, sums: KeySums, do: Tensor, drop: "_Dropout") -> list[Any]:
    """Return the gradients of q, k, v, α, β and the offset for the joint form."""
    a = formula.query_features(heads, sums)
    w = formula.key_features(heads, sums)
    offset = formula.block_offsets(heads)
    kinds = formula.block_kinds(heads)
    inside = formula.key_products(a, w, heads)
    u = outside_mass(inside)
    c = outside_weight(u, offset, kinds)
    c_by_u, c_by_offset = _weight_gradients(c, u, offset, kinds)
    p = formula.probabilities(heads)
    dropped_p = drop.apply(p)
    e = formula.key_products(do, heads.v, heads)
    do_state = do @ sums.state.mT  # do Sᵀ
    diag_e = torch.linalg.vecdot(dropped_p, e)[..., None]
    all_e = formula.split_blocks(torch.linalg.vecdot(a, do_state)[..., None], heads)
    outside_e = all_e - torch.linalg.vecdot(inside, e)[..., None]
    du = c_by_u * outside_e - (c + c_by_u * u) * diag_e
    dm = formula.mask_keys(-(c * e + du), heads, 0.0)
    weights = (1 - c * u) * dropped_p - c * inside
    c_rows = c.flatten(1, 2)

    da = c_rows * do_state + formula.times_keys(dm, w, heads)
    dx = softmax_backward(da, a)
    g = torch.linalg.vecdot(a, da)[:, None] @ a
    grad_state = a.mT @ (c_rows * do)
    dy = w * (heads.v @ grad_state.mT + _transposed_product(dm, a, heads) - g)
    dv = w @ grad_state + _transposed_product(weights, do, heads)
    grad_p = drop.apply((1 - c * u) * e)
    dq, dk = _scores_backward(heads, softmax_backward(grad_p, p))
    doffset = (c_by_offset * (outside_e - u * diag_e)).sum(dim=(1, 2, 3))
    lln_dq, lln_dk, dv, dalpha, dbeta, _ = _scale_gradients(heads, dx, dy, dv)
    return [lln_dq + dq, lln_dk + dk, dv, dalpha, dbeta, doffset]


def _weight_gradients(c: Tensor, u: Tensor, offset: Tensor, kinds: BlockKinds) -> tuple[Tensor, Tensor]:
    """Return the derivatives of c by u and by the offset, in the shape of u. Both are 0 where c is constant."""
    is_constant = kinds.all_keys | kinds.no_key | (outside_divisor(u, offset) <= FLOOR)
    by_u = -c.square() * (1 - (-offset).exp())
    by_offset = c * (1 - c * u)
    return by_u.masked_fill(is_constant, 0.0), by_offset.masked_fill(is_constant, 0.0)


class GlobalRows:
    """Softmax attention of the first queries of a group of heads to all keys that are not padding.

    Only the rows of global queries belong to the output; `is_global`, bool (G, number, 1), marks them.
    """

    def __init__(self, spec: Spec, inputs: Inputs, heads: Heads, group: slice) -> None:
        batch, num_heads, length, _ = inputs.q.shape
        assert inputs.global_counts is not None
        self.heads = heads
        self.number = min(spec.max_global, length)
        self.drop = _Dropout(spec, inputs, batch * num_heads + group.start)  # other factors than those of the blocks
        is_global = torch.arange(self.number, device=heads.q.device) < inputs.global_counts[:, None]
        self.is_global = formula.repeat_for_heads(is_global, num_heads)[group, :, None]

    def attend(self) -> Tensor:
        """Return the rows, (G, number, D)."""
        return self.drop.apply(self._probabilities()) @ self.heads.v

    def backward(self, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the queries (G, number, D) and of k and v (G, N, D), for that of the rows."""
        do = do.where(self.is_global, 0.0)
        p = self._probabilities()
        dv = self.drop.apply(p).mT @ do
        dp = self.drop.apply(do @ self.heads.v.mT)
        grad_scores = softmax_backward(dp, p) / math.sqrt(do.shape[-1])
        return grad_scores @ self.heads.k, grad_scores.mT @ self.heads.q[:, : self.number], dv

    def _probabilities(self) -> Tensor:
        """Return the softmax before dropout, (G, number, N); 0 for padding keys."""
        scores = self.heads.q[:, : self.number] @ self.heads.k.mT / math.sqrt(self.heads.q.shape[-1])
        if self.heads.padding is None:
            return scores.softmax(dim=-1)
        padding = self.heads.padding.mT
        p = scores.masked_fill(padding, torch.finfo(scores.dtype).min).softmax(dim=-1)
        return p.masked_fill(padding, 0.0)


class _Dropout:
    """Multiplies the probabilities of a group by the same random factors in every call.

    The factors depend on the seed of the call and on the number of the stream, so that forward and backward drop the
    same weights. The blocks of a group have the number of its first head.
    """

    def __init__(self, spec: Spec, inputs: Inputs, number: int) -> None:
        self.dropout = spec.dropout
        self.seed = 0 if inputs.seed is None else int(inputs.seed) + number

    def apply(self, p: Tensor) -> Tensor:
        """Return p with some entries set to 0, and the remaining ones divided by the probability of keeping."""
        if not self.dropout:
            return p
        # Each probability uses 16 random bits, which is several times faster than bernoulli_.
        generator = torch.Generator(p.device).manual_seed(self.seed)
        words = torch.empty(-(-p.numel() // 4), dtype=torch.int64, device=p.device)
        bits = words.random_(-(2**63), None, generator=generator).view(torch.int16)[: p.numel()]
        threshold = keep_threshold(self.dropout)
        return p * (bits.view(p.shape) < threshold - 2**15) * (2**16 / threshold)


def _transposed_product(weights: Tensor, x: Tensor, heads: Heads) -> Tensor:
    """Return Σ_i weights_ij x_i over the queries i of the blocks that have the key j, (G, N, D), for x (G, N, D)."""
    num_global = 0 if heads.global_padding is None else heads.global_padding.shape[-1]
    size = weights.shape[-1] - num_global
    out = _add_up_keys(weights[..., :size].mT @ formula.split_blocks(x, heads), heads).flatten(1, 2)
    if num_global:
        out[:, :num_global] += weights[..., size:].flatten(1, 2).mT @ x
    return out


def _add_up_keys(terms: Tensor, heads: Heads) -> Tensor:
    """Sum the terms (G, blocks, J, D) of the keys of each block into one sum for each token, (G, blocks, T, D)."""
    neighbors = heads.neighbors
    if not neighbors:
        return terms
    total = terms.new_zeros(terms.shape[0], heads.blocks + 2 * neighbors, heads.block_size, terms.shape[3])
    for i, part in enumerate(terms.split(heads.block_size, dim=2)):
        total[:, i : i + heads.blocks] += part
    return total[:, neighbors : neighbors + heads.blocks]


def _groups(spec: Spec, inputs: Inputs) -> Iterator[slice]:
    length, dim = inputs.q.shape[2:]
    keys = (2 * spec.neighbors + 1) * min(spec.block_size, length)
    return head_groups(inputs, max(dim, keys + spec.max_global))
