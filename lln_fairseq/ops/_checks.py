"""What every operation refuses, and what every operation fills in."""

import torch
from torch import Tensor


def check_inputs(q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> None:
    """Raises ValueError unless q, k, v share shape (B, H, N, D), dtype and device, the mask is bool (B, N) or None."""
    if q.dim() != 4 or q.shape != k.shape or q.shape != v.shape:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(f"q, k, v must share one shape (B, H, N, D), got {shapes}")
    if not (q.dtype == k.dtype == v.dtype and q.dtype.is_floating_point):
        raise ValueError(f"q, k, v must share one floating-point dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    devices = [str(x.device) for x in (q, k, v, key_padding_mask) if x is not None]
    if len(set(devices)) > 1:
        raise ValueError(f"q, k, v and the mask must be on one device, got {', '.join(devices)}")
    mask, expected = key_padding_mask, (q.shape[0], q.shape[2])
    if mask is not None and (mask.dtype != torch.bool or mask.shape != expected):
        raise ValueError(
            f"key_padding_mask must be bool of shape (B, N) = {expected}, got {mask.dtype} of {tuple(mask.shape)}"
        )


def check_block_size(block_size: int | None, head_dim: int) -> int:
    """The block size with its default, the head dimension, filled in; ValueError below 1."""
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


def dropout_seed(dropout_p: float) -> int:
    """A seed from torch's global CPU generator: torch.manual_seed and activation checkpointing then reproduce it."""
    return int(torch.randint(2**31 - 1, ())) if dropout_p > 0 else 0


def per_head(x: float | Tensor, q: Tensor, name: str) -> Tensor:
    """α or β as a float32 (float64 for float64 q) tensor of shape (B, H); ValueError if it does not broadcast."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    x = torch.as_tensor(x, dtype=dtype, device=q.device)
    try:
        return x.expand(q.shape[:2])
    except RuntimeError:
        raise ValueError(
            f"{name} of shape {tuple(x.shape)} does not broadcast to (B, H) = {tuple(q.shape[:2])}"
        ) from None
