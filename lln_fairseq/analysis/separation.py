"""The separation experiments of Deng, Song and Zhou 2023 (softmax against linear attention), extended to LLN attention.

Two inputs, D0 and D1, differ in one token. A network F = Σ_rows Σ_j φ_τ(<row, y_j>) with φ_τ(z) = max(z - τ, 0) and m
random sign vectors y_j reads the rows of the attention. It separates the inputs if F(D0) = 0 and F(D1) > 0. The paper
claims that with high probability the network separates them with softmax attention, and is 0 on both with linear
attention.

The experiments are those of the paper's sections 4, D.1 and F.1. They were written from its text without the formulas,
such that each of its lemmas holds; "Our choices" marks what the text leaves open. All attentions get the same queries
and keys, scaled such that softmax(q kᵀ/√d) has the paper's scores:

    softmax  exp(scores) / Σ        linear  scores / Σ        lln  <e^{αq}, e^{βk}> / Σ with moment matching
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lln_fairseq.ops import reference
from lln_fairseq.ops.moment_matching import match_moments_pytorch


def distinct_queries(q: Tensor) -> Tensor:
    """Return the distinct queries of q (..., R, d), usually far fewer than R.

    Equal queries give equal rows, and only the sign of F matters: whether any row exceeds τ.
    """
    return q.unique(dim=-2)


def _softmax(q: Tensor, k: Tensor) -> Tensor:
    return reference.softmax_matrix(distinct_queries(q), k)


def _linear(q: Tensor, k: Tensor) -> Tensor:
    return reference.kernel_matrix(distinct_queries(q), k)


def _lln(q: Tensor, k: Tensor) -> Tensor:
    alpha, beta = match_moments_pytorch(q, k)
    return reference.lln_matrix(distinct_queries(q), k, alpha, beta)


# By name, functions of q (B, 1, R, d) and k (B, 1, n, d) that return the attention of the distinct queries.
NORMALIZATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"softmax": _softmax, "linear": _linear, "lln": _lln}

SELF_ATTENTION_A1 = {"ones": 0.8, "identity": 2.0}  # the default a1 by X, large enough for softmax at any n


class Counts(NamedTuple):
    """The numbers of draws that gave F(D0) = 0, F(D1) > 0, and both."""

    zero_on_d0: int
    positive_on_d1: int
    separates: int


class Separation(NamedTuple):
    """The result of an experiment.

    draws: the number of draws of the sign vectors.
    counts: by the name of the attention in NORMALIZATIONS.
    claim: the draws in which the paper's claim holds: softmax separates, and linear attention is 0 on both inputs.
    """

    draws: int
    counts: dict[str, Counts]
    claim: int


class Problem(NamedTuple):
    """One of the two inputs, for B draws or, with B = 1, the same for all of them.

    q is (B, 1, R, d), k (B, 1, n, d) and v (B, 1, n, F). If v is None, the network reads the attention matrix itself.
    """

    q: Tensor
    k: Tensor
    v: Tensor | None = None

    def attention_rows(self, matrix: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return the rows that the network reads, (B, number of distinct queries, F or n)."""
        P = matrix(self.q, self.k)
        if self.v is None:
            return P[:, 0]
        return (P @ self.v)[:, 0]


def hidden_units(n: int, delta: float) -> int:
    """Return m = max(⌈ln(n/δ)⌉, 15), enough for one of m sign vectors to have the signs that separation needs."""
    return max(math.ceil(math.log(n / delta)), 15)


