"""Residual, norm, rank, bound and paths against closed forms and brute force."""

import itertools
import math

import pytest
import torch

from lln_fairseq.analysis.rank_collapse import (
    collapse_bound,
    composite_norm,
    numerical_rank,
    paths,
    relative_residual,
    residual,
    weight_factor,
)
from lln_fairseq.ops.reference import lln_matrix, softmax_matrix
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


@pytest.fixture(scope="module")
def layer():
    """A head of attention without biases: x the common vector, R what the tokens differ by, and the weights."""
    size, dim = 32, 16
    scaled = [random(size, n, seed=n) / math.sqrt(size) for n in (dim, dim + 1, size)]
    return dict(common=random(1, size), R=random(40, size, seed=1), w_q=scaled[0], w_k=scaled[1][:, :dim], w=scaled[2])


@pytest.mark.parametrize("matrix", [softmax_matrix, lambda q, k: lln_matrix(q, k, 1.3, 1.3)])
def test_one_layer_of_attention_cubes_the_residual_and_obeys_the_bound(layer, matrix):
    """Theorem 2.2 for softmax; LLN loses the residual at the same cubic rate, since its P too is 1 pᵀ up to a term of
    second order in the differences of the tokens."""
    w_q, w_k, w = layer["w_q"], layer["w_k"], layer["w"]
    norms = []
    for size in (0.1, 0.01, 0.001):
        X = layer["common"] + size * layer["R"]
        P = matrix((X @ w_q)[None, None], (X @ w_k)[None, None])[0, 0]
        scores = X @ w_q @ w_k.mT @ X.mT / 4
        assert (scores.amax(dim=1) - scores.amin(dim=1)).max() < 1.256  # the premise
        norms.append(composite_norm(residual(P @ X @ w)).item())
        bound = collapse_bound(composite_norm(residual(X)).item(), weight_factor(w_q @ w_k.mT, w).item(), 16, 1)
        assert math.log10(norms[-1]) <= bound
    assert norms[0] / norms[1] == pytest.approx(1000, rel=0.05)
    assert norms[1] / norms[2] == pytest.approx(1000, rel=0.01)


def test_the_bound_composes_over_layers():
    one = collapse_bound(0.3, 2.0, 16, 1, heads=2)
    two = collapse_bound(10**one, 2.0, 16, 1, heads=2)
    assert two == pytest.approx(collapse_bound(0.3, 2.0, 16, 2, heads=2))
    falling = [collapse_bound(0.1, 1.0, 64, depth) for depth in (1, 2, 3, 12)]
    assert falling == sorted(falling, reverse=True)
    assert falling[-1] < -100_000


def test_paths_against_the_sum_over_all_of_them():
    layers, heads, n, size = 3, 2, 7, 4
    X, P = random(n, size), random(layers, heads, n, n, seed=1).softmax(dim=-1)
    W = random(layers, heads, size, size, seed=2)
    found = paths(X, list(P), list(W))
    expected = torch.zeros_like(found)
    for path in itertools.product([None, *range(heads)], repeat=layers):  # None: the skip connection
        Y = X
        for depth, head in enumerate(path):
            Y = Y if head is None else P[depth, head] @ Y @ W[depth, head]
        expected[layers - path.count(None)] += Y
    torch.testing.assert_close(found, expected)
    out = X
    for depth in range(layers):
        out = out + (P[depth] @ out @ W[depth]).sum(dim=0)
    torch.testing.assert_close(found.sum(dim=0), out)
