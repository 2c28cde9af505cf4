"""Inputs, error measures and tolerances that the tests of attention share."""

import pytest
import torch

from lln_fairseq.ops.backends import cpu

# Limits for the relative RMS error. Results in float32 are compared with a float64 oracle. The error in half precision
# must be at most factor * error + floor, where error is that of the plain PyTorch formula in the same type.
FLOAT32_FORWARD = 1e-5
FLOAT32_GRADIENT = 1e-4
HALF_FORWARD_FACTOR = 2.0
HALF_GRADIENT_FACTOR = 3.0
HALF_FLOOR = 1e-5

HEAD_DIMS = (32, 64, 128)


def relative_rms(actual, expected):
    """Return the RMS error of `actual` divided by the RMS of `expected`, in float64.

    If `expected` is zero everywhere, the RMS error itself is returned.
    """
    actual = actual.detach().double()
    expected = expected.detach().double()
    error = (actual - expected).square().mean().sqrt()
    scale = expected.square().mean().sqrt()
    if scale > 0:
        error = error / scale
    return error.item()


def random_qkv(batch=2, heads=3, length=97, dim=32, dtype=torch.float32, scale=1.0, seed=0, device="cpu"):
    """Return independent normal q, k, v of shape (B, H, N, D) with the standard deviation `scale`."""
    generator = torch.Generator().manual_seed(seed)
    shape = (3, batch, heads, length, dim)
    q, k, v = (scale * torch.randn(shape, generator=generator)).to(device=device, dtype=dtype)
    return q, k, v


def random_padding(batch, length, seed=0, full_row=False, device="cpu"):
    """Return a mask of padding on the right, bool (B, N), True = padded, with a random number of tokens in each row.

    Every row has at least one token; but `full_row` pads the last row entirely.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, length + 1, (batch,), generator=generator)
    if full_row:
        lengths[-1] = 0
    return (torch.arange(length)[None, :] >= lengths[:, None]).to(device)


class Payload:
    """An object whose unpickling prints "executed"."""

    def __reduce__(self):
        return print, ("executed",)


def poison_empty(monkeypatch):
    """Let torch.empty and torch.empty_like return NaN, so that elements that are never written are noticed."""
    vars(cpu.THREAD).clear()  # the scratch memory
    for name in ("empty", "empty_like"):
        original = getattr(torch, name)

        def poisoned(*args, _original=original, **options):
            return _original(*args, **options).fill_(torch.nan)

        monkeypatch.setattr(torch, name, poisoned)


def with_representatives(values, *representatives):
    """Return the values as parameters of a test, of which all but the representatives are marked as exhaustive."""
    assert set(representatives) <= set(values)
    parameters = []
    for value in values:
        if value in representatives:
            parameters.append(value)
        else:
            parameters.append(pytest.param(value, marks=pytest.mark.exhaustive))
    return parameters
