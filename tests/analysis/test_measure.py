"""The instruments of a layer, for every registered mechanism."""

import pytest
import torch

from lln_fairseq.analysis import entropy, measure, spectral_gap
from lln_fairseq.analysis.lognormal import lognormal_fit
from lln_fairseq.attention import ATTENTION_REGISTRY, Attention, Context, build_attention
from tests.helpers import random_padding, random_qkv

SIZE = dict(num_heads=3, head_dim=32, max_positions=97)
LINEAR = {name for name, entry in ATTENTION_REGISTRY.items() if entry.cls.feature_maps is not Attention.feature_maps}


def measure_by_name(*args):
    """Return the instruments of a batch by name, each (B, H)."""
    return dict(zip(measure.NAMES, measure.measure_batch(*args).unbind(dim=1), strict=True))


@pytest.mark.parametrize("name", sorted(ATTENTION_REGISTRY))
def test_batch_is_measured_without_its_padding(name):
    torch.manual_seed(0)
    attention = build_attention(name, **SIZE).double().eval()
    q, k, _ = random_qkv(length=60, dtype=torch.float64)
    mask = random_padding(2, 60)

    values = measure_by_name(attention, q, k, Context(mask))

    if not attention.rows_sum_to_one:
        assert all(values[key].isnan().all() for key in ("entropy", "variance", "log_ks"))
        return
    P = attention.attention_matrix(q, k, Context(mask))
    for row, length in enumerate((~mask).sum(dim=1).tolist()):
        real = P[row, :, :length, :length]
        torch.testing.assert_close(values["entropy"][row], entropy(real))
        torch.testing.assert_close(values["spectral_gap"][row], spectral_gap(real), rtol=0, atol=1e-8)
        torch.testing.assert_close(values["log_ks"][row], lognormal_fit(real).ks)
        assert (values["rank"][row] <= length).all()
    assert all(x.shape == (2, 3) and x.isfinite().all() for x in values.values())


@pytest.mark.parametrize("name", ["hedgehog", "t2r"])
def test_learned_features_are_measured_with_their_blocks(name):
    torch.manual_seed(0)
    attention = build_attention(name, block_size=7, **SIZE).eval()
    q, k, _ = random_qkv(length=40)

    values = measure_by_name(attention, q, k)

    assert attention.feature_maps(q, k) is None
    P = attention.attention_matrix(q, k)
    torch.testing.assert_close(values["entropy"], entropy(P).double())
    torch.testing.assert_close(values["spectral_gap"], spectral_gap(P).double())


def test_mechanism_that_depends_on_the_whole_batch_gets_it():
    q, k, _ = random_qkv(length=40, dtype=torch.float64)
    q[1] *= 3
    attention = build_attention("lln", scope="batch", **SIZE).double()
    assert not attention.batch_independent

    expected = entropy(attention.attention_matrix(q, k)).double()
    torch.testing.assert_close(measure_by_name(attention, q, k)["entropy"], expected)
    first_only = measure_by_name(attention, q[:1], k[:1])["entropy"]
    assert not torch.allclose(first_only, expected[:1], rtol=1e-3)


@pytest.mark.parametrize("name", sorted(ATTENTION_REGISTRY))
def test_long_sequence_is_measured_by_its_features_and_some_rows(name, monkeypatch):
    torch.manual_seed(0)
    attention = build_attention(name, **SIZE).eval()
    q, k, _ = random_qkv(length=90)
    whole = measure_by_name(attention, q, k)
    monkeypatch.setattr(measure, "MAX_TOKENS", 80)
    monkeypatch.setattr(measure, "ROWS", 30)
    monkeypatch.setattr(attention, "attention_matrix", None)  # it would be too large

    values = measure_by_name(attention, q, k)

    assert values["rank"].isnan().all()
    if name not in LINEAR:
        assert all(x.isnan().all() for x in values.values())
        return
    torch.testing.assert_close(values["spectral_gap"], whole["spectral_gap"])
    for key in ("entropy", "log_mean"):
        torch.testing.assert_close(values[key], whole[key], rtol=0.05, atol=0)
        assert not torch.equal(values[key], whole[key])


def test_attention_without_matrix_has_no_measurements():
    q, k, _ = random_qkv(length=40)
    assert measure.measure_batch(build_attention("transformer_ls", **SIZE), q, k).isnan().all()


@pytest.mark.parametrize("name", ["softmax", "lln"])
def test_sequence_without_a_real_token_gives_nan(name):
    q, k, _ = random_qkv(length=40)
    mask = random_padding(2, 40, full_row=True)
    values = measure.measure_batch(build_attention(name, **SIZE), q, k, Context(mask))
    assert values[1].isnan().all()
    assert values[0].isfinite().all()
