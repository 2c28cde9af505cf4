"""The scalars of a layer against their definitions."""

import pytest
import torch

from lln_fairseq.analysis.layer_scalars import NAMES, layer_scalars, observe
from lln_fairseq.attention import ATTENTION_REGISTRY, NO_CONTEXT, Context, build_attention
from lln_fairseq.ops.moment_matching import match_moments
from tests.helpers import random_padding, random_qkv


def build(name, **options):
    return build_attention(name, num_heads=3, head_dim=32, max_positions=97, **options).eval()


def scalars_by_name(*args):
    return dict(zip(NAMES, layer_scalars(*args).tolist(), strict=True))


@pytest.mark.parametrize(("constants", "scale"), [("calibrated", 1.0), ("paper", 1.4)])
def test_moment_matching_makes_the_temperatures_equal(constants, scale):
    q, k, _ = random_qkv(scale=scale)
    mask = random_padding(2, 97)
    alpha, _ = match_moments(q, k, mask, constants=constants)

    scalars = scalars_by_name(build("lln", constants=constants), q, k, Context(mask))

    assert scalars["tau_lln"] == pytest.approx(scalars["tau_sm"], rel=1e-3)
    assert scalars["tau_sm"] == pytest.approx(1 / scale**2, rel=0.05)
    assert scalars["sigma_q"] == pytest.approx(scale, rel=0.05)
    assert scalars["alpha"] == pytest.approx(alpha.mean().item(), rel=1e-6)


def test_padding_does_not_count():
    q, k, _ = random_qkv()
    mask = random_padding(2, 97)
    expected = scalars_by_name(build("lln"), q, k, Context(mask))
    q.transpose(1, 2)[mask] = 1e4
    k.transpose(1, 2)[mask] = 1e4
    assert scalars_by_name(build("lln"), q, k, Context(mask)) == pytest.approx(expected)


@pytest.mark.parametrize("name", sorted(ATTENTION_REGISTRY))
def test_observe_sees_every_call_and_changes_nothing(name):
    attention = build(name)
    q, k, v = random_qkv()
    model = torch.nn.Sequential(attention)
    expected = attention(q, k, v, NO_CONTEXT)

    with observe(model) as observed:
        assert torch.equal(attention(q, k, v, NO_CONTEXT), expected)
        attention(q, k, v, NO_CONTEXT)
    attention(q, k, v, NO_CONTEXT)

    (calls,) = observed
    assert len(calls) == 2
    assert calls[0].shape == (len(NAMES),)
    assert calls[0][:3].isfinite().all()
    for scalars in calls[1:]:
        torch.testing.assert_close(scalars, calls[0], rtol=0, atol=0, equal_nan=True)


def test_observe_numbers_the_attentions_by_the_model():
    model = torch.nn.ModuleList([build("lln"), build("lln")])
    q, k, v = random_qkv()
    with observe(model) as observed:
        model[1](q, k, v, NO_CONTEXT)  # as if LayerDrop had left out the first layer
    assert [len(calls) for calls in observed] == [0, 1]


def test_observe_sees_the_padding():
    attention = build("lln")
    q, k, v = random_qkv()
    mask = random_padding(2, 97)
    with observe(attention) as observed:
        attention(q, k, v, Context(mask))
    assert not torch.equal(observed[0][0], layer_scalars(attention, q, k))
