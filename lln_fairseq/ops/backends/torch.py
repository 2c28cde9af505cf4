"""Hybrid attention in PyTorch on every device and dtype: formula.py for a group of heads after another, and gradients.

A group is so small that its dozen temporary tensors stay in the cache. Let x = α q, y = β k, and let the tensor `do` be
the gradient of the output times the weight of LLN. The gradients of LLN are

    dA = do Sᵀ        dx = A (dA - Σ_d A dA)        dS = Aᵀ do        g = (S dSᵀ)_dd - Σ_i dx_id
    dv = W dS         dy = W (v dSᵀ - g)            dq = α dx         dk = β dy

Here g = -dL is the negated gradient of L. For the joint form (formula.py), let M be the part of P inside the block,
O = A S - M v_b, E = do v_bᵀ, de_i = Σ_j Diag_ij E_ij, oe_i = do_i O_i and c' = dc/du, where the index b stands for the
rows of a block. The gradients are

    du = c' oe - (c + c' u) de        dDiag = (1 - c u) E         X = -(c E + du)
    dA = c do Sᵀ + X W_b              dS = Aᵀ (c do)              dv = W dS + ((1 - c u) Diag - c M)ᵀ do
    dx = A (dA - δ), δ = Σ_d A dA     g = Σ_i A δ                 dy = W (v dSᵀ + Xᵀ A_b - g)

The gradient of P is c E outside the block and, because u = 1 - Σ_j M_ij, -du inside the block. It is computed as the
sum of c E for all keys, which needs only the state, and X inside the block.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lln_fairseq.ops import formula
from lln_fairseq.ops.dispatch import fresh_result, keep_threshold
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
from lln_fairseq.ops.moment_matching import calibration_table, match_moments_pytorch

# Bytes of one temporary tensor of a group. On a GPU, large groups are faster because they need fewer launches.
GROUP_BYTES = 1 << 20
GROUP_BYTES_ON_GPU = 256 << 20


def reason_against(spec: Spec, q: Tensor) -> str | None:
    """Return None: this backend supports everything."""
    return None


def allocate(spec: Spec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """See `Backend.allocate`."""
    sums = () if spec.form == DIAG else empty_sums(q, q.shape[-1])
    return [fresh_result(x) for x in (q, k, v)], sums


def empty_sums(q: Tensor, features: int) -> KeySums:
    """Return uninitialized sums over the keys of all heads of q (B, H, N, D)."""
    batch, heads, _, dim = q.shape
    shapes = ((1, features), (1, features), (features, dim))
    options: dict[str, Any] = {"dtype": compute_dtype(q.dtype), "device": q.device}
    return KeySums(*(torch.empty(batch * heads, *shape, **options) for shape in shapes))


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
        factors = _Dropout(spec, inputs, group)
        write_group(formula.attend_heads(spec, heads, group_sums, factors.apply), out, group)
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
        drop = _Dropout(spec, inputs, group)
        if spec.form == JOINT:
            assert sums is not None
            gradients = _joint_backward(heads, select_sums(sums, group), do, drop)
        else:
            gradients = _sum_backward(spec, heads, None if sums is None else select_sums(sums, group), do, drop)
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


def queries_backward(heads: Heads, sums: KeySums, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx (G, N, D), and dS (G, D, D) and g (G, 1, D), the sums over the queries."""
    a = formula.query_features(heads, sums)
    dx = _softmax_backward(do @ sums.state.mT, a)
    grad_state = a.mT @ do
    g = (sums.state * grad_state).sum(dim=-1)[:, None] - dx.sum(dim=1, keepdim=True)
    return dx, grad_state, g


