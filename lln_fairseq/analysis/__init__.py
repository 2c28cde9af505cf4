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

__all__ = [
    "entropy",
    "linear_spectral_gap",
    "lln_temperature",
    "principal_variance",
    "softmax_temperature",
    "spectral_gap",
    "variance",
]
