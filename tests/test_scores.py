"""The metrics of GLUE agree with scikit-learn and scipy."""

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import f1_score, matthews_corrcoef

from lln_fairseq.scores import ClassCounts, pearson, spearman


@pytest.mark.parametrize("num_classes", [2, 3, 7])
def test_sum_of_counts_gives_metrics_of_all_rows(num_classes):
    generator = torch.Generator().manual_seed(num_classes)
    targets = torch.randint(num_classes, (200,), generator=generator)
    guesses = torch.randint(num_classes, (200,), generator=generator)
    predictions = torch.where(torch.rand(200, generator=generator) < 0.6, targets, guesses)

    counts = ClassCounts.from_predictions(predictions[:33], targets[:33], num_classes)
    for start in range(33, 200, 33):
        rows = slice(start, start + 33)
        counts += ClassCounts.from_predictions(predictions[rows], targets[rows], num_classes)

    assert counts.rows == 200
    assert counts.accuracy == pytest.approx((predictions == targets).double().mean().item())
    assert counts.mcc == pytest.approx(matthews_corrcoef(targets, predictions))
    assert counts.majority == targets.bincount().max() / 200
    if num_classes == 2:
        assert counts.f1 == pytest.approx(f1_score(targets, predictions))


def test_constant_predictions_have_no_correlation():
    predictions = torch.zeros(5, dtype=torch.long)
    counts = ClassCounts.from_predictions(predictions, torch.tensor([0, 1, 0, 1, 1]), num_classes=2)
    assert (counts.mcc, counts.f1, counts.accuracy) == (0.0, 0.0, 0.4)
    assert pearson(np.ones(4), np.arange(4)) == 0.0
    assert pearson(np.full(7, 0.1), np.full(7, 0.7)) == 0.0
    assert spearman(np.arange(4), np.ones(4)) == 0.0


def test_correlations_agree_with_scipy_in_spite_of_ties():
    generator = np.random.default_rng(0)
    x = generator.integers(0, 9, 100)
    y = x + generator.integers(0, 9, 100)
    assert pearson(x, y) == pytest.approx(pearsonr(x, y).statistic)
    assert spearman(x, y) == pytest.approx(spearmanr(x, y).statistic)
