"""Every instrument of an attention matrix on the queries and keys of one layer, head by head."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lln_fairseq.analysis.concentration import entropy, linear_spectral_gap, spectral_gap, variance
from lln_fairseq.analysis.lognormal import lognormal_fit
from lln_fairseq.analysis.rank_collapse import numerical_rank
from lln_fairseq.attention import Attention
from lln_fairseq.ops import reference

# Longer sequences get no N x N matrix: the eigenvalues of one of 1024 tokens take a second, and grow like N³.
MAX_TOKENS = 1024
ROWS = 256  # of a longer sequence, evenly spaced, for what can be said of rows; linear mechanisms only

# What `instruments` gives: bits; 1 - |λ2|; mean variance of a row; singular values over 1e-3 of the largest; the
# log-normal fit of the entries: mean and variance of ln P and the Kolmogorov-Smirnov distance.
NAMES = ("entropy", "spectral_gap", "variance", "rank", "log_mean", "log_variance", "log_ks")


class Measured(NamedTuple):
    """One sequence without its padding, n real tokens."""

    heads: int
    P: Tensor | None  # (H, n, n); (H, ROWS, n) of a long sequence; None where there is no such matrix
    features: tuple[Tensor, Tensor] | None  # (H, n, F) each, of a linear mechanism

    @property
    def is_whole(self) -> bool:
        return self.P is not None and self.P.shape[-2] == self.P.shape[-1]


@torch.no_grad()
def sequences(attention: Attention, q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None) -> Iterator[Measured]:
    """The attention matrix of every sequence of q, k (B, H, N, D) in turn, rows and columns of padding taken out.

    One at a time, since the matrices of a batch need more memory than its training. Linear mechanisms have the features
    at any length. Beyond MAX_TOKENS theirs is the matrix of some rows, and others have none; neither has a mechanism
    that mixes the features of its output.
    """
    for number in range(len(q)):
        # α and β of a whole batch need the whole batch.
        part = slice(number, number + 1) if attention.batch_independent else slice(None)
        row = 0 if attention.batch_independent else number
        inputs = (q[part], k[part], None if key_padding_mask is None else key_padding_mask[part])
        real = slice(None) if key_padding_mask is None else ~key_padding_mask[number]
        features, P = attention.feature_maps(*inputs), None
        is_short = q.shape[2] <= MAX_TOKENS
        if features is not None:
            phi_q, phi_k = features = features[0][row][:, real], features[1][row][:, real]
            P = _rows(phi_q, phi_k, None if is_short else ROWS)
        elif attention.stochastic_rows and is_short:
            P = attention.attention_matrix(*inputs)[row][:, real][:, :, real]
        yield Measured(q.shape[1], P, features)


def instruments(measured: Measured) -> Tensor:
    """(7, H) in the order of NAMES, float64 on the CPU; NaN where an instrument does not apply."""
    heads, P, features = measured
    nothing = torch.full((heads,), torch.nan)
    found = dict.fromkeys(NAMES, nothing)
    if P is not None and P.shape[-1]:
        found |= {"entropy": entropy(P), "variance": variance(P)}
        found |= dict(zip(("log_mean", "log_variance", "log_ks"), lognormal_fit(P), strict=True))
        if measured.is_whole:
            found |= {"rank": numerical_rank(P), "spectral_gap": spectral_gap(P) if features is None else nothing}
    if features is not None and features[0].shape[-2]:
        found["spectral_gap"] = linear_spectral_gap(*features)
    return torch.stack([found[name].double().cpu() for name in NAMES])


def measure(attention: Attention, q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
    """`instruments` of every sequence, (B, 7, H)."""
    return torch.stack([instruments(measured) for measured in sequences(attention, q, k, key_padding_mask)])


def _rows(phi_q: Tensor, phi_k: Tensor, number: int | None) -> Tensor:
    """So many evenly spaced rows of the matrix of given features (H, n, F), or all: (H, number, n)."""
    if number is not None and number < phi_q.shape[-2]:
        phi_q = phi_q[:, torch.linspace(0, phi_q.shape[-2] - 1, number).long()]
    return reference.kernel_matrix(phi_q[None], phi_k[None])[0]
