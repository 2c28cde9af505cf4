"""Random features: unbiased, orthogonal, and drawn again so that a resumed run cannot tell."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lln_fairseq.attention import build_attention
from lln_fairseq.ops import reference
from tests.attention.definition import assert_equals_definition
from tests.helpers import poison_empty, random_padding, random_qkv


def build(seed=0, dim=32, **options):
    torch.manual_seed(seed)
    return build_attention("performer", num_heads=3, head_dim=dim, max_positions=200, **options)


def naive(attention, q, k, v, mask):
    """The paper's definition, exponentials and all."""
    phi_q, phi_k = (
        (x @ attention.projection.double().mT - x.square().sum(-1, keepdim=True) / 2).exp()
        for x in (q / attention.head_dim**0.25, k / attention.head_dim**0.25)
    )
    return reference.kernel_matrix(phi_q, phi_k, mask) @ v


@pytest.mark.parametrize("length", [97, 1025])  # one group of heads and several
def test_is_the_papers_formula_forward_and_backward(length, monkeypatch):
    attention, mask = build(), random_padding(2, length, full_row=True)
    poison_empty(monkeypatch)
    assert_equals_definition(
        attention, lambda q, k, v: naive(attention, q, k, v, mask), random_qkv(length=length), mask
    )


def test_the_kernel_is_unbiased():
    dim, draws = 16, 500
    q, k, _ = (x[0, 0] for x in random_qkv(batch=1, heads=1, length=20, dim=dim))
    x, y = q / dim**0.25, k / dim**0.25
    features = torch.cat([build(seed, dim, num_features=dim).projection for seed in range(draws)])
    kernel = (x * y).sum(-1).exp()
    samples = ((x + y) @ features.mT - (x.square() + y.square()).sum(-1, keepdim=True) / 2).exp()
    estimates = samples.view(20, draws, dim).mean(-1)
    # Lemma 2: the variance for independent features; orthogonal ones may only do better (Theorem 2).
    deviation = kernel * ((x + y).square().sum(-1).exp() - 1).sqrt() / math.sqrt(dim)
    assert ((estimates.mean(-1) - kernel).abs() <= 5 * deviation / math.sqrt(draws)).all()


def test_features_are_orthogonal_in_blocks_with_the_lengths_of_gaussian_vectors():
    rows = build(dim=64, num_features=256 + 10).projection
    for block in rows.split(64):
        directions = torch.nn.functional.normalize(block)
        torch.testing.assert_close(directions @ directions.mT, torch.eye(len(block)), atol=1e-5, rtol=0)
    lengths = torch.cat([build(seed, 64).projection.norm(dim=1).square() for seed in range(10)])  # chi²: 64 ± √128
    assert abs(lengths.mean() - 64) <= 5 * math.sqrt(128 / len(lengths))
    assert abs(lengths.std() / math.sqrt(128) - 1) <= 0.1


def train(attention, inputs, forwards):
    """The features after each forward."""
    seen = []
    for _ in range(forwards):
        attention(*inputs)
        seen.append(attention.projection.clone())
    return seen


def test_redraws_follow_the_forwards_of_training_and_survive_a_resume():
    inputs = random_qkv(length=4)
    attention = build(redraw_every=2)
    first = attention.projection.clone()
    seen = train(attention, inputs, 5)
    changes = [not torch.equal(a, b) for a, b in zip([first, *seen], seen, strict=False)]
    assert changes == [False, True, False, True, False]

    interrupted = build(redraw_every=2)
    train(interrupted, inputs, 3)
    interrupted.eval()
    train(interrupted, inputs, 3)
    with torch.no_grad():
        train(interrupted.train(), inputs, 3)
    torch.manual_seed(9)
    resumed = build(seed=7, redraw_every=2)
    resumed.load_state_dict(interrupted.state_dict())
    assert torch.equal(torch.stack(train(resumed, inputs, 2)), torch.stack(seen[3:]))

    assert all(torch.equal(x, first) for x in train(build(redraw_every=0), inputs, 3))


def test_activation_checkpointing_sees_the_same_features_twice():
    grads = []
    for run in (lambda f, *x: f(*x), lambda f, *x: checkpoint(f, *x, use_reentrant=True)):
        attention, inputs = build(redraw_every=1), [x.requires_grad_() for x in random_qkv(length=20)]
        for _ in range(2):
            run(attention, *inputs).square().mean().backward()
        grads.append([attention.projection, *(x.grad for x in inputs)])
    for plain, checkpointed in zip(*grads, strict=True):
        assert torch.equal(plain, checkpointed)


def test_half_precision_rounds_the_features_and_nothing_else():
    half, single = build().half().eval(), build().eval()
    single.load_state_dict(half.state_dict())
    inputs = random_qkv(dtype=torch.float16)
    assert torch.equal(half(*inputs), single(*inputs))
    assert half.projection.dtype == torch.float16
    assert single.projection.dtype == torch.float32
