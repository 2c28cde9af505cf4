"""Can attention tell two data sets apart: softmax against linear attention (Deng, Song, Zhou 2023), with LLN beside.

Two inputs, D0 and D1, differ in one token. A network F = Σ_rows Σ_j φ_τ(<row, y_j>) with φ_τ(z) = max(z - τ, 0) and m
random sign vectors y_j reads the attention's rows; it separates them if F(D0) = 0 and F(D1) > 0. The paper claims that
with high probability the network on softmax attention does, and that the one on linear attention is 0 on both.

The three experiments are the paper's sections 4, D.1 and F.1. Its text as we have it states no formula, so what follows
is our reading, chosen such that each of its lemmas holds; where it leaves something open, the choice is named there.
All attentions see the same queries and keys, so that softmax(q kᵀ/√d) has the paper's scores:

    softmax  exp(scores) / Σ        linear  scores / Σ        lln  <e^{αq}, e^{βk}> / Σ with moment matching
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lln_fairseq.ops import reference
from lln_fairseq.ops.moment_matching import matched_moments


def distinct(q: Tensor) -> Tensor:
    """Equal queries give equal rows, and what counts is whether any row passes τ: a handful instead of n of them."""
    return q.unique(dim=-2)


NORMALISATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax": lambda q, k: reference.softmax_matrix(distinct(q), k),
    "linear": lambda q, k: reference.kernel_matrix(distinct(q), k),
    "lln": lambda q, k: reference.lln_matrix(distinct(q), k, *matched_moments(q, k)),
}

SELF_ATTENTION_A1 = {"ones": 0.8, "identity": 2.0}  # a1 by X, large enough for softmax at any n


class Counts(NamedTuple):
    """Of all draws, how many gave F(D0) = 0, F(D1) > 0, and both."""

    zero_on_d0: int
    positive_on_d1: int
    separates: int


class Separation(NamedTuple):
    """`counts` by normalisation; `claim`: softmax separates and linear attention is 0 on both, the paper's event."""

    draws: int
    counts: dict[str, Counts]
    claim: int


