"""How results lie in memory."""

import torch
from torch import Tensor


def fresh_result(x: Tensor) -> Tensor:
    """A tensor like x, in x's own layout if features are dense in it and batch and heads one dimension, as in fairseq's
    (T, B, C)."""
    result = torch.empty_like(x)
    one_dimension = x.shape[0] == 1 or result.stride(0) == x.shape[1] * result.stride(1)
    if one_dimension and result.stride(-1) == 1:
        return result
    return torch.empty_like(x, memory_format=torch.contiguous_format)
