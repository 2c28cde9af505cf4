"""The paper's claim at its default parameters, LLN in comparison, and parameters for which separation must fail."""

import math

import pytest

from lln_fairseq.analysis.separation import cross_attention, self_attention, softmax_regression

pytestmark = pytest.mark.usefixtures("quick_table")


@pytest.mark.parametrize(
    ("experiment", "options", "lln_separates"),
    [
        (softmax_regression, {}, True),
        (self_attention, {}, False),
        (self_attention, {"mixing": "identity"}, True),
        (cross_attention, {}, True),
    ],
)
def test_softmax_separates_where_linear_attention_does_not(experiment, options, lln_separates):
    result = experiment(**options)

    assert result.draws == 100
    assert result.claim >= 95
    assert result.counts["softmax"].separates >= 95
    assert result.counts["linear"].separates <= 2
    assert all(counts.zero_on_d0 >= 98 for counts in result.counts.values())
    # LLN concentrates where the features of a query differ. In self_attention with X all ones they do not.
    if lln_separates:
        assert result.counts["lln"].separates >= 95
    else:
        assert result.counts["lln"].separates < 95
        assert result.counts["lln"].positive_on_d1 == 0


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize(("experiment", "fraction"), [(softmax_regression, 1 / 2), (cross_attention, 1 / 4)])
def test_success_rate_follows_the_number_of_sign_vectors(experiment, fraction, m):
    """`fraction` of the sign vectors exceed the threshold on D1 of softmax."""
    draws = 400
    expected = 1 - (1 - fraction) ** m
    error = math.sqrt(expected * (1 - expected) / draws)

    rate = experiment(m=m, draws=draws, n=220).counts["softmax"].separates / draws

    assert abs(rate - expected) < 4 * error
