"""Attention mechanisms, one file each. Every module of this package is imported, so a new file registers itself."""

import importlib
import pkgutil

from lln_fairseq.attention.registry import (
    ATTENTION_REGISTRY,
    Attention,
    build_attention,
    option,
    register_attention,
)

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["ATTENTION_REGISTRY", "Attention", "build_attention", "option", "register_attention"]