def keys_backward(heads: Heads, sums: KeySums, grad_state: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return dy and dv, (G, N, D)."""
    w = formula.key_features(heads, sums)
    return w * (heads.v @ grad_state.mT - g), w @ grad_state


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
    grad_scores = _softmax_backward(drop.apply(dp), p)
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
    x = formula.mask_keys(-(c * e + du), heads, 0.0)
    weights = (1 - c * u) * dropped_p - c * inside
    c_rows = c.flatten(1, 2)

    da = c_rows * do_state + formula.times_keys(x, w, heads)
    dx = _softmax_backward(da, a)
    g = torch.linalg.vecdot(a, da)[:, None] @ a
    grad_state = a.mT @ (c_rows * do)
    dy = w * (heads.v @ grad_state.mT + _transposed_product(x, a, heads) - g)
    dv = w @ grad_state + _transposed_product(weights, do, heads)
    grad_p = drop.apply((1 - c * u) * e)
    dq, dk = _scores_backward(heads, _softmax_backward(grad_p, p))
    doffset = (c_by_offset * (outside_e - u * diag_e)).sum(dim=(1, 2, 3))
    lln_dq, lln_dk, dv, dalpha, dbeta, _ = _scale_gradients(heads, dx, dy, dv)
    return [lln_dq + dq, lln_dk + dk, dv, dalpha, dbeta, doffset]


def _weight_gradients(c: Tensor, u: Tensor, offset: Tensor, kinds: BlockKinds) -> tuple[Tensor, Tensor]:
    """Return the derivatives of c by u and by the offset, in the shape of u. Both are 0 where c is constant."""
    is_constant = kinds.all_keys | kinds.no_key | (outside_divisor(u, offset) <= FLOOR)
    by_u = -c.square() * (1 - (-offset).exp())
    by_offset = c * (1 - c * u)
    return by_u.masked_fill(is_constant, 0.0), by_offset.masked_fill(is_constant, 0.0)


class _Dropout:
    """Multiplies probabilities of the blocks of a group by the same random factors in every call.

    The factors depend on the seed of the call and on the group, so that forward and backward drop the same weights.
    """

    def __init__(self, spec: Spec, inputs: Inputs, group: slice) -> None:
        self.dropout = spec.dropout
        self.seed = 0 if inputs.seed is None else int(inputs.seed) + group.start

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


def _softmax_backward(grad: Tensor, p: Tensor) -> Tensor:
    """Return P (dP - Σ P dP), the gradient of the input of a softmax over the last dimension."""
    return torch.ops.aten._softmax_backward_data(grad, p, -1, p.dtype)


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


def with_joined_heads(inputs: Inputs) -> Inputs:
    """Return the inputs with `join_heads` applied to q, k and v."""
    return inputs._replace(q=join_heads(inputs.q), k=join_heads(inputs.k), v=join_heads(inputs.v))


def join_heads(x: Tensor) -> Tensor:
    """Return x (B, H, N, D), or a copy of it if its batch and heads cannot be viewed as one dimension.

    Otherwise every group of heads would copy all of x.
    """
    if x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1):
        return x
    return x.contiguous()


def head_groups(inputs: Inputs, columns: int) -> Iterator[slice]:
    """Yield slices of the B·H heads, for groups of at least one head. `columns` are those of its largest matrix."""
    batch, heads, length, _ = inputs.q.shape
    bytes_per_head = length * columns * compute_dtype(inputs.q.dtype).itemsize
    budget = GROUP_BYTES if inputs.q.device.type == "cpu" else GROUP_BYTES_ON_GPU
    size = max(1, budget // max(1, bytes_per_head))
    for start in range(0, batch * heads, size):
        yield slice(start, min(start + size, batch * heads))


def _groups(spec: Spec, inputs: Inputs) -> Iterator[slice]:
    length, dim = inputs.q.shape[2:]
    keys = (2 * spec.neighbors + 1) * min(spec.block_size, length)
    return head_groups(inputs, max(dim, keys + spec.max_global))


def load_gradient(grad: Tensor, heads: Heads, group: slice) -> Tensor:
    """Return the gradient of the output of a group, (G, N, D), with 0 beyond the last token."""
    do = grad.flatten(0, 1)[group].to(heads.q.dtype)
    return torch.nn.functional.pad(do, (0, 0, 0, heads.q.shape[1] - do.shape[1]))


def write_group(x: Tensor, target: Tensor, group: slice) -> None:
    """Write the result x (G, rounded-up N, D) of a group to `target` (B, H, N, D)."""
    target.flatten(0, 1)[group] = x[:, : target.shape[2]]


def store_sums(part: KeySums, sums: KeySums, group: slice) -> None:
    for x, target in zip(part, sums, strict=True):
        target[group] = x


def select_sums(sums: KeySums, group: slice) -> KeySums:
    return KeySums(*(x[group] for x in sums))
