"""Nyströmformer against the paper's formula, exact softmax and an exact pseudo-inverse."""

import pytest
import torch

from lln_fairseq.attention import Context, build_attention
from lln_fairseq.ops import reference
from tests.helpers import random_padding, random_qkv, relative_rms


def build(**options):
    return build_attention("nystrom", num_heads=3, head_dim=32, max_positions=300, **options).eval()


def softmax(x, y):
    return (x @ y.mT / x.shape[-1] ** 0.5).softmax(dim=-1)


def iterated_inverse(a, iterations):
    eye = torch.eye(a.shape[-1], dtype=a.dtype)
    norms = torch.linalg.matrix_norm(a, 1) * torch.linalg.matrix_norm(a, torch.inf)
    z = a.mT / norms[..., None, None]
    for _ in range(iterations):
        z = 0.25 * z @ (13 * eye - a @ z @ (15 * eye - a @ z @ (7 * eye - a @ z)))
    return z


def formula(q, k, v, landmarks, inverse):
    """Compute the attention of one sequence without padding, q, k, v (H, n, D) with more than `landmarks` tokens."""
    segment = torch.arange(q.shape[1]) * landmarks // q.shape[1]
    q_mean = torch.stack([q[:, segment == j].mean(dim=1) for j in range(landmarks)], dim=1)
    k_mean = torch.stack([k[:, segment == j].mean(dim=1) for j in range(landmarks)], dim=1)
    return softmax(q, k_mean) @ inverse(softmax(q_mean, k_mean)) @ (softmax(q_mean, k) @ v)


@pytest.mark.parametrize("length", [120, 97])  # segments of one length, and of two lengths
@pytest.mark.parametrize("padded", [False, True])
def test_matches_formula(length, padded):
    q, k, v = random_qkv(heads=3, length=length, dtype=torch.float64)
    mask = None
    is_real = torch.ones(2, length, dtype=torch.bool)
    if padded:
        is_real[0, 70:] = False
        is_real[1, [0, 1, 20, 50]] = False
        mask = ~is_real

    out = build(landmarks=8)(q, k, v, Context(mask))
    converged = build(landmarks=8, iterations=30)(q, k, v, Context(mask))

    # The weights of segments of unequal lengths, or with padding, are rounded to float32.
    tolerance = 1e-10 if length == 120 and not padded else 1e-6
    for b in range(2):
        real = is_real[b]
        sequence = (q[b][:, real], k[b][:, real], v[b][:, real])
        assert relative_rms(out[b][:, real], formula(*sequence, 8, lambda a: iterated_inverse(a, 6))) < tolerance
        assert relative_rms(converged[b][:, real], formula(*sequence, 8, torch.linalg.pinv)) < tolerance


def test_convolution_adds_weighted_neighbors_of_each_head():
    q, k, v = random_qkv(heads=3, length=40, dtype=torch.float64)
    mask = random_padding(2, 40)
    attention = build(landmarks=8, conv_kernel=5).double()
    values = v.masked_fill(mask[:, None, :, None], 0.0)
    expected = build(landmarks=8)(q, k, v, Context(mask))
    for i in range(40):
        for t in range(5):
            j = i + t - 2
            if 0 <= j < 40:
                expected[:, :, i] += attention.conv.weight[:, 0, t] * values[:, :, j]
    torch.testing.assert_close(attention(q, k, v, Context(mask)), expected)


def test_short_sequences_get_exact_softmax_also_next_to_long_ones():
    q, k, v = random_qkv(batch=4, length=97, dtype=torch.float64)
    mask = torch.arange(97) >= torch.tensor([97, 20, 3, 0])[:, None]
    expected = reference.softmax_matrix(q, k, mask) @ v
    out = build(landmarks=20)(q, k, v, Context(mask))
    torch.testing.assert_close(out[1:], expected[1:])
    assert relative_rms(out[0], expected[0]) > 0.1
    torch.testing.assert_close(build(landmarks=97)(q, k, v, Context(mask)), expected)


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
