"""The separation experiments of Deng, Song and Zhou 2023 (softmax against linear attention), extended to LLN attention.

Two inputs, D0 and D1, differ in one token. A small network F reads the rows of the attention, or of its output:
F = Σ_rows Σ_j φ_τ(<row, y_j>), where φ_τ(z) = max(z - τ, 0) and y_1 ... y_m are random sign vectors. F separates the
inputs if F(D0) = 0 and F(D1) > 0. The paper claims that with high probability, F separates the inputs with softmax
attention, and is 0 on both inputs with linear attention.

The experiments are those of the paper's sections 4, D.1 and F.1. They were written from a copy of the paper without its
formulas, and were chosen so that each of the paper's lemmas holds. "Our choices" in a docstring marks what this text
leaves open. All attentions get the same queries and keys, scaled so that softmax(q kᵀ/√d) has the paper's scores. The
rows of the attention matrices are:

    softmax  exp(scores) / Σ        linear  scores / Σ        lln  <e^{αq}, e^{βk}> / Σ with moment matching

All experiments take the number of tokens n, the number of features d, the number of sign vectors m, the accepted
probability of failure δ, the number of draws of the sign vectors, and the seed of all draws.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lln_fairseq.ops import reference
from lln_fairseq.ops.moment_matching import match_moments_pytorch


def distinct_queries(q: Tensor) -> Tensor:
    """Return each query of q (..., R, d) once. Usually there are far fewer distinct queries than R.

    Equal queries give equal rows. Leaving out the copies saves time and changes neither F = 0 nor F > 0.
    """
    return q.unique(dim=-2)


def _softmax(q: Tensor, k: Tensor) -> Tensor:
    return reference.softmax_matrix(distinct_queries(q), k)


def _linear(q: Tensor, k: Tensor) -> Tensor:
    return reference.kernel_matrix(distinct_queries(q), k)


def _lln(q: Tensor, k: Tensor) -> Tensor:
    """Return the rows of LLN attention for the distinct queries of q. All R queries enter the moment matching."""
    alpha, beta = match_moments_pytorch(q, k)
    return reference.lln_matrix(distinct_queries(q), k, alpha, beta)


# By name, functions of q (B, 1, R, d) and k (B, 1, n, d) that return the attention matrix of the distinct queries.
NORMALIZATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"softmax": _softmax, "linear": _linear, "lln": _lln}

SELF_ATTENTION_A1 = {"ones": 0.8, "identity": 2.0}  # the default a1 by X, large enough for softmax at any n


class Counts(NamedTuple):
    """The number of draws with F(D0) = 0, with F(D1) > 0, and with both."""

    zero_on_d0: int
    positive_on_d1: int
    separates: int


class Separation(NamedTuple):
    """The result of an experiment.

    Attributes:
        draws: the number of draws of the sign vectors.
        counts: the counts of each attention, by its name in NORMALIZATIONS.
        claim: the number of draws in which the paper's claim holds: F separates the inputs with softmax attention, and
            is 0 on both inputs with linear attention.
    """

    draws: int
    counts: dict[str, Counts]
    claim: int


class Problem(NamedTuple):
    """One of the two inputs, D0 or D1. B is the number of draws, or 1 if all draws have the same input.

    Attributes:
        q: queries (B, 1, R, d).
        k: keys (B, 1, n, d).
        v: values (B, 1, n, d). If it is None, the network reads the rows of the attention matrix.
    """

    q: Tensor
    k: Tensor
    v: Tensor | None = None

    def attention_rows(self, matrix: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return the rows that the network reads, (B, distinct queries, d), or (B, distinct queries, n) if v is None.

        `matrix` is a function of NORMALIZATIONS.
        """
        P = matrix(self.q, self.k)
        if self.v is None:
            return P[:, 0]
        return (P @ self.v)[:, 0]


def hidden_units(n: int, delta: float) -> int:
    """Return m = max(⌈ln(n/δ)⌉, 15), the number of sign vectors. One of them very likely separates the inputs."""
    return max(math.ceil(math.log(n / delta)), 15)


