"""Attention mechanisms, one file each, and the registry that finds them by name.

Importing this package imports every module in it and in `baselines`, so a new file is registered without being listed
anywhere.
"""

import importlib
import pkgutil

from lln_fairseq.attention.context import NO_CONTEXT, Context
from lln_fairseq.attention.layers import EncoderLayer, build_layer, register_layer
from lln_fairseq.attention.registry import (
    ATTENTION_REGISTRY,
    LAYER_REGISTRY,
    MECHANISMS,
    Attention,
    build_attention,
    option,
    register_attention,
    reject_layer_mechanism,
)

for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    importlib.import_module(_module.name)

__all__ = [
    "ATTENTION_REGISTRY",
    "LAYER_REGISTRY",
    "MECHANISMS",
    "NO_CONTEXT",
    "Attention",
    "Context",
    "EncoderLayer",
    "build_attention",
    "build_layer",
    "option",
    "register_attention",
    "register_layer",
    "reject_layer_mechanism",
]