def softmax_regression(
    n: int = 1000, d: int = 12, m: int | None = None, delta: float = 0.01, draws: int = 100, seed: int = 0
) -> Separation:
    """Compare f = softmax(Ax) with Ax/<Ax, 1> as in section 4, read by m sign vectors of length n.

    In D0 every (Ax)_i is uniform in [ln 1.3, ln 1.4]. D1 is the same, except that one entry is 4 ln n.

    Our choices: τ = 1/2, which lies below what softmax gives on D1, 1 - O(n⁻³), and above both the noise
    O(√(ln(n/δ)/n)) of D0 and linear attention's 4 ln n / (n ln 1.3) + noise on D1. Softmax and linear attention depend
    only on Ax. For LLN, x ~ N(0, 1)^d, and A = (Ax) xᵀ/|x|² is the smallest A with that product.

    Args:
        n: the number of tokens.
        d: the number of features.
        m: the number of sign vectors; None = ⌈ln(n/δ)⌉.
        delta: δ, the accepted probability of failure.
        draws: how often the inputs and the sign vectors are drawn.
        seed: the seed of all draws.
    """
    generator = torch.Generator().manual_seed(seed)
    m = m or math.ceil(math.log(n / delta))
    x = torch.randn(draws, 1, 1, d, generator=generator, dtype=torch.float64)
    uniform = torch.rand(draws, 1, n, 1, generator=generator, dtype=torch.float64)
    d0_products = math.log(1.3) + uniform * math.log(1.4 / 1.3)
    d1_products = d0_products.clone()
    d1_products[:, :, :1] = torch.tensor(4 * math.log(n))  # any entry will do, because the signs are independent
    y = _draw_signs((draws, n, m), generator)

    def problem(products: Tensor) -> Problem:
        """Return the input with the products Ax (draws, 1, n, 1)."""
        return Problem(math.sqrt(d) * x, products * x / x.square().sum(-1, keepdim=True))

    return _separate(problem(d0_products), problem(d1_products), y, tau=0.5)


def self_attention(
    n: int = 1000,
    d: int = 12,
    m: int | None = None,
    a0: float = 0.05,
    a1: float | None = None,
    c: float = 0.9,
    delta: float = 0.01,
    mixing: str = "ones",
    draws: int = 100,
    seed: int = 0,
) -> Separation:
    """Compare self-attention with scores A X Aᵀ and values A as in section D.1.

    A (n, d) = √(ln n) [a e_j, b I stacked t times, c 1] with n = (d - 2) t and b + c = 1. D0 has a = a0, D1 has a = a1.

    With X all ones, row j's own score is (1 + a)² ln n, and its other scores are (1 + a) ln n: n^{(1+a)²} against
    n · n^{1+a}. With the identity, its own score is larger by a² ln n: n^{a²} against n, hence a1 > 1. Linear attention
    then gives row j's own value a weight of about a²/(c² n), which for a1 = 2 is harmless only from n = 700 on. With X
    all ones, LLN cannot separate at any α and β: all features of a query are the same number, which cancels as a factor
    of its row.

    Our choices: τ = (c + 0.1) √(ln n). The mean of the rows cannot exceed it if b <= 0.1. If row j's own entry
    dominates, the row exceeds it for at least a quarter of the sign vectors.

    Args:
        n, d, delta, draws, seed: as for `softmax_regression`; n must be a multiple of d - 2.
        m: the number of sign vectors; None = `hidden_units`.
        a0: a of D0, in (0, 0.1).
        a1: a of D1; None = 0.8 for X all ones and 2 for the identity.
        c: the entries of the last column.
        mixing: X, "ones" (7.2.1) or "identity" (7.2.2).
    """
    scale = math.sqrt(math.log(n))

    def problem(a: float) -> Problem:
        """Return the input with this a."""
        A = torch.cat((_one_hot(n, a), (1 - c) * _stacked_identity(n, d - 2), _column(n, c)), dim=1) * scale
        queries = A.sum(1, keepdim=True).expand(n, d) if mixing == "ones" else A
        return Problem(math.sqrt(d) * queries[None, None], A[None, None], A[None, None])

    y = _draw_signs((draws, d, m or hidden_units(n, delta)), torch.Generator().manual_seed(seed))
    if a1 is None:
        a1 = SELF_ATTENTION_A1[mixing]
    return _separate(problem(a0), problem(a1), y, tau=(c + 0.1) * scale)


