"""The scalars of a layer against their definitions."""

import pytest
import torch

from lln_fairseq.analysis.layer_scalars import NAMES, layer_scalars, observe
from lln_fairseq.attention import ATTENTION_REGISTRY, build_attention
from lln_fairseq.ops.moment_matching import match_moments
from tests.helpers import random_padding, random_qkv


def build(name, **options):
    return build_attention(name, num_heads=3, head_dim=32, max_positions=97, **options).eval()


def scalars(*args):
    return dict(zip(NAMES, layer_scalars(*args).tolist(), strict=True))


@pytest.mark.parametrize(("constants", "scale"), [("calibrated", 1.0), ("paper", 1.4)])
def test_moment_matching_makes_the_temperatures_equal(constants, scale):
    q, k, _ = random_qkv(scale=scale)
    mask = random_padding(2, 97)
    alpha, _ = match_moments(q, k, mask, constants=constants)
    found = scalars(build("lln", constants=constants), q, k, mask)
    assert found["tau_lln"] == pytest.approx(found["tau_sm"], rel=1e-3)
    assert found["tau_sm"] == pytest.approx(1 / scale**2, rel=0.05)
    assert found["sigma_q"] == pytest.approx(scale, rel=0.05)
    assert found["alpha"] == pytest.approx(alpha.mean().item(), rel=1e-6)


def test_padding_does_not_count():
    q, k, _ = random_qkv()
    mask = random_padding(2, 97)
    before = scalars(build("lln"), q, k, mask)
    q.transpose(1, 2)[mask] = 1e4
    k.transpose(1, 2)[mask] = 1e4
    assert scalars(build("lln"), q, k, mask) == pytest.approx(before)


@pytest.mark.parametrize("name", sorted(ATTENTION_REGISTRY))
def test_every_attention_can_be_observed_and_is_left_as_it_was(name):
    attention = build(name)
    q, k, v = random_qkv()
    model = torch.nn.Sequential(attention)
    expected = attention(q, k, v, None)
    with observe(model) as seen:
        assert torch.equal(attention(q, k, v, None), expected)
        attention(q, k, v)
        attention(v=v, q=q, key_padding_mask=None, k=k)
    attention(q, k, v, None)
    assert len(seen) == 3
    assert seen[0].shape == (len(NAMES),)
    assert seen[0][:3].isfinite().all()
    for other in seen[1:]:
        torch.testing.assert_close(other, seen[0], rtol=0, atol=0, equal_nan=True)


def test_a_mask_given_by_keyword_is_seen():
    attention = build("lln")
    q, k, v = random_qkv()
    mask = random_padding(2, 97)
    with observe(attention) as seen:
        attention(q, k, v, mask)
        attention(q, k, v, key_padding_mask=mask)
    assert torch.equal(*seen)
    assert not torch.equal(seen[0], layer_scalars(attention, q, k))
