"""ReLU and the square, as kernels of the score and as feature maps, against their definitions."""

import pytest
import torch

from lln_fairseq.attention import Context, build_attention
from tests.attention.definition import assert_matches_definition
from tests.helpers import random_padding, random_qkv

# κ(q, k) of all pairs, as in the paper.
KERNELS = {
    "relu": lambda q, k: torch.einsum("bhid,bhjd->bhij", q, k).clamp(min=0),
    "quadratic": lambda q, k: torch.einsum("bhid,bhjd->bhij", q, k) ** 2,
    "linear_relu": lambda q, k: torch.einsum("bhid,bhjd->bhij", q.clamp(min=0), k.clamp(min=0)),
    "linear_quadratic": lambda q, k: torch.einsum("bhid,bhjd->bhij", q**2, k**2),
}
every_kernel = pytest.mark.parametrize("name", KERNELS)


def build(name, **options):
    return build_attention(name, num_heads=3, head_dim=32, max_positions=100, **options)


@every_kernel
def test_matches_definition(name):
    mask = random_padding(2, 97)

    def definition(q, k, v):
        kernel = KERNELS[name](q, k) * ~mask[:, None, None, :]
        return kernel / kernel.sum(dim=-1, keepdim=True) @ v

    assert_matches_definition(build(name), definition, random_qkv(), mask)


@every_kernel
def test_scale_of_queries_and_keys_does_not_matter(name):
    q, k, v = (x.double() for x in random_qkv())
    attention = build(name)
    torch.testing.assert_close(attention(30 * q, 0.2 * k, v), attention(q, k, v))


def test_relu_without_positive_score_returns_mean_of_real_values():
    q, k, v = random_qkv(length=9)
    mask = random_padding(2, 9)
    k[:] = -q[:, :, :1]
    q[:] = q[:, :, :1]
    attention = build("relu")
    out = attention(q, k, v, Context(mask))
    for b, num_real in enumerate((~mask).sum(dim=1)):
        mean = v[b, :, :num_real].mean(dim=1, keepdim=True).expand(3, 9, 32)
        torch.testing.assert_close(out[b], mean)


@pytest.mark.parametrize("name", ["relu", "quadratic"])
def test_dropout_preserves_the_expected_output(name):
    q, k, v = random_qkv(batch=1, heads=3, length=20)
    attention = build(name, dropout=0.3)
    torch.manual_seed(0)
    outs = torch.stack([attention(q, k, v) for _ in range(1000)])
    standard_error = outs.std(dim=0) / 1000**0.5
    error = (outs.mean(dim=0) - attention.eval()(q, k, v)).abs() / standard_error
    assert error.max() <= 5
    assert outs.std(dim=0).min() > 0
