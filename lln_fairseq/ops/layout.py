"""The memory layout of results."""

import torch
from torch import Tensor


def fresh_result(x: Tensor) -> Tensor:
    """Return an uninitialized tensor with the shape, dtype and device of x (B, H, N, D).

    The memory layout is that of torch.empty_like if it has dense features and if batch and heads can be viewed as one
    dimension. Heads cut from fairseq's (T, B, C) have such a layout. For any other layout, the result is contiguous.
    """
    result = torch.empty_like(x)
    is_one_dimension = x.shape[0] == 1 or result.stride(0) == x.shape[1] * result.stride(1)
    if is_one_dimension and result.stride(-1) == 1:
        return result
    return torch.empty_like(x, memory_format=torch.contiguous_format)
