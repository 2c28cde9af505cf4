"""Operations without autocast, which would round their products to half precision."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

_P = ParamSpec("_P")
_R = TypeVar("_R")


def autocast_disabled(x: Tensor) -> AbstractContextManager:
    """Return a context without autocast on the device of x."""
    device = x.device.type
    if torch._C._is_any_autocast_enabled() and _has_autocast(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def without_autocast(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function so that it runs without autocast on the device of its first tensor."""

    @functools.wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        first = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        with autocast_disabled(first):
            return function(*args, **kwargs)

    return wrapper


def _has_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device)  # which torch.compile of torch 2.11 cannot trace


# The effect of torch.compiler.assume_constant_result, without its import of the compiler, which takes seconds.
_has_autocast.__dict__["_dynamo_marked_constant"] = True
