"""The mathematics of LLN, block-diagonal and hybrid attention in plain operations of torch, forward only.

`hybrid_formula` computes a whole call. It is used for second derivatives, for traced or transformed operations
(tracing, export, functorch, meta tensors) and for tensors without elements, and takes several times the memory of the
backends. The PyTorch backend uses the same functions for one group of heads after another, and adds the gradients.
Exported models ship this file, so it imports nothing but torch.

Shapes: B sequences, H heads, N tokens, D features, G = some of the B·H heads. The blocks have T tokens, and N is
rounded up to a multiple of T. The keys of a block are J = (2 m + 1) T tokens: its own, and in the form Diag also those
of its m neighbors on each side; beyond the ends of the sequence, they are masked. With a band, they are also masked for
the queries that are farther away than the band. A block also has K keys that are
global tokens, the same number for all blocks, though some are masked. A head has the attention matrix

    P = A Wᵀ        W_jd = exp(β k_jd - L_d)        A_id = softmax_d(α q_id + L_d)        L_d = logsumexp_j(β k_jd)

of LLN, the state S = Wᵀ v, and the matrix Diag of the softmax inside the blocks.

The joint form has softmax inside the query's block and LLN outside it, in rows that sum to 1. For query i, LLN gives
the mass u_i = 1 - Σ_{j in block(i)} P_ij to the keys outside the block. They contribute O_i = Σ_{j outside} P_ij v_j to
the LLN output. The joint form is

    out_i = (1 - c_i u_i) (Diag v)_i + c_i O_i        c = 1 / max(u + (1 - u) e^-o, 1/16)

The weight c multiplies everything outside the block. The offset o of a head shifts the log-odds of attending outside
the block: the odds are e^o times the odds of LLN.

The minimum of 1/16 in the divisor limits the mass outside the block to 16 u. Without this limit, a large o could give
half of all attention to the first token after a block, and rounding would decide how much: u and O are computed as a
total minus the block's part, with an error of 1e-7 in float32 and 1e-3 in float16, and c multiplies this error. Offsets
up to log 16 = 2.77 never reach the minimum.

For two kinds of blocks, c is set exactly, so that rounding has no influence. If all keys of the sequence that are not
padding lie in the block, c = 0, which is softmax attention. If all keys of the block are padding, c = 1, which is LLN
attention.

With g global tokens, the first g tokens of the sequence are keys of every block. In the definitions above, "the block"
then stands for the block's own J tokens and the first min(g, s) tokens of the sequence, where s is the position of the
first of the J tokens. So no key counts twice. Global queries attend to all keys by softmax, which is not part of the
joint form.

Padding: values at padding positions are kept out of results and gradients, even if they are NaN or infinite. Keys and
values there are replaced by 0. Queries there have an output without meaning, but it is computed like any other, so only
their values that could overflow are replaced by 0. The values are replaced and not multiplied by 0, because 0 · NaN is
NaN.

A size of a tensor can be a symbol while a model is exported: then it has no value that an `if` could compare.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LLN = "lln"
DIAG = "diag"  # block-diagonal softmax
AVERAGE = "average"  # ½ (LLN + block-diagonal softmax)
JOINT = "joint"
# The weights of LLN and of block-diagonal softmax; a part whose weight is 0 is not computed. In the joint form, both
# parts are computed, but not added.
WEIGHTS = {LLN: (1.0, 0.0), DIAG: (0.0, 1.0), AVERAGE: (0.5, 0.5), JOINT: (1.0, 1.0)}

# The C and Triton kernels get FLOOR, PADDED_QUERY_LIMIT, MIN_SIGMA and LOG_SIGMA2_LIMIT from here.
FLOOR = 2.0**-4  # the minimum of the joint form's divisor
# Values of a padding query with at least this magnitude are replaced by 0. The limit is about half of float16's largest
# number, and keeps α q and q·k finite.
PADDED_QUERY_LIMIT = 3e4

# σ_lln² = a σ̃² + b, the straight line of eq. 34 with the constants of the authors' code. It holds in the range that the
# paper calls broad, σ̃² in [1, 4] in the units of A.7, and is far off at the s of a newly initialized model.
PAPER_A = 0.14855178144710912
PAPER_B = -0.35487039130661086

MIN_SIGMA = 1e-6
# The maximum of log σ̃². One feature dominates LLN attention long before this limit; beyond it, float32 could not
# resolve α q.
LOG_SIGMA2_LIMIT = 24.0

# A first segment has at most this many global tokens, so that the cost stays linear in the length of the sequence.
MAX_FIRST_SEGMENT = 128


@dataclass(frozen=True)
class Spec:
    """What a call computes: its settings, never a tensor."""

    form: str  # a key of WEIGHTS
    block_size: int = 1
    dropout: float = 0.0  # probability of dropping a softmax weight inside a block
    max_global: int = 0  # an upper bound of the global tokens of a sequence; only for the joint form and Diag
    neighbors: int = 0  # m, the blocks on each side whose tokens are keys of a block too; only for Diag
    # The largest distance of a query's keys, in tokens, all of which the neighbors have; None for no such limit. Only
    # for Diag without global tokens.
    band: int | None = None


class Inputs(NamedTuple):
    """The tensors of a call. The first six may require gradients."""

    q: Tensor  # (B, H, N, D)
    k: Tensor  # (B, H, N, D)
    v: Tensor  # (B, H, N, D)
    alpha: Tensor | None = None  # (B, H); None without LLN, and if the backend finds it by moment matching
    beta: Tensor | None = None  # (B, H), as alpha
    offset: Tensor | None = None  # o of the joint form, (B, H)
    padding: Tensor | None = None  # bool (B, N), True = padded; None if nothing is padded
    global_counts: Tensor | None = None  # the global tokens of every sequence, int64 (B,), each at most N
    seed: Tensor | None = None  # of the dropout, int64 (1,)


class Heads(NamedTuple):
    """The tensors of G heads in the compute dtype, ready for the formulas."""

    q: Tensor  # (G, N, D), 0 beyond the last token; padding is finite in q, and 0 in k and v
    k: Tensor
    v: Tensor
    alpha: Any  # (G, 1, 1), as beta and offset; None if the form of the call has none
    beta: Any
    offset: Any
    padding: Tensor | None  # bool (G, N, 1), also True beyond the last token; None if neither exists and m is 0
    blocks: int
    block_size: int  # T
    neighbors: int  # m
    band: int | None  # of the Spec
    global_padding: Tensor | None  # bool (G, blocks, K), see `global_key_padding`; None without global keys


class KeySums(NamedTuple):
    """The sums over the keys of G heads. L = maximum + log total."""

    maximum: Tensor  # max_j β k_j, (G, 1, D); 0 if all keys are padding
    total: Tensor  # Σ_j exp(β k_j - maximum), (G, 1, D), at least 1
    state: Tensor  # S = Wᵀ v, (G, D, D)


class BlockKinds(NamedTuple):
    """Marks the blocks whose weight c is set exactly. Both tensors are bool and broadcast to u, and never both True."""

    all_keys: Tensor  # True for a block with all keys of its sequence that are not padding, and at least one such key
    no_key: Tensor  # True for a block whose keys are all padding


Drop = Callable[[Tensor], Tensor]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which attention of inputs of `dtype` is computed: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_known(size: Any) -> bool:
    """Return False if a size of a tensor is a symbol, which an `if` cannot compare, as in a trace or an export."""
    return isinstance(size, int) and not torch.compiler.is_exporting()


def hybrid_formula(spec: Spec, inputs: Inputs) -> Tensor:
    """Compute the call with the α and β of the inputs, and return (B, H, N, D) in the dtype of q.

    Dropout uses torch's generator and not the seed.
    """
    heads = load_heads(spec, inputs)
    sums = None
    if spec.form != DIAG:
        sums = sum_keys(heads)
    out = attend_heads(spec, heads, sums, lambda p: F.dropout(p, spec.dropout))
    beyond = inputs.q.shape[2] - heads.q.shape[1]  # at most 0
    out = F.pad(out, (0, 0, 0, beyond))  # as out[:, :N], but torch.export cannot prove that N is not larger
    out = out.reshape(inputs.q.shape).to(inputs.q.dtype)
    is_empty = is_known(out.numel()) and out.numel() == 0  # torch's fused attention fails on a GPU without tokens
    if inputs.global_counts is None or spec.max_global == 0 or is_empty:
        return out
    return _with_global_rows(spec, inputs, out)


def _with_global_rows(spec: Spec, inputs: Inputs, out: Tensor) -> Tensor:
    """Return the output with the rows of the global queries, which attend to all keys by softmax."""
    assert inputs.global_counts is not None
    length = out.shape[2]
    q, k, v = clear_padding(inputs.q, inputs.k, inputs.v, inputs.padding)
    rows = softmax_attention(first_rows(q, spec.max_global), k, v, inputs.padding, spec.dropout)
    rows = F.pad(rows, (0, 0, 0, length))[:, :, :length]
    is_global = torch.arange(length, device=out.device) < inputs.global_counts[:, None]
    return torch.where(is_global[:, None, :, None], rows, out)


def load_heads(spec: Spec, inputs: Inputs, group: slice = slice(None)) -> Heads:
    """Return a group of the B·H heads in the compute dtype, with N rounded up to whole blocks and padding cleared.

    T is at most a known N, and 1 for LLN. The tensors may be views of the inputs.
    """
    _, heads, length, _ = inputs.q.shape
    dtype = compute_dtype(inputs.q.dtype)
    size = 1
    if spec.form != LLN:
        size = spec.block_size
        if is_known(length):
            size = max(1, min(size, length))
    blocks = (length + size - 1) // size  # not -(-N // size), which ONNX divides otherwise
    if size > 1 and torch.compiler.is_exporting() and not torch.onnx.is_in_onnx_export():
        # One block more: a program of torch.export is valid either for one block or for two and more.
        blocks = (length + 2 * size - 1) // size
    neighbors = spec.neighbors
    if is_known(blocks):
        neighbors = min(neighbors, max(blocks - 1, 0))  # the blocks that there are, besides the own one
    missing = blocks * size - length
    is_ragged = not is_known(missing) or missing > 0
    q, k, v = (x.flatten(0, 1)[group].to(dtype).contiguous() for x in inputs[:3])
    padding = None
    if inputs.padding is not None or is_ragged or neighbors:
        padding = F.pad(explicit_mask(inputs.padding, inputs.q), (0, missing), value=True)
        padding = repeat_for_heads(padding, heads)[group, :, None]
    if is_ragged:
        q, k, v = (F.pad(x, (0, 0, 0, missing)) for x in (q, k, v))
    if inputs.padding is not None and padding is not None:
        q, k, v = clear_padding(q, k, v, padding)

    def scalar(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.reshape(-1, 1, 1)[group].to(dtype)

    global_padding = None
    if inputs.global_counts is not None and spec.max_global:
        global_padding = global_key_padding(spec, inputs, size, blocks)
        if global_padding is not None:
            global_padding = repeat_for_heads(global_padding, heads)[group]
    return Heads(
        q=q,
        k=k,
        v=v,
        alpha=scalar(inputs.alpha),
        beta=scalar(inputs.beta),
        offset=scalar(inputs.offset),
        padding=padding,
        blocks=blocks,
        block_size=size,
        neighbors=neighbors,
        band=spec.band,
        global_padding=global_padding,
    )


def repeat_for_heads(x: Tensor, heads: int) -> Tensor:
    """Return x (B, ...) as (B·H, ...), the same for all heads of a sequence."""
    return x[:, None].expand(-1, heads, *x.shape[1:]).flatten(0, 1)


def sum_keys(heads: Heads) -> KeySums:
    """Compute the sums over the keys. No gradient flows through the maximum, which cancels."""
    y = heads.beta * heads.k
    if heads.padding is not None:
        y = y.masked_fill(heads.padding, -math.inf)
    if y.shape[1]:
        maximum = y.detach().amax(dim=1, keepdim=True)
        maximum = maximum.masked_fill(maximum == -math.inf, 0.0)
    else:
        maximum = torch.zeros_like(y.sum(dim=1, keepdim=True))
    w = (y - maximum).exp()
    # The sum is at least its largest term, 1. Only a sequence that is all padding needs the clamp.
    total = w.sum(dim=1, keepdim=True).clamp_min(1.0)
    return KeySums(maximum, total, w.mT @ heads.v / total.mT)


def query_features(heads: Heads, sums: KeySums) -> Tensor:
    """Compute A, (G, N, D): every row is a distribution over the features."""
    return (heads.alpha * heads.q + (sums.maximum + sums.total.log())).softmax(dim=-1)


def key_features(heads: Heads, sums: KeySums) -> Tensor:
    """Compute W, (G, N, D): every column is a distribution over the tokens, 0 for padding keys."""
    # As in sum_keys, without the logarithm of the total: exp(β k - L) would differ by the rounding of a large L.
    y = heads.beta * heads.k
    if heads.padding is not None:
        y = y.masked_fill(heads.padding, -math.inf)  # before exp, whose gradient would be NaN if it overflowed there
    return (y - sums.maximum).exp() / sums.total


def attend_heads(spec: Spec, heads: Heads, sums: KeySums | None, drop: Drop) -> Tensor:
    """Compute the output of the heads, (G, N, D). `drop` applies dropout to the probabilities of the blocks."""
    if spec.form == JOINT:
        assert sums is not None
        return _joint(heads, sums, drop)
    if spec.form == LLN:
        assert sums is not None
        return query_features(heads, sums) @ sums.state
    out = times_keys(drop(probabilities(heads)), heads.v, heads)
    if sums is None:
        return out
    return (out + query_features(heads, sums) @ sums.state) / 2


def _joint(heads: Heads, sums: KeySums, drop: Drop) -> Tensor:
    """Compute (1 - c u) Diag v + c (A S - M v), where M is the part of P inside the block."""
    a = query_features(heads, sums)
    inside = key_products(a, key_features(heads, sums), heads)
    u = outside_mass(inside)
    c = outside_weight(u, block_offsets(heads), block_kinds(heads))
    weights = (1 - c * u) * drop(probabilities(heads)) - c * inside
    return c.flatten(1, 2) * (a @ sums.state) + times_keys(weights, heads.v, heads)


def outside_mass(inside: Tensor) -> Tensor:
    """Return u (..., T, 1), clamped to [0, 1], for the part of P inside the block (..., T, J + K)."""
    return (1 - inside.sum(dim=-1, keepdim=True)).clamp(0, 1)


def outside_weight(u: Tensor, offset: Tensor, kinds: BlockKinds) -> Tensor:
    """Return c in the shape of u, at most 1/FLOOR = 16. The offset and the kinds broadcast to u."""
    c = 1 / outside_divisor(u, offset).clamp_min(FLOOR)
    return torch.where(kinds.no_key, 1.0, c).masked_fill(kinds.all_keys, 0.0)


def outside_divisor(u: Tensor, offset: Tensor) -> Tensor:
    """Return u + (1 - u) e^-o, the divisor of c before it is limited to at least FLOOR."""
    return u + (1 - u) * (-offset).exp()


def block_offsets(heads: Heads) -> Tensor:
    """Return the offset o, (G, 1, 1, 1)."""
    return heads.offset[..., None]


def block_kinds(heads: Heads) -> BlockKinds:
    """Return the kinds of the blocks, bool (G, blocks, 1, 1)."""
    real = (~_block_padding(heads)).sum(dim=-1, keepdim=True)
    all_real = real.sum(dim=1, keepdim=True)
    if heads.global_padding is not None:
        real = real + (~heads.global_padding[:, :, None]).sum(dim=-1, keepdim=True)
    no_key = real == 0
    return BlockKinds((real == all_real) & ~no_key, no_key)


def _block_padding(heads: Heads) -> Tensor:
    """Return which of the block's J keys are padding or beyond the ends of the sequence, bool (G, blocks, 1, J)."""
    padding = heads.padding
    if padding is None:
        padding = torch.zeros_like(heads.q[:, :, :1], dtype=torch.bool)
    return split_keys(padding, heads, beyond=True).mT


