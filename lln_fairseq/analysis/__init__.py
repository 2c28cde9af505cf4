"""Instruments that measure attention matrices, hidden states and runs, as in the paper."""

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