def cross_attention(
    n: int = 1100,
    d: int = 12,
    m: int | None = None,
    a0: float = 0.05,
    a1: float = 3.0,
    delta: float = 0.01,
    draws: int = 100,
    seed: int = 0,
) -> Separation:
    """Compare cross-attention with queries from A1, keys and values from A2, and X the identity, as in section F.1.

    A1 (n, d) = √(ln n) [a e_i, 1, ..., 1] and A2 (n, d) = √(ln n) [e_j, I stacked t times] with n = (d - 1) t. Query i
    and key j have the score (1 + a) ln n, all other pairs ln n: in row i, n^{1+a} against n · n. So key j dominates for
    a1 > 1, and does not for a0 < 0.1.

    Our choices: τ = 1.1 √(ln n). It lies above √(ln n), which a mean of the rows of A2 cannot exceed, and below
    2 √(ln n), the value of key j for the quarter of sign vectors that has both its signs.

    The arguments are those of `self_attention`; n must be a multiple of d - 1.
    """
    scale = math.sqrt(math.log(n))
    keys = torch.cat((_one_hot(n, 1.0), _stacked_identity(n, d - 1)), dim=1)[None, None] * scale

    def problem(a: float) -> Problem:
        """Return the input with this a."""
        queries = torch.cat((_one_hot(n, a), _column(n, 1.0).expand(n, d - 1)), dim=1) * scale
        return Problem(math.sqrt(d) * queries[None, None], keys, keys)

    y = _draw_signs((draws, d, m or hidden_units(n, delta)), torch.Generator().manual_seed(seed))
    return _separate(problem(a0), problem(a1), y, tau=1.1 * scale)


def _separate(d0: Problem, d1: Problem, y: Tensor, tau: float) -> Separation:
    """Count how often each attention separates d0 from d1, for sign vectors y (draws, features, m)."""
    zero_on_d0 = {}
    positive_on_d1 = {}
    counts = {}
    for name, matrix in NORMALIZATIONS.items():
        is_zero = _network(d0.attention_rows(matrix), y, tau) == 0
        is_positive = _network(d1.attention_rows(matrix), y, tau) > 0
        zero_on_d0[name] = is_zero
        positive_on_d1[name] = is_positive
        counts[name] = Counts(int(is_zero.sum()), int(is_positive.sum()), int((is_zero & is_positive).sum()))
    softmax_separates = zero_on_d0["softmax"] & positive_on_d1["softmax"]
    linear_is_zero = zero_on_d0["linear"] & ~positive_on_d1["linear"]
    return Separation(len(y), counts, int((softmax_separates & linear_is_zero).sum()))


def _network(rows: Tensor, y: Tensor, tau: float) -> Tensor:
    """Return F, (draws,), for rows (B, R, features) and sign vectors y (draws, features, m).

    The threshold is slightly above τ, so that rounding cannot lift a product that equals τ above it.
    """
    return (rows @ y - (1 + 1e-12) * tau).clamp_min(0).sum(dim=(1, 2))


def _draw_signs(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw a float64 tensor of -1 and 1."""
    return 2.0 * torch.randint(2, shape, generator=generator).double() - 1


def _one_hot(n: int, value: float) -> Tensor:
    """Return a column (n, 1) with `value` in the first row; any row will do, because the signs are independent."""
    return torch.zeros(n, 1, dtype=torch.float64).index_fill_(0, torch.tensor(0), value)


def _column(n: int, value: float) -> Tensor:
    """Return a column (n, 1) of one value, in float64."""
    return torch.full((n, 1), value, dtype=torch.float64)


def _stacked_identity(n: int, size: int) -> Tensor:
    """Return copies of the identity of this size, stacked to (n, size)."""
    return torch.eye(size, dtype=torch.float64).repeat(n // size, 1)
