"""GLUE's metrics against scikit-learn and scipy."""

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import f1_score, matthews_corrcoef

from data_prep.glue_tasks import GLUE_TASKS
from lln_fairseq.criterions.scores import Counts, pearson, spearman
from tests.helpers import metrics_of


@pytest.mark.parametrize("num_classes", [2, 3, 7])
def test_counts_give_the_metrics_of_all_rows_together(num_classes):
    generator = torch.Generator().manual_seed(num_classes)
    targets = torch.randint(num_classes, (200,), generator=generator)
    guesses = torch.randint(num_classes, (200,), generator=generator)
    predictions = torch.where(torch.rand(200, generator=generator) < 0.6, targets, guesses)
    parts = zip(predictions.split(33), targets.split(33), strict=True)
    first, *rest = (Counts.of(*part, num_classes) for part in parts)
    counts = sum(rest, first)
    assert counts.rows == 200
    assert counts.accuracy == pytest.approx((predictions == targets).double().mean().item())
    assert counts.mcc == pytest.approx(matthews_corrcoef(targets, predictions))
    assert counts.majority == targets.bincount().max() / 200
    if num_classes == 2:
        assert counts.f1 == pytest.approx(f1_score(targets, predictions))


def test_constant_predictions_have_no_correlation():
    counts = Counts.of(torch.zeros(5, dtype=torch.long), torch.tensor([0, 1, 0, 1, 1]), 2)
    assert (counts.mcc, counts.f1, counts.accuracy) == (0.0, 0.0, 0.4)
    assert pearson(np.ones(4), np.arange(4)) == spearman(np.arange(4), np.ones(4)) == 0.0


def test_correlations_with_ties():
    generator = np.random.default_rng(0)
    x = generator.integers(0, 9, 100)
    y = x + generator.integers(0, 9, 100)
    assert pearson(x, y) == pytest.approx(pearsonr(x, y).statistic)
    assert spearman(x, y) == pytest.approx(spearmanr(x, y).statistic)


def test_every_glue_task_has_a_metric():
    found = {name: metrics_of(task.metric) for name, task in GLUE_TASKS.items()}
    assert found["SST-2"] == ("accuracy",)
    assert found["QQP"] == ("accuracy", "f1")
    assert found["CoLA"] == ("mcc",)
    assert found["STS-B"] == ("pearson", "spearman")
    assert all(found.values())
