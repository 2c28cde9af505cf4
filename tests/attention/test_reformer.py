"""Reformer against its formula; it is exact softmax if three chunks hold the sequence, and close to it otherwise."""

import pytest
import torch

from lln_fairseq.attention import Context, build_attention
from lln_fairseq.ops import reference
from tests.helpers import random_qkv, relative_rms


def build(max_positions=600, seed=0, **options):
    torch.manual_seed(seed)
    return build_attention("reformer", num_heads=3, head_dim=32, max_positions=max_positions, **options).eval()


def test_sequences_that_fit_into_three_chunks_get_exact_softmax():
    q, k, v = random_qkv(batch=3, length=97, dtype=torch.float64)
    mask = torch.arange(97) >= torch.tensor([97, 48, 0])[:, None]
    expected = reference.softmax_matrix(q, k, mask) @ v
    out = build(chunk_size=16)(q, k, v, Context(mask))
    torch.testing.assert_close(out[1:], expected[1:])
    assert relative_rms(out[0], expected[0]) > 0.1
    torch.testing.assert_close(build(chunk_size=33)(q, k, v, Context(mask)), expected)


def count_attended(attention, q_bucket, k_bucket, num_real):
    """Return how often every query attends to every key in one round of one head, (N, N).

    Args:
        q_bucket, k_bucket: the buckets of the N queries and of the N keys, lists.
        num_real: the number of tokens that are not padding, at least 1.
    """
    m = attention.config.chunk_size
    counts = torch.zeros(len(q_bucket), len(k_bucket), dtype=torch.float64)
    queries = sorted(range(len(q_bucket)), key=q_bucket.__getitem__)
    keys = sorted(range(len(k_bucket)), key=k_bucket.__getitem__)
    for first in range(0, len(q_bucket), m):
        bucket = q_bucket[queries[min(first + m // 2, num_real - 1)]]
        bucket_start = sum(x < bucket for x in k_bucket)
        bucket_end = sum(x <= bucket for x in k_bucket)
        center = (bucket_start + bucket_end) // 2
        start = max(0, min(center - 3 * m // 2, num_real - 3 * m))
        end = min(start + 3 * m, num_real)
        rows = torch.tensor(queries[first : first + m])[:, None]
        counts[rows, torch.tensor(keys[start:end])] += 1
    return counts


@pytest.mark.parametrize("options", [dict(chunk_size=5), dict(chunk_size=16, hashes=1)], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_matches_formula_with_keys_counted_chunk_by_chunk(options, padded):
    attention = build(**options)
    q, k, v = random_qkv(length=97, dtype=torch.float64)
    mask = torch.zeros(2, 97, dtype=torch.bool)
    if padded:
        mask[0, 70:] = True
        mask[1, [0, 3, 50]] = True

    out = attention(q, k, v, Context(mask))

    for b in range(2):
        for h in range(3):
            counts = torch.zeros(97, 97, dtype=torch.float64)
            for rotation in attention.rotations:
                q_bucket = attention.buckets(q, rotation, mask)[b, h].tolist()
                k_bucket = attention.buckets(k, rotation, mask)[b, h].tolist()
                counts += count_attended(attention, q_bucket, k_bucket, int((~mask[b]).sum()))
            weights = counts * (q[b, h] @ k[b, h].T / 32**0.5).exp()
            expected = weights / weights.sum(dim=-1, keepdim=True) @ v[b, h]
            torch.testing.assert_close(out[b, h], expected)


def clustered_qkv(length=384, num_clusters=24):
    """Return queries and keys around a few centers in random order, so that softmax attends within a cluster."""
    generator = torch.Generator().manual_seed(0)
    centers = 2.5 * torch.randn(num_clusters, 32, generator=generator)
    noise = torch.randn(3, 1, 3, length, 32, generator=generator)
    q_cluster = torch.arange(length)[torch.randperm(length, generator=generator)] % num_clusters
    k_cluster = torch.arange(length)[torch.randperm(length, generator=generator)] % num_clusters
    q = centers[q_cluster] + 0.3 * noise[0]
    k = centers[k_cluster] + 0.3 * noise[1]
    return q.double(), k.double(), noise[2].double()


def test_hashing_finds_relevant_keys_and_more_rounds_find_more():
    q, k, v = clustered_qkv()
    softmax = reference.softmax_matrix(q, k)
    covered = []  # fraction of the softmax weights on keys that are attended to
    errors = []
    for hashes in (1, 4, 16):
        attention = build(chunk_size=16, hashes=hashes)
        is_attended = attention.attention_matrix(q, k) > 0
        covered.append((softmax * is_attended).sum(dim=-1).mean().item())
        errors.append(relative_rms(attention(q, k, v), softmax @ v))
        if hashes == 1:
            assert (is_attended.sum(dim=-1) == 48).all()  # of 384
    assert covered[0] > 0.7
    assert covered[1] > 0.99
    assert covered[2] > 0.999
    assert errors == sorted(errors, reverse=True)


def test_state_dict_restores_the_hashes():
    q, k, v = random_qkv(length=90)
    attention = build(chunk_size=8)
    loaded = build(chunk_size=8, seed=1)
    assert not torch.equal(attention(q, k, v), loaded(q, k, v))
    loaded.load_state_dict(attention.state_dict())
    assert torch.equal(attention(q, k, v), loaded(q, k, v))


def test_state_dict_loads_into_model_of_another_length():
    longer = build(chunk_size=8, max_positions=2000)  # with another number of directions
    longer.load_state_dict(build(chunk_size=8).state_dict())


def test_training_draws_new_hashes_in_every_forward():
    q, k, v = random_qkv(length=90)
    attention = build(chunk_size=8).train()
    assert not torch.equal(attention(q, k, v), attention(q, k, v))


def test_dropout_drops_weights_and_preserves_the_mean():
    q, k, v = random_qkv(batch=1, length=12, dtype=torch.float64)
    attention = build(chunk_size=4, hashes=2).train()  # every query attends to all 12 keys: the mean is exact softmax
    attention.dropout = 0.3
    samples = attention(*(x.expand(1000, -1, -1, -1) for x in (q, k, v)))
    expected = (reference.softmax_matrix(q, k) @ v)[0]
    assert relative_rms(samples[0], expected) > 0.1
    assert relative_rms(samples.mean(dim=0), expected) < 0.05
