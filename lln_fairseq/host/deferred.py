"""scikit-learn and scipy.stats, which fairseq imports for its own criterions, are loaded when a metric is computed.

They take about a second of the start of a program of ours. Standard library only: fairseq is imported later.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

METRICS = ("scipy.stats", "sklearn", "sklearn.metrics")


class _Later(ModuleType):
    """Stands for a module from which functions are imported."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)  # who looks whether it is installed finds that it is

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}") or _call_later(self.__name__, name)


def _call_later(module: str, name: str) -> Callable:
    return lambda *args, **kwargs: getattr(importlib.import_module(module), name)(*args, **kwargs)


@contextmanager
def deferred(modules: tuple[str, ...] = METRICS) -> Iterator[None]:
    """Whoever imports functions of these modules in the block gets functions that import them on the first call."""
    missing = [name for name in modules if name not in sys.modules]
    sys.modules.update((name, _Later(name)) for name in missing)
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]