def count_global_keys(spec: Spec, length: int, block_size: int) -> int:
    """Return K, the number of global tokens that lie before the J keys of the last block. `block_size` is at most N."""
    first = (length - 1) // block_size - spec.neighbors
    return min(spec.max_global, max(first, 0) * block_size)


def global_key_padding(spec: Spec, inputs: Inputs, block_size: int, blocks: int) -> Tensor | None:
    """Return, for every block, which of the first K tokens of the sequence are not global keys of that block.

    True marks a token that is padding, is not global, or does not lie before the block's J keys. K is at most
    `spec.max_global`.

    Returns: bool (B, blocks, K), or None if K is 0.
    """
    length = inputs.q.shape[2]
    max_global = spec.max_global
    assert inputs.global_counts is not None
    if is_known(length):
        max_global = count_global_keys(spec, length, block_size)
        if max_global == 0:
            return None
    token = torch.arange(max_global, device=inputs.q.device)
    first_key = block_size * (torch.arange(blocks, device=inputs.q.device) - spec.neighbors)
    padding = first_rows(explicit_mask(inputs.padding, inputs.q)[..., None], max_global)[..., 0]
    excluded = padding | (token >= inputs.global_counts[:, None])
    return excluded[:, None] | (token >= first_key[:, None])


def probabilities(heads: Heads) -> Tensor:
    """Compute the softmax Diag over the keys of each block, (G, blocks, T, J + K); 0 for padding keys."""
    scores = key_products(heads.q, heads.k, heads, mask_value=torch.finfo(heads.q.dtype).min)
    p = (scores / math.sqrt(heads.q.shape[-1])).softmax(dim=-1)
    return mask_keys(p, heads, 0.0)


