"""What every operation refuses, and what every operation fills in."""

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_inputs(q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> None:
    """Raises ValueError unless q, k, v share shape (B, H, N, D), dtype and device, the mask is bool (B, N) or None."""
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
        raise ValueError(f"q, k, v and the mask must be on one device, got {devices}")


def check_block_size(block_size: int | None, head_dim: int) -> int:
    """The block size with its default, the head dimension, filled in; ValueError if it is below 1."""
    if block_size is None:
        return head_dim
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    return block_size


def check_dropout(dropout_p: float) -> float:
    """ValueError unless 0 <= p < 1."""
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")
    return dropout_p


def per_head(x: float | Tensor, q: Tensor, name: str) -> Tensor:
    """α or β as a float32 (float64 for float64 q) tensor of shape (B, H); ValueError if it does not broadcast."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if isinstance(x, int | float):
        x = torch.full((), x, dtype=dtype, device=q.device)  # by the device itself: a copy would wait for it
    else:
        x = torch.as_tensor(x, dtype=dtype, device=q.device)
    try:
        return x.expand(q.shape[:2])
    except RuntimeError:
        raise ValueError(
            f"{name} of shape {tuple(x.shape)} does not broadcast to (B, H) = {tuple(q.shape[:2])}"
        ) from None
