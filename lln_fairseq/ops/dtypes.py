"""In which precision attention is computed."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

_P = ParamSpec("_P")
_R = TypeVar("_R")


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays; everything else is computed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def without_autocast(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function of tensors that computes in the dtypes it says: autocast would round its products."""

    @functools.wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not torch._C._is_any_autocast_enabled():
            return function(*args, **kwargs)
        devices = {x.device.type for x in (*args, *kwargs.values()) if isinstance(x, Tensor)}
        off: Callable[..., _R] = function
        for device in filter(torch.amp.is_autocast_available, devices):
            off = functools.partial(_without_autocast_on, device, off)
        return off(*args, **kwargs)

    return wrapper


def _without_autocast_on(device: str, function: Callable[..., _R], *args: Any, **kwargs: Any) -> _R:
    with torch.autocast(device, enabled=False):  # not in an ExitStack: torch.compile cannot look into one
        return function(*args, **kwargs)