def key_products(x: Tensor, y: Tensor, heads: Heads, mask_value: float = 0.0) -> Tensor:
    """Return x_iᵀ y_j for every query i and every key j of its block, (G, blocks, T, J + K).

    x and y are (G, N, D). The K global keys of the block come last. Padding keys have the mask value.
    """
    products = split_blocks(x, heads) @ split_keys(y, heads).mT
    if heads.global_padding is not None:
        products = torch.cat((products, split_blocks(x @ _global_rows(y, heads).mT, heads)), dim=-1)
    return mask_keys(products, heads, mask_value)


def mask_keys(products: Tensor, heads: Heads, value: float) -> Tensor:
    """Return products (G, blocks, T, J + K) with this value for keys that are padding, beyond the ends or masked.

    Without masks in `heads`, the result is `products` itself.
    """
    if heads.padding is None and heads.global_padding is None and heads.band is None:
        return products
    padding = _block_padding(heads)
    if heads.band is not None:
        padding = padding | _beyond_band(heads)
    if heads.global_padding is not None:
        padding = torch.cat((padding, heads.global_padding[:, :, None]), dim=-1)
    return products.masked_fill(padding, value)


def _beyond_band(heads: Heads) -> Tensor:
    """Return which of a block's J keys are farther away from each of its queries than the band, bool (T, J)."""
    size = heads.block_size
    query = torch.arange(size, device=heads.q.device)
    key = torch.arange(-heads.neighbors * size, (heads.neighbors + 1) * size, device=heads.q.device)
    assert heads.band is not None
    return (query[:, None] - key).abs() > heads.band