class Problem(NamedTuple):
    """One of the two inputs: q (B, 1, R, d), k (B, 1, n, d) and values v (B, 1, n, F), B the number of draws or 1.

    Without values the network reads the rows of the attention matrix itself.
    """

    q: Tensor
    k: Tensor
    v: Tensor | None = None

    def rows(self, matrix: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        P = matrix(self.q, self.k)
        return (P if self.v is None else P @ self.v)[:, 0]


def hidden_units(n: int, delta: float) -> int:
    """m = max(⌈ln(n/δ)⌉, 15), enough for one of the m sign vectors to have the signs that it takes."""
    return max(math.ceil(math.log(n / delta)), 15)


def softmax_regression(
    n: int = 1000, d: int = 12, m: int | None = None, delta: float = 0.01, draws: int = 100, seed: int = 0
) -> Separation:
    """Section 4: f = softmax(Ax) against Ax/<Ax, 1>, read by m sign vectors of length n.

    D0: every (Ax)_i uniform in [ln 1.3, ln 1.4]. D1: the same, but one entry is 4 ln n. Chosen: τ = 1/2, between what
    softmax gives on D1 (1 - O(n⁻³)) and both the noise O(√(ln(n/δ)/n)) of D0 and linear attention's
    4 ln n / (n ln 1.3) + noise on D1; m = ⌈ln(n/δ)⌉. Softmax and linear attention depend on Ax alone; for LLN,
    x ~ N(0, 1)^d and A = (Ax) xᵀ/|x|², the smallest A with that product.
    """
    generator = torch.Generator().manual_seed(seed)
    m = m or math.ceil(math.log(n / delta))
    x = torch.randn(draws, 1, 1, d, generator=generator, dtype=torch.float64)
    products = torch.rand(draws, 1, n, 1, generator=generator, dtype=torch.float64)
    products = math.log(1.3) + products * math.log(1.4 / 1.3)
    y = _signs((draws, n, m), generator)
    problems = []
    for large in (products[:, :, :1], torch.tensor(4 * math.log(n))):
        products = products.clone()
        products[:, :, :1] = large  # which entry it is does not matter: the signs are independent
        problems.append(Problem(math.sqrt(d) * x, products * x / x.square().sum(-1, keepdim=True)))
    return _separate(problems[0], problems[1], y, tau=0.5)


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
    """Section D.1: scores A X Aᵀ with X all ones (7.2.1) or the identity (7.2.2), values A.

    A (n, d) = √(ln n) [a e_j, b I stacked t times, c 1] with n = (d - 2) t and b + c = 1; a = a0 in (0, 0.1) for D0,
    a = a1 for D1, by default 0.8 and 2 for the two X. Chosen: τ = (c + 0.1) √(ln n), which the mean of the rows cannot
    pass as long as b <= 0.1, while row j with its own entry dominant passes it for at least a quarter of the sign
    vectors; m = max(⌈ln(n/δ)⌉, 15). With X all ones row j's own score is (1 + a)² ln n against (1 + a) ln n elsewhere:
    n^{(1+a)²} against n · n^{1+a}. With the identity it is a² ln n more than that of others: n^{a²} against n, hence
    a1 > 1; linear attention gives row j a share of about a²/(c² n), which a1 = 2 makes harmless from n = 700 on only.
    LLN cannot separate with X all ones at any α, β: each query is then the same number in every feature, and cancels
    as a factor of its row.
    """
    scale = math.sqrt(math.log(n))

    def problem(a: float) -> Problem:
        A = torch.cat((_one_hot(n, a), (1 - c) * _stacked_identity(n, d - 2), _column(n, c)), dim=1) * scale
        mixed = A.sum(1, keepdim=True).expand(n, d) if mixing == "ones" else A
        return Problem(math.sqrt(d) * mixed[None, None], A[None, None], A[None, None])

    y = _signs((draws, d, m or hidden_units(n, delta)), torch.Generator().manual_seed(seed))
    a1 = SELF_ATTENTION_A1[mixing] if a1 is None else a1
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
    """Section F.1: queries from A1, keys and values from A2, X the identity.

    A1 (n, d) = √(ln n) [a e_i, 1, ..., 1] and A2 (n, d) = √(ln n) [e_j, I stacked t times] with n = (d - 1) t. The
    score of query i and key j is (1 + a) ln n and every other one ln n: n^{1+a} against n · n in row i, so that key j
    dominates for a1 > 1 and does not for a0 < 0.1. Chosen: τ = 1.1 √(ln n), between √(ln n), which a mean of the rows
    of A2 cannot pass, and 2 √(ln n), the value of key j for the quarter of sign vectors that has both its signs.
    """
    scale = math.sqrt(math.log(n))
    keys = torch.cat((_one_hot(n, 1.0), _stacked_identity(n, d - 1)), dim=1)[None, None] * scale

    def problem(a: float) -> Problem:
        queries = torch.cat((_one_hot(n, a), _column(n, 1.0).expand(n, d - 1)), dim=1) * scale
        return Problem(math.sqrt(d) * queries[None, None], keys, keys)

    y = _signs((draws, d, m or hidden_units(n, delta)), torch.Generator().manual_seed(seed))
    return _separate(problem(a0), problem(a1), y, tau=1.1 * scale)


def _separate(d0: Problem, d1: Problem, y: Tensor, tau: float) -> Separation:
    """Counts over the draws of y (draws, features, m)."""
    positive = {
        name: tuple(_network(p.rows(matrix), y, tau) > 0 for p in (d0, d1)) for name, matrix in NORMALISATIONS.items()
    }
    counts = {
        name: Counts(*(int(event.sum()) for event in (~on_d0, on_d1, ~on_d0 & on_d1)))
        for name, (on_d0, on_d1) in positive.items()
    }
    softmax, linear = positive["softmax"], positive["linear"]
    claim = ~softmax[0] & softmax[1] & ~linear[0] & ~linear[1]
    return Separation(len(y), counts, int(claim.sum()))


def _network(rows: Tensor, y: Tensor, tau: float) -> Tensor:
    """F (draws,) of attention outputs (B, R, F); rounding may not lift a row that equals τ above it."""
    return (rows @ y - (1 + 1e-12) * tau).clamp_min(0).sum(dim=(1, 2))


def _signs(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return 2.0 * torch.randint(2, shape, generator=generator).double() - 1


def _one_hot(n: int, value: float) -> Tensor:
    """(n, 1), `value` in the first place: which token it is does not matter, the signs are independent."""
    return torch.zeros(n, 1, dtype=torch.float64).index_fill_(0, torch.tensor(0), value)


def _column(n: int, value: float) -> Tensor:
    return torch.full((n, 1), value, dtype=torch.float64)


def _stacked_identity(n: int, size: int) -> Tensor:
    return torch.eye(size, dtype=torch.float64).repeat(n // size, 1)
