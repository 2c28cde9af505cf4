"""Performer's random features: unbiased, orthogonal, and redrawn identically by a resumed run."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lln_fairseq.attention import build_attention
from lln_fairseq.ops import reference
from tests.attention.definition import assert_matches_definition
from tests.helpers import poison_empty, random_padding, random_qkv


def build(seed=0, dim=32, **options):
    torch.manual_seed(seed)
    return build_attention("performer", num_heads=3, head_dim=dim, max_positions=200, **options)


def definition(attention, q, k, v, mask):
    """Compute P v from exponentials, as the paper defines it."""
    omega = attention.projection.double()

    def phi(x):
        x = x / attention.head_dim**0.25
        return (x @ omega.mT - x.square().sum(-1, keepdim=True) / 2).exp()

    return reference.kernel_matrix(phi(q), phi(k), mask) @ v


@pytest.mark.parametrize("length", [97, 1025])  # the operation needs one group of heads, and several
def test_matches_definition(length, monkeypatch):
    attention = build()
    mask = random_padding(2, length, full_row=True)
    poison_empty(monkeypatch)
    assert_matches_definition(
        attention, lambda q, k, v: definition(attention, q, k, v, mask), random_qkv(length=length), mask
    )


def test_kernel_is_unbiased():
    dim = 16
    draws = 500
    q, k, _ = (x[0, 0] for x in random_qkv(batch=1, heads=1, length=20, dim=dim))
    x = q / dim**0.25
    y = k / dim**0.25
    features = torch.cat([build(seed, dim, num_features=dim).projection for seed in range(draws)])
    kernel = (x * y).sum(-1).exp()
    samples = ((x + y) @ features.mT - (x.square() + y.square()).sum(-1, keepdim=True) / 2).exp()
    estimates = samples.view(20, draws, dim).mean(-1)
    # Lemma 2: the variance of independent features. Orthogonal features have at most this variance (Theorem 2).
    deviation = kernel * ((x + y).square().sum(-1).exp() - 1).sqrt() / math.sqrt(dim)
    assert ((estimates.mean(-1) - kernel).abs() <= 5 * deviation / math.sqrt(draws)).all()


def test_features_are_orthogonal_within_blocks():
    rows = build(dim=64, num_features=256 + 10).projection
    for block in rows.split(64):
        directions = torch.nn.functional.normalize(block)
        torch.testing.assert_close(directions @ directions.mT, torch.eye(len(block)), atol=1e-5, rtol=0)


def test_features_have_the_lengths_of_gaussian_vectors():
    lengths = torch.cat([build(seed, 64).projection.norm(dim=1).square() for seed in range(10)])
    # The squared length has a chi² distribution with mean 64 and standard deviation √128.
    assert abs(lengths.mean() - 64) <= 5 * math.sqrt(128 / len(lengths))
    assert abs(lengths.std() / math.sqrt(128) - 1) <= 0.1


def projections_after(attention, inputs, forwards):
    """Run forward several times and return a copy of the projection after each run."""
    projections = []
    for _ in range(forwards):
        attention(*inputs)
        projections.append(attention.projection.clone())
    return projections


def test_features_are_redrawn_every_given_number_of_forwards():
    attention = build(redraw_every=2)
    projections = [attention.projection.clone(), *projections_after(attention, random_qkv(length=4), 5)]
    is_redrawn = [not torch.equal(projections[i], projections[i + 1]) for i in range(5)]
    assert is_redrawn == [False, False, True, False, True]


def test_features_stay_without_redrawing():
    attention = build(redraw_every=0)
    first = attention.projection.clone()
    assert all(torch.equal(x, first) for x in projections_after(attention, random_qkv(length=4), 3))


def test_resumed_run_redraws_like_an_uninterrupted_one():
    inputs = random_qkv(length=4)
    uninterrupted = projections_after(build(redraw_every=2), inputs, 5)

    interrupted = build(redraw_every=2)
    projections_after(interrupted, inputs, 3)
    # Neither evaluation nor a forward pass without gradients counts.
    projections_after(interrupted.eval(), inputs, 3)
    with torch.no_grad():
        projections_after(interrupted.train(), inputs, 3)
    torch.manual_seed(9)
    resumed = build(seed=7, redraw_every=2)
    resumed.load_state_dict(interrupted.state_dict())

    assert torch.equal(torch.stack(projections_after(resumed, inputs, 2)), torch.stack(uninterrupted[3:]))


def test_activation_checkpointing_sees_the_same_features_twice():
    def run_plain(attention, *inputs):
        return attention(*inputs)

    def run_checkpointed(attention, *inputs):
        return checkpoint(attention, *inputs, use_reentrant=False)

    results = []
    for run in (run_plain, run_checkpointed):
        attention = build(redraw_every=1)
        inputs = [x.requires_grad_() for x in random_qkv(length=20)]
        for _ in range(3):
            run(attention, *inputs).square().mean().backward()
        assert attention.forwards == 3
        results.append([attention.projection, *(x.grad for x in inputs)])
    for plain, checkpointed in zip(*results, strict=True):
        assert torch.equal(plain, checkpointed)


def test_half_precision_only_rounds_the_features():
    half = build().half().eval()
    single = build().eval()
    single.load_state_dict(half.state_dict())
    inputs = random_qkv(dtype=torch.float16)
    assert torch.equal(half(*inputs), single(*inputs))
    assert half.projection.dtype == torch.float16
    assert single.projection.dtype == torch.float32