def neighbors_of_band(band: int, block_size: int) -> int:
    """Return how many blocks on each side have the keys of a band."""
    return -(-band // block_size)


def times_keys(weights: Tensor, y: Tensor, heads: Heads) -> Tensor:
    """Return Σ_j weights_ij y_j over the keys j of the block of every query i, (G, N, D), for y (G, N, D).

    The weights (G, blocks, T, J + K) must be 0 for masked keys.
    """
    keys = split_keys(y, heads)
    size = keys.shape[2]
    out = (weights[..., :size] @ keys).flatten(1, 2)
    if heads.global_padding is not None:
        out = out + weights[..., size:].flatten(1, 2) @ _global_rows(y, heads)
    return out


def _global_rows(y: Tensor, heads: Heads) -> Tensor:
    """Return the first K rows of y (G, N, D)."""
    assert heads.global_padding is not None
    return first_rows(y, heads.global_padding.shape[-1])


def first_rows(x: Tensor, number: int) -> Tensor:
    """Return the first rows of x (..., N, D). If N is a symbol, the result always has `number` rows, the last ones 0.

    With sizes such as min(N, 128), an export of six layers takes many minutes.
    """
    if not is_known(x.shape[-2]):
        x = F.pad(x, (0, 0, 0, number))
    return x[..., :number, :]


def split_blocks(x: Tensor, heads: Heads) -> Tensor:
    """Split the tokens of x (G, N, D) into blocks, (G, blocks, T, D)."""
    return x.unflatten(1, (heads.blocks, heads.block_size))


def split_keys(x: Tensor, heads: Heads, beyond: float = 0.0) -> Tensor:
    """Return the J tokens of x (G, N, D) that are keys of each block, (G, blocks, J, D).

    There is the value `beyond` where the sequence has no token.
    """
    blocks = split_blocks(x, heads)
    if not heads.neighbors:
        return blocks
    padded = F.pad(blocks, (0, 0, 0, 0, heads.neighbors, heads.neighbors), value=beyond)
    return torch.cat([padded[:, i : i + heads.blocks] for i in range(2 * heads.neighbors + 1)], dim=2)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None = None, dropout_p: float = 0.0) -> Tensor:
    """Compute softmax(q kᵀ / √D) v over the keys that are not padding.

    Args:
        q: (B, H, M, D), any strides.
        k, v: (B, H, N, D), any strides.
        padding: bool (B, N), True = padded, or None. The values at padding positions must be finite.
        dropout_p: probability of dropping an attention weight, drawn from torch's global generator.

    Returns: (B, H, M, D) in the dtype of v; 0 for a sequence whose keys are all padding.
    """
    if padding is None:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p)
    # A sequence that is all padding uses all its keys here, since its softmax would be 0/0, and becomes 0 below.
    empty = padding.all(dim=1)
    allowed = ~padding | empty[:, None]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed[:, None, None, :], dropout_p=dropout_p)
    return out.masked_fill(empty[:, None, None, None], 0.0)


