"""Skyformer against the Gaussian kernel itself and the paper's formula."""

import pytest
import torch

from lln_fairseq.attention import Context, build_attention
from tests.helpers import random_qkv, relative_rms


def build(**options):
    return build_attention("skyformer", num_heads=3, head_dim=32, max_positions=64, **options).eval()


def kappa(x, y):
    return torch.exp(-(x[..., :, None, :] - y[..., None, :, :]).square().sum(dim=-1) / (2 * 32**0.5))


@pytest.fixture
def mask():
    """Padding on the right of one sequence and on the left of the other, bool (2, 40)."""
    mask = torch.zeros(2, 40, dtype=torch.bool)
    mask[0, 20:] = True
    mask[1, :5] = True
    return mask


def test_all_tokens_as_landmarks_give_the_exact_kernel():
    q, k, v = random_qkv(length=30, dtype=torch.float64)
    mask = torch.arange(30) >= torch.tensor([30, 12])[:, None]
    expected = kappa(q, k).masked_fill(mask[:, None, None, :], 0.0) @ v
    attention = build(landmarks=30, gamma=1e-9, iterations=40)
    assert relative_rms(attention(q, k, v, Context(mask)), expected) < 1e-6


def test_matches_formula(mask):
    q, k, v = random_qkv(length=40, dtype=torch.float64)
    out = build(landmarks=8)(q, k, v, Context(mask))
    # The published six iterations only approximate the inverse. More iterations reach it.
    converged = build(landmarks=8, iterations=30)(q, k, v, Context(mask))
    for b in range(2):
        real = (~mask[b]).nonzero()[:, 0]
        middle = real[[(2 * j + 1) * len(real) // 16 for j in range(8)]]  # the middle tokens of 8 segments
        s = torch.cat([q[b][:, middle], k[b][:, middle]], dim=1)
        m = kappa(s, s) + 0.1 * torch.eye(16, dtype=torch.float64)
        context = torch.linalg.solve(m, kappa(s, k[b][:, real]) @ v[b][:, real])
        expected = kappa(q[b][:, real], s) @ context
        assert relative_rms(converged[b][:, real], expected) < 1e-12
        assert relative_rms(out[b][:, real], expected) < 0.05


def test_training_samples_one_real_token_of_each_segment(mask):
    attention = build(landmarks=8).train()
    q, _, _ = random_qkv(length=40)
    samples = torch.stack([attention.landmark_positions(q, mask) for _ in range(300)])
    assert set(samples[:, 0].flatten().tolist()) == set(range(20))
    assert set(samples[:, 1].flatten().tolist()) == set(range(5, 40))
    segment = samples[:, 0] * 8 // 20
    assert segment.sub(torch.arange(8)).abs().max() <= 1


def test_gradients_are_finite_with_fewer_tokens_than_landmarks():
    attention = build(landmarks=16).train()
    inputs = [x.requires_grad_() for x in random_qkv(length=3)]
    attention(*inputs).sum().backward()
    assert all(x.grad.isfinite().all() and x.grad.abs().sum() > 0 for x in inputs)
