"""Linear layers with packed weights, for inference on a CPU."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lln_fairseq.ops.backends import is_traced_or_transformed
from lln_fairseq.ops.backends.cpu.linear import pack_weight, packed_linear


class PackedLinear(nn.Linear):
    """A linear layer that keeps a packed copy of its weight while it is used for inference on a CPU.

    Without gradients and outside training, it is computed in float32 by a C kernel with a packed weight; otherwise, or
    if the kernel does not support the weight, by torch. The parameters are those of nn.Linear. The copy is made again
    when the weight has changed, and is not part of a state dict, a pickle or a deep copy. One change is not noticed: a
    change in place through `weight.data` between two calls in evaluation mode. Call `train()` after it.

    `pack_linear_layers` turns the linear layers of a model into this class.
    """

    _packed: Tensor | None = None  # packed copy of _source
    _source: Tensor | None = None  # shares memory and version counter with the weight that was packed
    _version: int = -1  # version of _source when it was packed

    def forward(self, x: Tensor, gelu: bool = False) -> Tensor:
        """Apply the layer to x (..., in_features), and then GELU if `gelu` is true."""
        if self._can_use_kernel(x):
            packed = self._packed_weight()
            if packed is not None:
                return packed_linear(x, packed, self.bias, gelu)
        out = super().forward(x)
        if gelu:
            return F.gelu(out.float()).type_as(out)
        return out

    def train(self, mode: bool = True) -> "PackedLinear":
        """Set training or evaluation mode, and drop the packed copy: an optimizer may be about to change the weight."""
        self._drop_packed_weight()
        super().train(mode)
        return self

    def _apply(self, *args: object, **kwargs: object) -> "PackedLinear":
        """Drop the packed copy when the module is moved or converted, for which torch calls this method."""
        self._drop_packed_weight()
        super()._apply(*args, **kwargs)
        return self

    def __getstate__(self) -> dict[str, object]:
        """Return the attributes for pickling and deep copies, without the packed copy."""
        left_out = ("_packed", "_source", "_version")
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def _can_use_kernel(self, x: Tensor) -> bool:
        """Return True if no gradient, autocast or tracing needs torch's own operation for x."""
        return (
            not self.training
            and not torch.is_grad_enabled()
            and not is_traced_or_transformed(x, self.weight, self.bias)
            and x.dtype == torch.float32
            and x.device.type == "cpu"
            and x.shape[-1] == self.in_features
            and self.bias is not None
            and self.bias.dtype == torch.float32
            and not torch.is_autocast_enabled("cpu")
            and not self.weight.is_inference()  # such a weight does not count its changes
        )

    def _packed_weight(self) -> Tensor | None:
        """Return the packed copy of the weight as it is now, or None if the kernel does not support the weight."""
        weight = self.weight
        source = self._source
        is_current = source is not None and source.data_ptr() == weight.data_ptr() and weight._version == self._version
        if not is_current:
            self._packed = pack_weight(weight)
            self._source = weight.detach()
            self._version = weight._version
        return self._packed

    def _drop_packed_weight(self) -> None:
        self._packed = None
        self._source = None


def pack_linear_layers(model: nn.Module) -> None:
    """Turn all linear layers of a module into `PackedLinear`, in place. The parameters stay the same objects."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = PackedLinear
