"""Apply all measures of attention matrices to the queries and keys of one layer, head by head."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lln_fairseq.analysis.concentration import entropy, linear_spectral_gap, spectral_gap, variance
from lln_fairseq.analysis.lognormal import lognormal_fit
from lln_fairseq.analysis.rank_collapse import numerical_rank
from lln_fairseq.attention import NO_CONTEXT, Attention, Context
from lln_fairseq.ops import reference

# Longer sequences get no N x N matrix: the eigenvalues of one of 1024 tokens take a second, and grow like N³.
MAX_TOKENS = 1024
ROWS = 256  # the evenly spaced rows that are measured of a longer sequence, by linear mechanisms only

# The order of the measures below: entropy in bits; 1 - |λ2|; mean variance of a row; number of singular values above
# 1e-3 of the largest; mean and variance of ln P; Kolmogorov-Smirnov distance of P to that log-normal distribution.
NAMES = ("entropy", "spectral_gap", "variance", "rank", "log_mean", "log_variance", "log_ks")


class SequenceAttention(NamedTuple):
    """The attention of one sequence of n tokens. Its padding has been removed.

    Attributes:
        heads: H, the number of heads.
        P: the attention matrices (H, n, n), or ROWS evenly spaced rows (H, ROWS, n) of them if the batch is longer than
            MAX_TOKENS and n is more than ROWS. None if it cannot be computed, see `sequence_attentions`.
        features: φ(q) and φ(k), each (H, n, F). None unless the mechanism is linear.
    """

    heads: int
    P: Tensor | None
    features: tuple[Tensor, Tensor] | None


@torch.no_grad()
def sequence_attentions(
    attention: Attention, q: Tensor, k: Tensor, context: Context = NO_CONTEXT
) -> Iterator[SequenceAttention]:
    """Yield the attention of every sequence in turn, because the matrices of a whole batch may not fit in memory.

    For a linear mechanism, both `features` and `P` are set. If N exceeds MAX_TOKENS, its P has only some of the rows.
    For any other mechanism, `features` is None. Its P is set if N is at most MAX_TOKENS and its rows are distributions
    (`rows_sum_to_one`), and is None otherwise.
    """
    is_short = q.shape[2] <= MAX_TOKENS
    for number in range(len(q)):
        if attention.batch_independent:
            part = slice(number, number + 1)
            row = 0
        else:  # α and β depend on the whole batch
            part = slice(None)
            row = number
        real = slice(None) if context.padding is None else ~context.padding[number]
        P = None
        features = attention.feature_maps(q[part], k[part], context.rows(part))
        if features is not None:
            phi_q = features[0][row][:, real]
            phi_k = features[1][row][:, real]
            features = (phi_q, phi_k)
            P = _matrix_rows(phi_q, phi_k, None if is_short else ROWS)
        elif attention.rows_sum_to_one and is_short:
            P = attention.attention_matrix(q[part], k[part], context.rows(part))[row][:, real][:, :, real]
        yield SequenceAttention(q.shape[1], P, features)


def measure_sequence(sequence: SequenceAttention) -> Tensor:
    """Compute every measure of NAMES for one sequence, (7, H) in this order, float64 on the CPU.

    A measure that cannot be computed is NaN. The rank needs all rows of P. The spectral gap needs the features or all
    rows of P. The remaining measures need P. For a sequence without tokens, all measures are NaN.
    """
    heads, P, features = sequence
    values = dict.fromkeys(NAMES, torch.full((heads,), torch.nan))
    if P is not None and P.shape[-1]:
        values["entropy"] = entropy(P)
        values["variance"] = variance(P)
        fit = lognormal_fit(P)
        values["log_mean"] = fit.mu
        values["log_variance"] = fit.sigma2
        values["log_ks"] = fit.ks
        if P.shape[-2] == P.shape[-1]:
            values["rank"] = numerical_rank(P)
            if features is None:
                values["spectral_gap"] = spectral_gap(P)
    if features is not None and features[0].shape[-2]:
        values["spectral_gap"] = linear_spectral_gap(*features)
    return torch.stack([values[name].double().cpu() for name in NAMES])


def measure_batch(attention: Attention, q: Tensor, k: Tensor, context: Context = NO_CONTEXT) -> Tensor:
    """Compute `measure_sequence` for every sequence of a batch, which must not be empty: (B, 7, H)."""
    sequences = sequence_attentions(attention, q, k, context)
    return torch.stack([measure_sequence(sequence) for sequence in sequences])


def remove_padding(x: Tensor, padding: Tensor | None) -> list[Tensor]:
    """Return the sequences of a batch x (B, ..., N, C), each as a tensor (..., n, C) of its n tokens."""
    if padding is None:
        return list(x)
    return [row[..., ~padded, :] for row, padded in zip(x, padding, strict=True)]


def _matrix_rows(phi_q: Tensor, phi_k: Tensor, number: int | None) -> Tensor:
    """Return evenly spaced rows of the attention matrix of features (H, n, F), or all rows if `number` is None.

    All rows are also returned if there are at most `number` of them.
    """
    if number is not None and number < phi_q.shape[-2]:
        phi_q = phi_q[:, torch.linspace(0, phi_q.shape[-2] - 1, number).long()]
    return reference.kernel_matrix(phi_q[None], phi_k[None])[0]
