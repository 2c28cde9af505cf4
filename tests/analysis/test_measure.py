"""The instruments of a layer, over the registry."""

import pytest
import torch

from lln_fairseq.analysis import entropy, measure, spectral_gap
from lln_fairseq.analysis.lognormal import lognormal_fit
from lln_fairseq.attention import ATTENTION_REGISTRY, Attention, build_attention
from tests.helpers import random_padding, random_qkv

SIZE = dict(num_heads=3, head_dim=32, max_positions=97)
LINEAR = {name for name, entry in ATTENTION_REGISTRY.items() if entry.cls.feature_maps is not Attention.feature_maps}


def named(values):
    """(B, 7, H) -> {"entropy": (B, H), ...}"""
    return dict(zip(measure.NAMES, values.unbind(dim=1), strict=True))


@pytest.mark.parametrize("name", sorted(ATTENTION_REGISTRY))
def test_a_batch_is_measured_without_its_padding(name):
    torch.manual_seed(0)
    attention = build_attention(name, **SIZE).eval()
    q, k, _ = random_qkv(length=60)
    mask = random_padding(2, 60)
    found = named(measure.measure(attention, q, k, mask))
    if not attention.stochastic_rows:
        assert all(found[key].isnan().all() for key in ("entropy", "variance", "log_ks"))
        return
    P = attention.attention_matrix(q, k, mask)
    for b, length in enumerate((~mask).sum(dim=1).tolist()):
        real = P[b, :, :length, :length]
        torch.testing.assert_close(found["entropy"][b], entropy(real).double())
        torch.testing.assert_close(found["spectral_gap"][b], spectral_gap(real), rtol=0, atol=1e-5)
        torch.testing.assert_close(found["log_ks"][b], lognormal_fit(real).ks.double())
        assert (found["rank"][b] <= length).all()
    assert all(values.shape == (2, 3) and values.isfinite().all() for values in found.values())


def test_a_mechanism_that_needs_the_whole_batch_gets_it():
    q, k, _ = random_qkv(length=40)
    q[1] *= 3
    attention = build_attention("lln", scope="batch", **SIZE)
    assert not attention.batch_independent
    expected = entropy(attention.attention_matrix(q, k)).double()
    torch.testing.assert_close(named(measure.measure(attention, q, k))["entropy"], expected)
    alone = named(measure.measure(attention, q[:1], k[:1]))["entropy"]
    assert not torch.allclose(alone, expected[:1], rtol=1e-3)


@pytest.mark.parametrize("name", sorted(ATTENTION_REGISTRY))
def test_of_a_long_sequence_the_exact_gap_and_some_rows_are_measured(name, monkeypatch):
    torch.manual_seed(0)
    attention = build_attention(name, **SIZE).eval()
    q, k, _ = random_qkv(length=90)
    whole = named(measure.measure(attention, q, k))
    monkeypatch.setattr(measure, "MAX_TOKENS", 80)
    monkeypatch.setattr(measure, "ROWS", 30)
    monkeypatch.setattr(attention, "attention_matrix", None)  # it would be too large
    found = named(measure.measure(attention, q, k))
    assert found["rank"].isnan().all()
    if name not in LINEAR:
        assert all(values.isnan().all() for values in found.values())
        return
    torch.testing.assert_close(found["spectral_gap"], whole["spectral_gap"])
    for key in ("entropy", "log_mean"):
        torch.testing.assert_close(found[key], whole[key], rtol=0.05, atol=0)
        assert not torch.equal(found[key], whole[key])


def test_a_mix_of_features_has_temperatures_alone():
    q, k, _ = random_qkv(length=40)
    assert measure.measure(build_attention("lln_diag", mix="ratio", **SIZE), q, k).isnan().all()


def test_a_sequence_without_a_real_token():
    q, k, _ = random_qkv(length=40)
    mask = random_padding(2, 40, full_row=True)
    for name in ("softmax", "lln"):
        found = measure.measure(build_attention(name, **SIZE), q, k, mask)
        assert found[1].isnan().all()
        assert found[0].isfinite().all()
