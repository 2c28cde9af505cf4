"""Linear layers with packed weights, for inference on a CPU."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lln_fairseq.ops.backends import is_traced_or_transformed


class PackedLinear(nn.Linear):
    """A linear layer that keeps its weight in the order that oneDNN computes with, while it is used for inference.

    In evaluation mode and without gradients, float32 on a CPU is computed by oneDNN, which torch includes; everything
    else is computed as in nn.Linear. The parameters are those of nn.Linear. The packed copy is made again after the
    weight has changed, and is not part of a state dict, a pickle or a deep copy. One change is not noticed: a change in
    place through `weight.data` between two calls in evaluation mode. Call `train()` after it.

    `pack_linear_layers` turns the linear layers of a model into this class.
    """

    _packed: Tensor | None = None  # packed copy of _source
    _source: Tensor | None = None  # shares memory and version counter with the weight that was packed
    _version: int = -1  # version of _source when it was packed

    def forward(self, x: Tensor, gelu: bool = False) -> Tensor:
        """Apply the layer to x (..., in_features), and then GELU if `gelu` is true."""
        if self._can_use_packed_weight(x):
            activation = "none"
            algorithm = ""
            if gelu:
                activation = "gelu"
                algorithm = "none"  # exact, not the approximation by tanh
            return torch.ops.mkldnn._linear_pointwise(x, self._packed_weight(), self.bias, activation, [], algorithm)
        out = super().forward(x)
        if gelu:
            return F.gelu(out.float()).type_as(out)
        return out

    def train(self, mode: bool = True) -> "PackedLinear":
        """Set training or evaluation mode, and drop the packed copy: an optimizer may be about to change the weight."""
        self._packed = None
        super().train(mode)
        return self

    def _apply(self, *args: object, **kwargs: object) -> "PackedLinear":
        """Drop the packed copy when the module is moved or converted, for which torch calls this method."""
        self._packed = None
        super()._apply(*args, **kwargs)
        return self

    def __getstate__(self) -> dict[str, object]:
        """Return the attributes for pickling and deep copies, without the packed copy."""
        left_out = ("_packed", "_source", "_version")
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def _can_use_packed_weight(self, x: Tensor) -> bool:
        """Return True if no gradient, autocast or tracing needs torch's own operation for x."""
        return (
            not self.training
            and not torch.is_grad_enabled()
            and not is_traced_or_transformed(x, self.weight, self.bias)
            and x.device.type == "cpu"
            and x.dtype == self.weight.dtype == torch.float32
            and x.shape[-1] == self.in_features
            and x.numel() > 0
            and not torch.is_autocast_enabled("cpu")
            and not self.weight.is_inference()  # such a weight does not count its changes
        )

    def _packed_weight(self) -> Tensor:
        """Return the packed copy of the weight as it is now."""
        weight = self.weight
        is_current = (
            self._packed is not None
            and self._source is not None
            and self._source.data_ptr() == weight.data_ptr()
            and self._version == weight._version
        )
        if not is_current:
            self._source = weight.detach()
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self._source)
            self._version = weight._version
        assert self._packed is not None
        return self._packed


def pack_linear_layers(model: nn.Module) -> None:
    """Turn all linear layers of a module into `PackedLinear`, in place. The parameters stay the same objects.

    Without oneDNN, as on some CPUs that are not x86, the model stays unchanged.
    """
    if not torch.backends.mkldnn.is_available():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = PackedLinear
