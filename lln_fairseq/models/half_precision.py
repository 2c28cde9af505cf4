"""Half precision on a GPU: which dtype, and layers of a model that compute in it."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def half_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16, or float16 for a GPU below compute capability 8.0, which emulates bfloat16."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return torch.float16
    return torch.bfloat16


def bfloat16_on_gpu(device: torch.device) -> AbstractContextManager:
    """Return autocast to bfloat16 for a GPU that computes it, to train weights in float32; otherwise an empty context.

    Older GPUs would need float16, with which small gradients vanish unless the loss is scaled.
    """
    if device.type == "cuda" and half_dtype(device) == torch.bfloat16:
        return torch.autocast("cuda", torch.bfloat16)
    return nullcontext()


def convert_layers(layers: nn.ModuleList, dtype: torch.dtype) -> None:
    """Convert the layers of an encoder in place. What the first one gets and the last one returns stays in float32.

    So the embeddings, the heads and the outputs keep their precision. Call it once, for a model that is not trained.
    """
    layers.to(dtype)
    layers[0].register_forward_pre_hook(partial(_cast_input, dtype))
    layers[-1].register_forward_hook(_return_float32)


def _cast_input(dtype: torch.dtype, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    x, *others = inputs
    return (x.to(dtype), *others)


def _return_float32(_: nn.Module, __: tuple[Any, ...], out: Tensor) -> Tensor:
    return out.float()
