"""Instruments: what runs and attention matrices show."""

from lln_fairseq.analysis.concentration import (
    entropy,
    linear_spectral_gap,
    lln_temperature,
    principal_variance,
    softmax_temperature,
    spectral_gap,
    variance,
)
from lln_fairseq.analysis.lognormal import lognormal_fit, normality

__all__ = [
    "entropy",
    "linear_spectral_gap",
    "lln_temperature",
    "lognormal_fit",
    "normality",
    "principal_variance",
    "softmax_temperature",
    "spectral_gap",
    "variance",
]
