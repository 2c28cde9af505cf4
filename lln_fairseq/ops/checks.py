"""Checks of the inputs of the attention functions, and defaults that depend on their shapes."""

import torch
from torch import Tensor

from lln_fairseq.ops.dtypes import compute_dtype

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_inputs(q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> None:
    """Raise ValueError if the inputs of an attention function do not fit together.

    Args:
        q, k, v: must all have the same shape (B, H, N, D) with D > 0, the same dtype, one of DTYPES, and the same
            device.
        key_padding_mask: must be None, or bool (B, N) on the device of q.
    """
    mask = key_padding_mask
    if q.dim() != 4 or q.shape != k.shape or q.shape != v.shape or q.shape[3] == 0:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(f"q, k, v must share one shape (B, H, N, D) with D > 0, got {shapes}")
    if not (q.dtype == k.dtype == v.dtype and q.dtype in DTYPES):
        names = ", ".join(str(x).removeprefix("torch.") for x in DTYPES)
        raise ValueError(f"q, k, v must share one floating-point dtype of {names}, got {q.dtype}, {k.dtype}, {v.dtype}")
    expected = (q.shape[0], q.shape[2])
    if mask is not None and (mask.dtype != torch.bool or mask.shape != expected):
        raise ValueError(
            f"key_padding_mask must be bool of shape (B, N) = {expected}, got {mask.dtype} of {tuple(mask.shape)}"
        )
    if not (q.device == k.device == v.device and (mask is None or mask.device == q.device)):
        devices = ", ".join(str(x.device) for x in (q, k, v, mask) if x is not None)
        raise ValueError(f"q, k, v and key_padding_mask must be on one device, got {devices}")


def check_block_size(block_size: int | None, head_dim: int) -> int:
    """Return block_size, or head_dim if block_size is None. Raise ValueError if block_size is below 1."""
    if block_size is None:
        return head_dim
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    return block_size


def check_dropout(dropout_p: float) -> None:
    """Raise ValueError unless 0 <= dropout_p < 1."""
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")


def scalar_per_head(x: float | Tensor, q: Tensor, name: str) -> Tensor:
    """Return a parameter of the heads, such as α, as a tensor with one value for each sequence and head.

    Args:
        x: a number, or a tensor that broadcasts to (B, H).
        q: (B, H, N, D).
        name: the name of the argument x, for the error message.

    Returns: (B, H) on the device of q, in float32, or in float64 if q is float64. If x is a tensor with that dtype and
        device, the result is a view of x.
    Raises: ValueError if x does not broadcast to (B, H).
    """
    dtype = compute_dtype(q.dtype)
    if isinstance(x, int | float):
        # Created on the device, because a copy from the host would wait for the device.
        x = torch.full((), x, dtype=dtype, device=q.device)
    else:
        x = torch.as_tensor(x, dtype=dtype, device=q.device)
    try:
        return x.expand(q.shape[:2])
    except RuntimeError:
        raise ValueError(
            f"{name} of shape {tuple(x.shape)} does not broadcast to (B, H) = {tuple(q.shape[:2])}"
        ) from None
