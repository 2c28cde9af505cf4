"""Instruments: what runs and attention matrices show."""

import importlib
from typing import Any

# Imported when they are used: `python -m lln_fairseq.analysis` imports this file before it can answer Ctrl-C.
_MODULES = {
    "concentration": (
        "entropy",
        "linear_spectral_gap",
        "lln_temperature",
        "principal_variance",
        "softmax_temperature",
        "spectral_gap",
        "variance",
    ),
    "lognormal": ("lognormal_fit", "normality"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
