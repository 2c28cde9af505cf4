"""Reformer: exact where its chunks hold everything, and near to softmax where they do not."""

import torch

from lln_fairseq.attention import build_attention
from lln_fairseq.ops import reference
from tests.helpers import random_qkv, relative_rms


def build(max_positions=600, seed=0, **options):
    torch.manual_seed(seed)
    return build_attention("reformer", num_heads=3, head_dim=32, max_positions=max_positions, **options).eval()


def test_sentences_that_fit_three_chunks_get_softmax():
    q, k, v = random_qkv(batch=3, length=97, dtype=torch.float64)
    mask = torch.arange(97) >= torch.tensor([97, 48, 0])[:, None]
    out, expected = build(chunk_size=16)(q, k, v, mask), reference.softmax_matrix(q, k, mask) @ v
    torch.testing.assert_close(out[1:], expected[1:])
    assert relative_rms(out[0], expected[0]) > 0.1
    torch.testing.assert_close(build(chunk_size=33)(q, k, v, mask), expected)


def clusters(length=384, count=24):
    """Queries and keys around few centres, in any order: softmax attends inside a cluster."""
    generator = torch.Generator().manual_seed(0)
    centres = 2.5 * torch.randn(count, 32, generator=generator)
    noise = torch.randn(3, 1, 3, length, 32, generator=generator)
    members = [torch.arange(length)[torch.randperm(length, generator=generator)] % count for _ in range(2)]
    q, k = (centres[member] + 0.3 * x for member, x in zip(members, noise[:2], strict=True))
    return q.double(), k.double(), noise[2].double()


def test_hashing_finds_the_keys_that_matter_and_more_rounds_find_more():
    q, k, v = clusters()
    softmax = reference.softmax_matrix(q, k)
    found, errors = [], []
    for hashes in (1, 4, 16):
        attention = build(chunk_size=16, hashes=hashes)
        met = attention.attention_matrix(q, k) > 0
        found.append((softmax * met).sum(dim=-1).mean().item())  # the share of softmax attention in reach
        errors.append(relative_rms(attention(q, k, v), softmax @ v))
        if hashes == 1:
            assert (met.sum(dim=-1) == 48).all()  # of 384
    assert found[0] > 0.7
    assert found[1] > 0.99
    assert found[2] > 0.999
    assert errors == sorted(errors, reverse=True)


def test_the_seed_is_saved_and_training_draws_anew():
    (q, k, v), one, other = random_qkv(length=90), build(chunk_size=8), build(chunk_size=8, seed=1)
    assert not torch.equal(one(q, k, v), other(q, k, v))
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(q, k, v), other(q, k, v))
    build(chunk_size=8, max_positions=2000).load_state_dict(one.state_dict())  # another number of directions
    one.train()
    assert not torch.equal(one(q, k, v), one(q, k, v))


def test_dropout_drops_attention_weights_and_keeps_their_mean():
    q, k, v = random_qkv(batch=1, length=12, dtype=torch.float64)
    attention = build(chunk_size=4, hashes=2).train()  # 12 keys are all met: the mean is softmax attention
    attention.dropout = 0.3
    draws = attention(*(x.expand(1000, -1, -1, -1) for x in (q, k, v)))
    expected = (reference.softmax_matrix(q, k) @ v)[0]
    assert relative_rms(draws[0], expected) > 0.1
    assert relative_rms(draws.mean(dim=0), expected) < 0.05
