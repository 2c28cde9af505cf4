"""Measurements of attention matrices and hidden states, as in the paper, and of training runs."""

from lln_fairseq.analysis.concentration import (
    entropy,
    linear_spectral_gap,
    spectral_gap,
    variance,
)
from lln_fairseq.analysis.lognormal import lognormal_fit, normality

__all__ = [
    "entropy",
    "linear_spectral_gap",
    "lognormal_fit",
    "normality",
    "spectral_gap",
    "variance",
]
