"""Tests of the scores of a search, and of their intervals."""

import numpy as np
import pytest
import torch
from sklearn.metrics import ndcg_score

from lln_fairseq.speedup.quality import Accuracy, Agreement, Correlation, Cosine, Ndcg, rows_needed


def random_logits(rows, classes=2, seed=0):
    return torch.randn(rows, classes, generator=torch.Generator().manual_seed(seed))


def test_accuracy_drops_by_the_share_of_rows_that_became_wrong():
    targets = np.zeros(1000, dtype=int)
    original = torch.tensor([[1.0, 0.0]]).repeat(1000, 1)
    outputs = original.clone()
    outputs[:30] = torch.tensor([0.0, 1.0])
    quality = Accuracy(original, 2.0, targets)
    assert quality.score(original) == 100
    assert quality.drop(outputs) == pytest.approx(3.0)
    assert quality.drop(outputs) > quality.limit
    assert quality.drop(original) <= quality.limit
    assert quality.half_width(outputs) == pytest.approx(196 * np.sqrt(0.03 * 0.97 / 1000), rel=0.02)


@pytest.mark.parametrize("share", [0.02, 0.1])
def test_interval_of_accuracy_holds_in_95_of_100_small_tests(share):
    generator = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        worse, better = generator.random((2, 150)) < share / 2
        original = torch.from_numpy(np.stack([~better, better], axis=1).astype(float))
        outputs = torch.from_numpy(np.stack([~worse, worse], axis=1).astype(float))
        quality = Accuracy(original, 1.0, np.zeros(150, dtype=int))
        held += abs(quality.drop(outputs)) <= quality.half_width(outputs)
    assert held / 400 >= 0.93
    assert quality.half_width(original) > 1  # nothing has changed


@pytest.mark.parametrize("kind", ["accuracy", "ndcg", "spearman", "cosine"])
def test_interval_is_that_of_resampled_rows(kind):
    generator = np.random.default_rng(1)
    rows = 800
    original = random_logits(rows, 1 if kind in ("ndcg", "spearman") else 2)
    outputs = original + 0.5 * random_logits(*original.shape, seed=2)
    targets = generator.integers(2, size=rows)

    def build(numbers, original):
        if kind == "accuracy":
            return Accuracy(original, 1.0, targets[numbers])
        if kind == "spearman":
            return Correlation(original, 1.0, targets[numbers])
        if kind == "cosine":
            return Cosine(original, 1.0)
        return Ndcg(original, 1.0, targets[numbers], [str(place // 4) for place in range(len(numbers))])

    drops = []
    for _ in range(200):
        if kind == "ndcg":  # whole groups
            numbers = (4 * generator.integers(rows // 4, size=rows // 4)[:, None] + np.arange(4)).ravel()
        else:
            numbers = generator.integers(rows, size=rows)
        drops.append(build(numbers, original[numbers]).drop(outputs[numbers]))
    quality = build(np.arange(rows), original)
    assert quality.half_width(outputs) == pytest.approx(1.96 * np.std(drops), rel=0.12)


def test_ndcg_is_that_of_scikit_learn():
    relevances = np.random.default_rng(0).integers(3, size=120).astype(float)
    groups = [str(row % 6) for row in range(120)]
    original = random_logits(120, 1)
    quality = Ndcg(original, 1.0, relevances, groups)
    expected = []
    for group in "012345":
        rows = [row for row in range(120) if groups[row] == group]
        expected.append(ndcg_score([relevances[rows]], [original.view(-1)[rows].numpy()], k=10))
    # scikit-learn has the same gain, relevance / log2(rank + 1).
    assert quality.score(original) == pytest.approx(100 * np.mean(expected))


def test_groups_without_a_relevant_row_do_not_count():
    quality = Ndcg(torch.tensor([[1.0], [0.0], [3.0]]), 1.0, np.array([0.0, 1.0, 0.0]), ["a", "a", "b"])
    assert quality.score(quality.original) == pytest.approx(100 / np.log2(3))


def test_outputs_that_are_not_finite_are_never_good_enough():
    original = random_logits(50)
    broken = original.clone()
    broken[3, 0] = float("nan")
    for quality in (Agreement(original, 100.0), Cosine(original, 100.0)):
        assert np.isnan(quality.score(broken))
        assert not quality.drop(broken) <= quality.limit


def test_neighbors_and_cosines_of_turned_vectors_stay():
    vectors = random_logits(40, 8)
    turn, _ = torch.linalg.qr(random_logits(8, 8, seed=3))
    quality = Cosine(vectors, 5.0)
    assert quality.same_neighbor(vectors @ turn) == 100
    assert quality.score(vectors @ turn) < 95
    assert quality.score(2 * vectors) == pytest.approx(100)


def test_rows_needed_grow_with_the_square():
    assert rows_needed(500, 2.5, 1.0) == 3125
