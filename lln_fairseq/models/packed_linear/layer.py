"""Linear layers that a CPU computes in the fastest way it has, for inference.

`pack.pack_linear_layers` prepares a model. In evaluation mode and without gradients, float32 inputs on a CPU are
then multiplied with a copy of the weights in the order that the way needs (precisions.py). Everything else - training,
autocast, tracing, other dtypes and devices - is computed by nn.Linear as before, with the same parameters.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lln_fairseq.models.packed_linear.precisions import Way
from lln_fairseq.ops.dispatch import is_traced_or_transformed


class PackedWeights:
    """The weights of linear layers with the same input, side by side in a packed copy.

    The copy is made at the first use, and again after a parameter has changed. It is not part of a pickle or a deep
    copy. One change is not noticed: a change in place through `weight.data` between two calls in evaluation mode. Call
    `train()` on the model after it.

    Args:
        layers: the layers, whose parameters are read at each call.
        way: the class of the way in which they are computed.
    """

    def __init__(self, layers: Sequence[nn.Linear], way: type[Way]) -> None:
        self.layers = layers
        self.way = way
        self._packed: Way | None = None
        self._sources: list[Tensor] = []  # share memory and version counter with the parameters that were packed
        self._versions: list[int] = []

    def can_multiply(self, x: Tensor) -> bool:
        """Return True if no gradient, autocast or tracing needs torch's own operation for x (..., in_features)."""
        if torch.is_grad_enabled() or is_traced_or_transformed(x, *self._parameters()):
            return False
        if x.dtype not in (torch.float32, self.way.gelu_dtype):
            return False
        if x.device.type != "cpu" or x.numel() == 0 or torch.is_autocast_enabled("cpu"):
            return False
        for layer in self.layers:
            weight = layer.weight
            is_usable = (
                not layer.training
                and weight.dtype == torch.float32
                and weight.device.type == "cpu"
                and x.shape[-1] == layer.in_features
                and not weight.is_inference()  # such a weight does not count its changes
                and not (len(self.layers) > 1 and has_hooks(layer))  # hooks want the output of their layer
            )
            if not is_usable:
                return False
        return True

    def multiply(self, x: Tensor, gelu: bool = False) -> Tensor:
        """Return the outputs of the layers for x, side by side, (..., sum of out_features), after GELU if requested."""
        parameters = self._parameters()
        if self._packed is None or not self._is_current(parameters):
            self._sources = [parameter.detach() for parameter in parameters]
            self._versions = [parameter._version for parameter in parameters]
            weights: list[Tensor] = [layer.weight for layer in self.layers]
            biases: list[Tensor] = [_bias(layer) for layer in self.layers]
            self._packed = self.way(_join(weights), _join(biases))
        return self._packed(x, gelu)

    def forget(self) -> None:
        self._packed = None
        self._sources = []

    def _parameters(self) -> list[Tensor]:
        parameters: list[Tensor] = []
        for layer in self.layers:
            parameters.append(layer.weight)
            if layer.bias is not None:
                parameters.append(layer.bias)
        return parameters

    def _is_current(self, parameters: list[Tensor]) -> bool:
        if len(parameters) != len(self._sources):
            return False
        for parameter, source, version in zip(parameters, self._sources, self._versions, strict=True):
            if parameter.data_ptr() != source.data_ptr() or parameter._version != version:
                return False
        return True

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": None, "_sources": [], "_versions": []}


class PackedLinear(nn.Linear):
    """A linear layer that is computed with packed weights where that is possible; see the module."""

    packed: PackedWeights

    def forward(self, x: Tensor, gelu: bool = False) -> Tensor:
        """Apply the layer to x (..., in_features), and then GELU if `gelu` is true."""
        if self.packed.can_multiply(x):
            return self.packed.multiply(x, gelu)
        out = super().forward(x)
        if gelu:
            return F.gelu(out.float()).type_as(out)
        return out

    def train(self, mode: bool = True) -> "PackedLinear":
        """Set training or evaluation mode, and drop the packed copy: an optimizer may be about to change the weight."""
        self.packed.forget()
        super().train(mode)
        return self

    def _apply(self, *args: object, **kwargs: object) -> "PackedLinear":
        """Drop the packed copy when the module is moved or converted, for which torch calls this method."""
        self.packed.forget()
        super()._apply(*args, **kwargs)
        return self


def has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _join(tensors: list[Tensor]) -> Tensor:
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat(tensors)


def _bias(layer: nn.Linear) -> Tensor:
    """Return the bias (out_features), which is zero for a layer without one."""
    if layer.bias is None:
        return torch.zeros(layer.out_features)
    return layer.bias
