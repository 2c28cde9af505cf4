"""Residual, norm and rank against closed forms."""

import math

import pytest
import torch

from lln_fairseq.analysis.rank_collapse import composite_norm, numerical_rank, relative_residual, residual


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_composite_norm_of_a_small_matrix():
    X = torch.tensor([[1.0, -2], [3, 4]])
    assert composite_norm(X) == pytest.approx(math.sqrt(6 * 7))  # from column 2 and row 2


def test_equal_tokens_have_no_residual():
    X = random(8).expand(2, 30, 8)
    assert residual(X).abs().max() < 1e-15
    assert relative_residual(X).max() < 1e-15


def test_residual_does_not_depend_on_a_vector_that_all_tokens_share():
    X = random(30, 8)
    torch.testing.assert_close(residual(X + random(8)), residual(X))


def test_numerical_rank_ignores_small_noise():
    X = random(2, 30, 4) @ random(2, 4, 30, seed=1)
    assert numerical_rank(X).tolist() == [4, 4]
    assert numerical_rank(X + 1e-6 * random(30, 30)).tolist() == [4, 4]


def test_numerical_rank_depends_on_the_tolerance():
    assert numerical_rank(torch.eye(9)) == 9
    assert numerical_rank(torch.diag(torch.tensor([1.0, 0.5, 1e-4]))) == 2
    assert numerical_rank(torch.diag(torch.tensor([1.0, 0.5, 1e-4])), tolerance=1e-5) == 3
