"""Nyströmformer against the paper's formula, exact softmax and an exact pseudo-inverse."""

import pytest
import torch

from lln_fairseq.attention import build_attention
from lln_fairseq.ops import reference
from tests.helpers import random_qkv, relative_rms


def build(**options):
    return build_attention("nystrom", num_heads=3, head_dim=32, max_positions=300, **options).eval()


def softmax(x, y):
    return (x @ y.mT / x.shape[-1] ** 0.5).softmax(dim=-1)


def test_matches_formula():
    q, k, v = random_qkv(batch=1, heads=3, length=120, dtype=torch.float64)
    q_mean = q.reshape(1, 3, 8, 15, 32).mean(dim=3)
    k_mean = k.reshape(1, 3, 8, 15, 32).mean(dim=3)
    a = softmax(q_mean, k_mean)
    eye = torch.eye(8, dtype=torch.float64)
    norms = torch.linalg.matrix_norm(a, 1) * torch.linalg.matrix_norm(a, torch.inf)
    z = a.mT / norms[..., None, None]
    for _ in range(6):
        z = 0.25 * z @ (13 * eye - a @ z @ (15 * eye - a @ z @ (7 * eye - a @ z)))
    left = softmax(q, k_mean)
    right = softmax(q_mean, k) @ v
    assert relative_rms(build(landmarks=8)(q, k, v), left @ z @ right) < 1e-12
    assert relative_rms(build(landmarks=8, iterations=30)(q, k, v), left @ torch.linalg.pinv(a) @ right) < 1e-10


def test_short_sequences_get_exact_softmax_also_next_to_long_ones():
    q, k, v = random_qkv(batch=4, length=97, dtype=torch.float64)
    mask = torch.arange(97) >= torch.tensor([97, 20, 3, 0])[:, None]
    expected = reference.softmax_matrix(q, k, mask) @ v
    out = build(landmarks=20)(q, k, v, mask)
    torch.testing.assert_close(out[1:], expected[1:])
    assert relative_rms(out[0], expected[0]) > 0.1
    torch.testing.assert_close(build(landmarks=97)(q, k, v, mask), expected)


def test_position_of_padding_does_not_matter():
    attention = build(landmarks=7)
    q, k, v = random_qkv(length=50)
    mask = torch.zeros(2, 50, dtype=torch.bool)
    mask[:, [0, 3, 4, 20, 49]] = True
    is_real = ~mask[0]
    padded = attention(q, k, v, mask)[:, :, is_real]
    unpadded = attention(*(x[:, :, is_real] for x in (q, k, v)))
    torch.testing.assert_close(padded, unpadded, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_as_accurate_as_its_rounded_inputs(dtype):
    attention = build(landmarks=32)
    inputs = [x.double() for x in random_qkv(length=256, dtype=dtype)]
    exact = attention.double()(*inputs)
    error = relative_rms(attention.float()(*(x.to(dtype) for x in inputs)), exact)
    # The error of inputs that are off by half a unit in the last place.
    half_unit = torch.finfo(dtype).eps / 2
    perturbed = [x * (1 + half_unit * torch.randn_like(x)) for x in inputs]
    assert error <= 2 * relative_rms(attention.double()(*perturbed), exact)
