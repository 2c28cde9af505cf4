"""Nyströmformer against the paper's formula, softmax and a true pseudo-inverse."""

import pytest
import torch

from lln_fairseq.attention import build_attention
from lln_fairseq.ops import reference
from tests.helpers import random_qkv, relative_rms


def build(**options):
    return build_attention("nystrom", num_heads=3, head_dim=32, max_positions=300, **options).eval()


def softmax(x, y):
    return (x @ y.mT / x.shape[-1] ** 0.5).softmax(dim=-1)


def test_the_formula_of_the_paper():
    q, k, v = random_qkv(batch=1, heads=3, length=120, dtype=torch.float64)
    q_mean, k_mean = (x.reshape(1, 3, 8, 15, 32).mean(dim=3) for x in (q, k))
    a, eye = softmax(q_mean, k_mean), torch.eye(8, dtype=torch.float64)
    norms = torch.linalg.matrix_norm(a, 1) * torch.linalg.matrix_norm(a, torch.inf)
    z = a.mT / norms[..., None, None]
    for _ in range(6):
        z = 0.25 * z @ (13 * eye - a @ z @ (15 * eye - a @ z @ (7 * eye - a @ z)))
    left, right = softmax(q, k_mean), softmax(q_mean, k) @ v
    assert relative_rms(build(landmarks=8)(q, k, v), left @ z @ right) < 1e-12
    assert relative_rms(build(landmarks=8, iterations=30)(q, k, v), left @ torch.linalg.pinv(a) @ right) < 1e-10


def test_short_sentences_get_softmax_beside_long_ones_too():
    q, k, v = random_qkv(batch=4, length=97, dtype=torch.float64)
    mask = torch.arange(97) >= torch.tensor([97, 20, 3, 0])[:, None]
    out, softmax_out = build(landmarks=20)(q, k, v, mask), reference.softmax_matrix(q, k, mask) @ v
    torch.testing.assert_close(out[1:], softmax_out[1:])
    assert relative_rms(out[0], softmax_out[0]) > 0.1
    torch.testing.assert_close(build(landmarks=97)(q, k, v, mask), softmax_out)


def test_the_place_of_the_padding_does_not_matter():
    attention, (q, k, v) = build(landmarks=7), random_qkv(length=50)
    mask = torch.zeros(2, 50, dtype=torch.bool)
    mask[:, [0, 3, 4, 20, 49]] = True
    real = ~mask[0]
    padded = attention(q, k, v, mask)[:, :, real]
    torch.testing.assert_close(padded, attention(*(x[:, :, real] for x in (q, k, v))), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_as_good_as_its_rounded_inputs(dtype):
    attention = build(landmarks=32)
    q, k, v = (x.double() for x in random_qkv(length=256, dtype=dtype))
    exact = attention.double()(q, k, v)
    error = relative_rms(attention.float()(*(x.to(dtype) for x in (q, k, v))), exact)
    # as if q, k, v had been off by half a unit in the last place
    moved = (x * (1 + torch.finfo(dtype).eps / 2 * torch.randn_like(x)) for x in (q, k, v))
    assert error <= 2 * relative_rms(attention.double()(*moved), exact)
