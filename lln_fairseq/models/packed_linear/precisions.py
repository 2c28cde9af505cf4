"""The ways in which torch computes linear layers on a CPU without gradients: in float32, bfloat16 and int8.

No way is the fastest on every processor: choice.py times them on the one at hand. To add a way, write a class
and list it in WAYS.
"""

import functools
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

FLOAT32 = "float32"
TOKENS_PER_PIECE = 256  # and thread: the numbers of a piece stay in the cache
SMALLEST_SCALE = 1e-30  # for rows in which all numbers are the same

Shape = tuple[int, int]  # of a weight: (out_features, in_features)


class Way:
    """Computes x Wᵀ + b with a copy of the weight W in the order in which the way multiplies.

    Args:
        weight: (out_features, in_features) float32.
        bias: (out_features) float32.
    """

    precision: ClassVar[str] = FLOAT32
    gelu_dtype: ClassVar[torch.dtype] = torch.float32  # of results after GELU; inputs can have it, too

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor, gelu: bool = False) -> Tensor:
        """Return the result for x (..., in_features) in float32, or after GELU in `gelu_dtype` if `gelu` is true."""
        raise NotImplementedError


class TorchWay(Way):
    """nn.Linear's own product, which MKL computes on most processors."""

    def __call__(self, x: Tensor, gelu: bool = False) -> Tensor:
        out = F.linear(x, self.weight, self.bias)
        return torch.ops.aten.gelu_(out) if gelu else out


class OneDNNWay(Way):
    """oneDNN's product with a weight in its own order."""

    dtype: ClassVar[torch.dtype] = torch.float32

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.to(self.dtype))
        self.bias = bias.to(self.dtype)

    def __call__(self, x: Tensor, gelu: bool = False) -> Tensor:
        out = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        # With AVX2 only, oneDNN's own GELU makes the product of 128 tokens and 1,536 features 18 % slower.
        return torch.ops.aten.gelu_(out) if gelu else out


class BFloat16Way(OneDNNWay):
    """oneDNN's product of numbers that are rounded to bfloat16; their sums are float32, and the result is rounded."""

    precision = "bfloat16"
    dtype = torch.bfloat16
    gelu_dtype = torch.bfloat16  # the next layer would round it anyway

    def __call__(self, x: Tensor, gelu: bool = False) -> Tensor:
        activation = "gelu" if gelu else "none"
        algorithm = "none" if gelu else ""  # "none" is the exact GELU, not its approximation by tanh
        x = x.to(self.dtype)
        out = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, activation, [], algorithm)
        return out.to(self.gelu_dtype if gelu else torch.float32)


class Int8Way(Way):
    """The product of whole numbers of 8 bits.

    Weights have one scale for each output feature. The inputs are quantized at each call, with a scale and a smallest
    number for each token, so that the result of a token does not depend on the other tokens. With x = s n + c for the
    numbers n of a token and w = t m for those of an output feature, x · w = s t Σ n m + c t Σ m.
    """

    precision = "int8"
    lowest: ClassVar[int]  # of the numbers of the inputs, which have 256 values
    dtype: ClassVar[torch.dtype]

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self.weight_scales = weight.abs().amax(dim=1).clamp(min=SMALLEST_SCALE) / self.largest_weight()
        numbers = (weight / self.weight_scales[:, None]).round().to(torch.int8)
        self.weight_sums = numbers.float().sum(dim=1) * self.weight_scales
        self.bias = bias
        self.weight = self.pack(numbers)

    @classmethod
    @functools.cache
    def largest_weight(cls) -> int:
        """Return the largest magnitude of a quantized weight: 127, or 63 where sums of two products overflow 16 bits.

        The first call finds out by trying, and its result is kept for all later ones.
        """
        features = 256
        way = cls.__new__(cls)
        way.weight_scales = torch.ones(features)
        way.weight = way.pack(torch.full((features, features), 127, dtype=torch.int8))
        for number in (cls.lowest, cls.lowest + 255):
            out = way.multiply(torch.full((16, features), number, dtype=cls.dtype))
            if not out.eq(number * 127 * features).all():
                return 63
        return 127

    def __call__(self, x: Tensor, gelu: bool = False) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        out = tokens.new_empty(len(tokens), len(self.bias))
        piece_size = TOKENS_PER_PIECE * torch.get_num_threads()
        for piece, out_piece in zip(tokens.split(piece_size), out.split(piece_size), strict=True):
            numbers, scales, offsets = quantize_rows(piece, self.lowest, self.dtype)
            torch.addcmul(self.bias, self.multiply(numbers), scales, out=out_piece)
            out_piece.addcmul_(offsets, self.weight_sums)
            if gelu:
                torch.ops.aten.gelu_(out_piece)
        return out.view(*x.shape[:-1], out.shape[-1])

    def pack(self, numbers: Tensor) -> Tensor:
        """Return the int8 numbers of the weight (out_features, in_features) as `multiply` needs them."""
        raise NotImplementedError

    def multiply(self, numbers: Tensor) -> Tensor:
        """Return Σ n m times the scales of the weight, float32 (tokens, out_features)."""
        raise NotImplementedError


class QLinearWay(Int8Way):
    """The product of oneDNN's quantized linear layer."""

    lowest = 0
    dtype = torch.uint8

    def pack(self, numbers: Tensor) -> Tensor:
        self.zero_points = torch.zeros(len(numbers), dtype=torch.int32)
        return torch.ops.onednn.qlinear_prepack(numbers, None)

    def multiply(self, numbers: Tensor) -> Tensor:
        result_settings: tuple = (1.0, 0, torch.float32, "none", [], "")  # scale, zero point and type, no activation
        return torch.ops.onednn.qlinear_pointwise(
            numbers, 1.0, 0, self.weight, self.weight_scales, self.zero_points, None, *result_settings
        )


class IntMMWay(Int8Way):
    """torch's product of int8 matrices."""

    lowest = -128
    dtype = torch.int8

    def pack(self, numbers: Tensor) -> Tensor:
        return row_major(numbers.t(), torch.int8)

    def multiply(self, numbers: Tensor) -> Tensor:
        return torch._int_mm(numbers, self.weight).float().mul_(self.weight_scales)


WAYS: dict[str, type[Way]] = {
    "torch": TorchWay,
    "onednn": OneDNNWay,
    "bfloat16": BFloat16Way,
    "qlinear": QLinearWay,
    "int_mm": IntMMWay,
}


def quantize_rows(x: Tensor, lowest: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize each row of x (rows, columns) to 256 whole numbers from `lowest` on.

    The result is the numbers (rows, columns) in row-major order, and scales and offsets (rows, 1), with numbers *
    scales + offsets near x. If x has NaN or an infinity, the scale of that row is not finite.
    """
    smallest = x.amin(dim=1, keepdim=True)
    scales = x.amax(dim=1, keepdim=True).sub_(smallest).div_(255).clamp_(min=SMALLEST_SCALE)
    offsets = smallest.sub_(scales, alpha=lowest)
    numbers = torch.sub(x, offsets).div_(scales).round_()
    return row_major(numbers, dtype), scales, offsets


def row_major(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of x (rows, columns) in another dtype, with the strides (columns, 1).

    torch._int_mm returns garbage if a leading stride is too small, also that of a dimension of size 1, which
    contiguous() keeps (https://github.com/pytorch/pytorch/issues/195066).
    """
    return torch.empty(x.shape, dtype=dtype).copy_(x)
