"""What the tests of attention share: inputs, error measures and the one table of tolerances."""

import pytest
import torch

from lln_fairseq.ops.scratch import forget_scratch

# Relative RMS error. float32 is measured against a float64 oracle; half precision against the error that the
# plain PyTorch formula makes in the same dtype: error <= factor * that + floor.
FLOAT32_FORWARD = 1e-5
FLOAT32_GRADIENT = 1e-4
HALF_FORWARD_FACTOR = 2.0
HALF_GRADIENT_FACTOR = 3.0
HALF_FLOOR = 1e-5

HEAD_DIMS = (32, 64, 128)


def relative_rms(actual, expected):
    """√(mean (actual - expected)² / mean expected²) in float64; the plain RMS error where expected is all zero."""
    actual, expected = actual.detach().double(), expected.detach().double()
    scale = expected.square().mean().sqrt()
    return ((actual - expected).square().mean().sqrt() / (scale if scale > 0 else 1.0)).item()


def random_qkv(batch=2, heads=3, length=97, dim=32, dtype=torch.float32, scale=1.0, seed=0, device="cpu"):
    """Independent standard normal q, k, v of shape (B, H, N, D), times `scale`."""
    generator = torch.Generator().manual_seed(seed)
    shape = (3, batch, heads, length, dim)
    q, k, v = (scale * torch.randn(shape, generator=generator)).to(device=device, dtype=dtype)
    return q, k, v


def random_padding(batch, length, seed=0, full_row=False, device="cpu"):
    """Right padding of random length per row, bool (B, N), True = padded; `full_row` pads the last row entirely."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, length + 1, (batch,), generator=generator)
    if full_row:
        lengths[-1] = 0
    return (torch.arange(length)[None, :] >= lengths[:, None]).to(device)


def poison_empty(monkeypatch):
    """Fills torch.empty and torch.empty_like with NaN, so that a result that is not written shows."""
    forget_scratch()
    for name in ("empty", "empty_like"):
        original = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda *args, _original=original, **kw: _original(*args, **kw).fill_(torch.nan)
        )


def with_representatives(values, *representatives):
    """Return the values as parameters of a test, all but the representatives marked as exhaustive."""
    parameters = []
    for value in values:
        if value in representatives:
            parameters.append(value)
        else:
            parameters.append(pytest.param(value, marks=pytest.mark.exhaustive))
    return parameters


def metrics_of(task_metric: str) -> tuple[str, ...]:
    """The names of this module's metrics that a sentence such as "accuracy, F1 of class 1" mentions."""
    words = {"accuracy": "accuracy", "F1": "f1", "Matthews": "mcc", "Pearson": "pearson", "Spearman": "spearman"}
    return tuple(name for word, name in words.items() if word in task_metric)