def softmax_regression(
    n: int = 1000, d: int = 12, m: int | None = None, delta: float = 0.01, draws: int = 100, seed: int = 0
) -> Separation:
    """Compare softmax(Ax) with the linear Ax/<Ax, 1> and with LLN, as in section 4.

    The query is x (d), and the keys are the rows of A (n, d). The network reads the attention vector of length n. In D0
    every (Ax)_i is uniform in [ln 1.3, ln 1.4]. D1 is the same, except that one entry is 4 ln n. The inputs are drawn
    anew with the sign vectors, of which there are ⌈ln(n/δ)⌉ by default.

    Our choices: τ = 1/2. On D1, softmax gives 1 - O(n⁻³), which is above τ. On D0, the products <row, y_j> are only
    noise of O(√(ln(n/δ)/n)), and linear attention on D1 adds at most 4 ln n / (n ln 1.3), so both are below τ. Softmax
    and linear attention depend only on Ax, but LLN depends on A and x. We draw x from N(0, 1)^d, and take the smallest
    A with the drawn product: A = (Ax) xᵀ/|x|².
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
    """Compare the attentions in self-attention with scores A X Aᵀ and values A, as in section D.1.

    The tokens are the rows of A (n, d) = √(ln n) [a e_j, b I stacked t times, c 1], where n = (d - 2) t and b + c = 1.
    Only row j has an entry in the first column: a0 in D0 and a1 in D1.

    X all ones: the score of row j for itself is (1 + a)² ln n, and its other scores are (1 + a) ln n. In the softmax,
    n^{(1+a)²} competes with n · n^{1+a}. LLN cannot separate the inputs at any α and β, because all features of a query
    are the same number, which cancels when its row is normalized.

    X the identity: the score of row j for itself exceeds its other scores by a² ln n. In the softmax, n^{a²} competes
    with n, so a1 must exceed 1. Linear attention gives row j a weight of about a²/(c² n) for itself. For a1 = 2, this
    is small enough only if n is at least 700.

    Our choices: τ = (c + 0.1) √(ln n). If b <= 0.1, the mean of the rows cannot exceed τ. If the score of row j for
    itself dominates, the output exceeds τ for at least a quarter of the sign vectors.

    Args:
        n: a multiple of d - 2.
        m: None = `hidden_units`.
        a0: a in D0, between 0 and 0.1.
        a1: a in D1; None = 0.8 for X all ones and 2 for the identity.
        c: the entries of the last column, without the factor √(ln n).
        mixing: X, "ones" (section 7.2.1) or "identity" (section 7.2.2).
    """
    scale = math.sqrt(math.log(n))

    def problem(a: float) -> Problem:
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
    """Compare the attentions in cross-attention with queries A1, and keys and values A2, as in section F.1.

    A1 (n, d) = √(ln n) [a e_i, 1, ..., 1] and A2 (n, d) = √(ln n) [e_j, I stacked t times], where n = (d - 1) t. Only
    row i of A1 and row j of A2 have an entry in the first column, and a is a0 in D0 and a1 in D1. The score of query i
    for key j is (1 + a) ln n, and the score of every other pair is ln n. In the softmax of row i, n^{1+a} competes with
    n · n, so key j dominates if a > 1, and does not if a < 0.1.

    Our choices: τ = 1.1 √(ln n). This is above √(ln n), which a mean of the rows of A2 cannot exceed. It is below 2
    √(ln n), the product of row j of A2 with a sign vector that is 1 at both nonzero entries, as a quarter of them is.

    Args:
        n: a multiple of d - 1.
        m: None = `hidden_units`.
        a0: a in D0, between 0 and 0.1.
        a1: a in D1, above 1.
    """
    scale = math.sqrt(math.log(n))
    keys = torch.cat((_one_hot(n, 1.0), _stacked_identity(n, d - 1)), dim=1)[None, None] * scale

    def problem(a: float) -> Problem:
        queries = torch.cat((_one_hot(n, a), _column(n, 1.0).expand(n, d - 1)), dim=1) * scale
        return Problem(math.sqrt(d) * queries[None, None], keys, keys)

    y = _draw_signs((draws, d, m or hidden_units(n, delta)), torch.Generator().manual_seed(seed))
    return _separate(problem(a0), problem(a1), y, tau=1.1 * scale)


def _separate(d0: Problem, d1: Problem, y: Tensor, tau: float) -> Separation:
    """Count the draws in which each attention separates d0 from d1.

    The sign vectors y are (draws, features, m), where `features` is the length of the rows that the network reads.
    """
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
    """Compute F, the output of the network (draws,).

    The rows are (B, R, features), and the sign vectors y are (draws, features, m).
    """
    # The threshold is slightly larger than τ, so that a product that equals τ does not exceed it by a rounding error.
    return (rows @ y - (1 + 1e-12) * tau).clamp_min(0).sum(dim=(1, 2))


def _draw_signs(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return 2.0 * torch.randint(2, shape, generator=generator).double() - 1


def _one_hot(n: int, value: float) -> Tensor:
    """Return a float64 column (n, 1) with `value` in its first row and 0 in the others.

    The row does not matter for the experiments, because the signs are independent.
    """
    return torch.zeros(n, 1, dtype=torch.float64).index_fill_(0, torch.tensor(0), value)


def _column(n: int, value: float) -> Tensor:
    return torch.full((n, 1), value, dtype=torch.float64)


def _stacked_identity(n: int, size: int) -> Tensor:
    """Return n // size copies of the identity matrix of this size, stacked on top of each other, in float64."""
    return torch.eye(size, dtype=torch.float64).repeat(n // size, 1)
