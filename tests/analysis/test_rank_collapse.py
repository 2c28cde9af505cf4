"""Residual, norm and rank against closed forms."""

import math

import pytest
import torch

from lln_fairseq.analysis.rank_collapse import composite_norm, numerical_rank, relative_residual, residual
from tests.helpers import random_padding


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_composite_norm():
    X = torch.tensor([[1.0, -2], [3, 4]])
    assert composite_norm(X) == pytest.approx(math.sqrt(6 * 7))  # column 2, row 2
    A, B = random(5, 6), random(6, 7, seed=1)
    assert composite_norm(A @ B) <= composite_norm(A) * composite_norm(B)


def test_tokens_that_are_all_the_same_have_no_residual():
    x = random(8)
    same = x.expand(2, 30, 8)
    assert residual(same).abs().max() < 1e-15
    assert relative_residual(same).max() < 1e-15
    torch.testing.assert_close(residual(same + random(30, 8)), residual(random(30, 8)).expand(2, 30, 8))


def test_padding_does_not_count():
    X, mask = random(2, 3, 40, 8), random_padding(2, 40)
    found = relative_residual(X, mask)
    for b in range(2):
        torch.testing.assert_close(found[b], relative_residual(X[b][:, ~mask[b]]))
    X.transpose(1, 2)[mask] = 1e6
    torch.testing.assert_close(relative_residual(X, mask), found)
    assert (residual(X, mask).transpose(1, 2)[mask] == 0).all()


def test_numerical_rank():
    X = random(2, 30, 4) @ random(2, 4, 30, seed=1)
    assert numerical_rank(X).tolist() == numerical_rank(X + 1e-6 * random(30, 30)).tolist() == [4, 4]
    assert numerical_rank(torch.eye(9)) == 9
    assert numerical_rank(torch.diag(torch.tensor([1.0, 0.5, 1e-4]))) == 2
    assert numerical_rank(torch.diag(torch.tensor([1.0, 0.5, 1e-4])), tolerance=1e-5) == 3
