"""The paper's claim at its default parameters, LLN beside it, and where the constructions must fail."""

import functools
import math

import pytest

from lln_fairseq.analysis.separation import cross_attention, self_attention, softmax_regression
from lln_fairseq.ops import moment_matching

IDENTITY = {"mixing": "identity"}


@pytest.fixture(autouse=True, scope="module")
def quick_table():
    """The calibrated table of head dimension 12 from a smaller simulation than the default."""
    with pytest.MonkeyPatch.context() as patch:
        small = functools.partial(moment_matching.simulate_table, tokens=256, heads=2)
        patch.setattr(moment_matching, "simulate_table", small)
        moment_matching.calibration_table.cache_clear()
        yield
    moment_matching.calibration_table.cache_clear()


@pytest.mark.parametrize(
    ("experiment", "options", "lln_separates"),
    [
        (softmax_regression, {}, True),
        (self_attention, {}, False),
        (self_attention, IDENTITY, True),
        (cross_attention, {}, True),
    ],
)
def test_softmax_separates_where_linear_attention_is_zero(experiment, options, lln_separates):
    result = experiment(**options)
    assert result.draws == 100
    assert result.claim >= 95
    assert result.counts["softmax"].separates >= 95
    assert result.counts["linear"].separates <= 2
    # LLN concentrates wherever queries differ between features, see `self_attention` for where they do not.
    assert (result.counts["lln"].separates >= 95) == lln_separates
    assert (result.counts["lln"].positive_on_d1 == 0) == (not lln_separates)
    assert all(counts.zero_on_d0 >= 98 for counts in result.counts.values())


def test_success_follows_the_number_of_sign_vectors():
    # One sign vector in two passes on D1 of softmax regression, one in four for cross-attention.
    draws = 400
    for experiment, share in ((softmax_regression, 1 / 2), (cross_attention, 1 / 4)):
        for m in (1, 3):
            expected = 1 - (1 - share) ** m
            error = math.sqrt(expected * (1 - expected) / draws)
            found = experiment(m=m, draws=draws, n=220).counts["softmax"].separates / draws
            assert abs(found - expected) < 4 * error, (experiment.__name__, m)
