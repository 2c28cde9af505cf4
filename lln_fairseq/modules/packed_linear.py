"""Linear layers with packed weights, in float32 or in 8 bits, for inference on a CPU."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lln_fairseq.ops.backends import is_traced_or_transformed

LARGEST_ACTIVATION = 127
LARGEST_WEIGHT = 63  # 7 bits: without VNNI instructions, pairs of products are added in 16 bits
TOKENS_PER_PIECE = 256  # and thread: the numbers of a piece stay in the cache
SMALLEST_SCALE = 1e-30  # for rows of zeros


class PackedLinear(nn.Linear):
    """A linear layer that keeps its weight in the order that oneDNN computes with, while it is used for inference.

    In evaluation mode and without gradients, float32 on a CPU is computed by oneDNN, which torch includes; everything
    else is computed as in nn.Linear. The parameters are those of nn.Linear. The packed copy is made again after the
    weight has changed, and is not part of a state dict, a pickle or a deep copy. One change is not noticed: a change in
    place through `weight.data` between two calls in evaluation mode. Call `train()` after it.

    `pack_linear_layers` turns the linear layers of a model into this class.
    """

    _packed: Any = None  # packed copy of _source
    _source: Tensor | None = None  # shares memory and version counter with the weight that was packed
    _version: int = -1  # version of _source when it was packed

    def forward(self, x: Tensor, gelu: bool = False) -> Tensor:
        """Apply the layer to x (..., in_features), and then GELU if `gelu` is true."""
        if self._can_use_packed_weight(x):
            return self._multiply(x, gelu)
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

    def _multiply(self, x: Tensor, gelu: bool) -> Tensor:
        """Apply the layer with its packed weight to x (..., in_features), and then GELU if `gelu` is true."""
        activation = "none"
        algorithm = ""
        if gelu:
            activation = "gelu"
            algorithm = "none"  # exact, not the approximation by tanh
        return torch.ops.mkldnn._linear_pointwise(x, self._packed_weight(), self.bias, activation, [], algorithm)

    def _pack(self, weight: Tensor) -> Any:
        """Return the packed copy of a weight (out_features, in_features)."""
        return torch.ops.mkldnn._reorder_linear_weight(weight)

    def _packed_weight(self) -> Any:
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
            self._packed = self._pack(self._source)
            self._version = weight._version
        return self._packed


class Int8Linear(PackedLinear):
    """A packed linear layer that multiplies whole numbers of 8 bits instead of float32.

    Weights have one scale for each output feature and 7 bits, so that no processor overflows. The inputs are quantized
    at each call, with one scale for each token, so that the result of a token does not depend on the other tokens.
    Where PackedLinear computes as nn.Linear, so does this class.

    `quantize_linear_layers` turns the linear layers of a model into this class.
    """

    def _can_use_packed_weight(self, x: Tensor) -> bool:
        # For one input feature, torch._int_mm returns garbage, see `quantize_rows`.
        return self.in_features > 1 and super()._can_use_packed_weight(x)

    def _multiply(self, x: Tensor, gelu: bool) -> Tensor:
        weight, scales = self._packed_weight()
        bias = torch.zeros_like(scales) if self.bias is None else self.bias
        tokens = x.reshape(-1, self.in_features)
        out = x.new_empty(len(tokens), self.out_features)
        piece_size = TOKENS_PER_PIECE * torch.get_num_threads()
        for piece, out_piece in zip(tokens.split(piece_size), out.split(piece_size), strict=True):
            numbers, token_scales = quantize_rows(piece, LARGEST_ACTIVATION)
            out_piece.copy_(torch._int_mm(numbers, weight.t())).mul_(token_scales)
            torch.addcmul(bias, out_piece, scales, out=out_piece)
            if gelu:
                torch.ops.aten.gelu_(out_piece)
        return out.view(*x.shape[:-1], self.out_features)

    def _pack(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the quantized weight, int8 (out_features, in_features), and its scales (out_features,)."""
        numbers, scales = quantize_rows(weight, LARGEST_WEIGHT)
        return numbers, scales.squeeze(-1)


def quantize_rows(x: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Return int8 numbers (rows, columns) from -largest to largest, and scales (rows, 1), with numbers * scales near x.

    The numbers have the strides (columns, 1). If x (rows, columns) has NaN or an infinity, the scale of that row is not
    finite.
    """
    scales = x.abs().amax(dim=1, keepdim=True).clamp_(min=SMALLEST_SCALE).div_(largest)
    # torch._int_mm returns garbage if a leading stride is too small, also that of a dimension of size 1, which
    # contiguous() keeps (https://github.com/pytorch/pytorch/issues/195066).
    return (x / scales).round_().to(torch.int8, memory_format=torch.contiguous_format), scales


def pack_linear_layers(model: nn.Module) -> None:
    """Turn all linear layers of a module into `PackedLinear`, in place. The parameters stay the same objects.

    Without oneDNN, as on some CPUs that are not x86, the model stays unchanged.
    """
    if not torch.backends.mkldnn.is_available():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = PackedLinear


def quantize_linear_layers(model: nn.Module) -> None:
    """Turn all linear layers of a module into `Int8Linear`, in place. The parameters stay the same objects."""
    for module in model.modules():
        if type(module) in (nn.Linear, PackedLinear):
            module.__class__ = Int8Linear