def attend_to_all_keys(queries: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, dropout_p: float = 0.0) -> Tensor:
    """Compute `softmax_attention` (B, H, M, D) of the first M queries; values at padding may be NaN or infinite."""
    queries, k, v = clear_padding(queries, k, v, padding)
    return softmax_attention(queries, k, v, padding, dropout_p)


def explicit_mask(padding: Tensor | None, q: Tensor) -> Tensor:
    """Return the mask itself, or a mask (B, N) that is False everywhere if it is None. q is (B, H, N, D)."""
    if padding is not None:
        return padding
    return torch.zeros(q.shape[0], q.shape[2], dtype=torch.bool, device=q.device)


def clear_padding(q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v with finite values at the padding positions, through which no gradient flows.

    Args:
        q: (B, H, M, D), the first M queries; or (G, N, D).
        k, v: (B, H, N, D), or (G, N, D).
        padding: bool, True = padded: (B, N), or (G, N, 1) for the other shapes. None if nothing is padded.

    Returns: new tensors, or the tensors q, k and v themselves if the mask is None.
    """
    if padding is None:
        return q, k, v
    padded = padding
    if padding.dim() == 2:
        padded = padding[:, None, :, None]
    is_large = ~(q.abs() < PADDED_QUERY_LIMIT)  # also NaN
    q = q.masked_fill(padded[..., : q.shape[-2], :] & is_large, 0.0)
    return q, k.masked_fill(padded, 0.0), v.masked_fill(padded, 0.0)


def standard_deviations(x: Tensor, padding: Tensor | None, scope: str = "head") -> Tensor:
    """Return the population standard deviation of the features of the real tokens of x (B, H, N, D), without gradient.

    It is (B, H) in the compute dtype: one number for each sequence and head, or with the scope "batch" the same number
    for all of them. It is at least MIN_SIGMA, so that α and β stay finite for constant inputs and for sequences that
    are all padding.
    """
    tokens, mean, variance = _head_moments(x, padding)
    if scope == "batch":
        weights = tokens / tokens.sum(dim=(0, 1), keepdim=True).clamp_min(1.0)
        total_mean = (weights * mean).sum(dim=(0, 1), keepdim=True)
        total_variance = (weights * (variance + (mean - total_mean).square())).sum(dim=(0, 1), keepdim=True)
        variance = total_variance.expand_as(variance)
    return variance.clamp_min(MIN_SIGMA**2).sqrt()


def _head_moments(x: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the number of real tokens, and the mean and the variance of their features, each (B, H); 0 for no token.

    E[x²] - E[x]² would lose all digits if the mean is much larger than the standard deviation. So both are computed
    relative to an origin, the mean of the first token that is not padding.
    """
    x = x.detach().to(compute_dtype(x.dtype))
    features = x.shape[-1]
    token_mean = x.mean(dim=-1)
    real = torch.ones_like(token_mean, dtype=torch.bool)
    if padding is not None:
        real = real & ~padding[:, None, :]
    is_first = real & (real.cumsum(dim=-1) == 1)
    origin = token_mean.where(is_first, 0.0).sum(dim=-1, keepdim=True)
    if torch.compiler.is_compiling():
        square = (x - origin[..., None]).square().sum(dim=-1)  # ONNX has no cdist
    else:
        # Unlike x - origin, cdist needs no memory of the size of x.
        origins = origin[..., None].expand(*origin.shape, features)
        square = torch.cdist(x, origins, compute_mode="donot_use_mm_for_euclid_dist")[..., 0].square()
    tokens = real.sum(dim=-1).to(x.dtype)
    divisor = tokens.clamp_min(1.0)
    shift = (token_mean - origin).where(real, 0.0).sum(dim=-1) / divisor
    variance = square.where(real, 0.0).sum(dim=-1) / (features * divisor) - shift.square()
    return tokens, origin[..., 0] + shift, variance.clamp_min(0.0)


def alpha_beta(sigma_q: Tensor, sigma_k: Tensor, table: Sequence[Tensor] | None) -> tuple[Tensor, Tensor]:
    """Compute α and β of eq. 10 from σ_q and σ_k, in their shape.

    `table` has the vectors log s and log σ̃². None stands for the paper's straight line.
    """
    log_s = 2 * (sigma_q.log() + sigma_k.log())
    if table is None:
        log_sigma2 = ((log_s.exp() - PAPER_B) / PAPER_A).log()
    else:
        log_sigma2 = interpolate(log_s, *table)
    sigma_tilde = (log_sigma2.clamp_max(LOG_SIGMA2_LIMIT) / 2).exp()
    return sigma_tilde / (math.sqrt(2) * sigma_q), sigma_tilde / (math.sqrt(2) * sigma_k)


def interpolate(x: Tensor, xs: Tensor, ys: Tensor) -> Tensor:
    """Evaluate the piecewise linear function through the points (xs, ys) at x, which has any shape.

    There are at least two points, ascending in xs. Beyond the first and the last, the nearest segment continues.
    """
    right = torch.bucketize(x, xs).clamp(1, xs.numel() - 1)
    left = right - 1
    slope = (ys[right] - ys[left]) / (xs[right] - xs[left])
    return ys[left] + slope * (x - xs[left])
