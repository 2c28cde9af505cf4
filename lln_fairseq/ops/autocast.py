"""Functions that run without autocast, which would round their products to half precision."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

_P = ParamSpec("_P")
_R = TypeVar("_R")


def without_autocast(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function so that it runs without autocast.

    Autocast would round the products of the function to half precision. It is disabled for the device types of all
    arguments that are tensors. Tensors inside lists or other objects are not looked at.
    """

    @functools.wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not torch._C._is_any_autocast_enabled():
            return function(*args, **kwargs)
        devices = {x.device.type for x in (*args, *kwargs.values()) if isinstance(x, Tensor)}
        wrapped: Callable[..., _R] = function
        for device in filter(torch.amp.is_autocast_available, devices):
            wrapped = functools.partial(_call_without_autocast, device, wrapped)
        return wrapped(*args, **kwargs)

    return wrapper


def _call_without_autocast(device: str, function: Callable[..., _R], *args: Any, **kwargs: Any) -> _R:
    """Call the function with autocast disabled for one device type, such as "cuda", and return its result."""
    # The wrappers are nested, because torch.compile cannot trace an ExitStack that disables autocast for all devices.
    with torch.autocast(device, enabled=False):
        return function(*args, **kwargs)
