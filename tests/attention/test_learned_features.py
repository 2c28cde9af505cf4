"""Hedgehog and T2R against the formulas of their papers, alone and averaged with blocks."""

import pytest
import torch

from lln_fairseq.attention import build_attention
from tests.helpers import random_qkv


def hedgehog_features(attention, x, head):
    projected = x @ attention.weight[head].T
    return torch.cat([projected.softmax(dim=-1), (-projected).softmax(dim=-1)], dim=-1)


def t2r_features(attention, x, head):
    return (x @ attention.weight[head].T + attention.bias[head]).relu()


def block_softmax(q, k, size):
    scores = q @ k.T / q.shape[-1] ** 0.5
    block = torch.arange(len(q)) // size
    return scores.masked_fill(block[:, None] != block, float("-inf")).softmax(dim=-1)


@pytest.mark.parametrize(("name", "features"), [("hedgehog", hedgehog_features), ("t2r", t2r_features)])
@pytest.mark.parametrize("block_size", [0, 7])
def test_matches_formula(name, features, block_size):
    torch.manual_seed(0)
    attention = build_attention(name, num_heads=3, head_dim=32, max_positions=64, block_size=block_size)
    attention = attention.double().eval()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter)
    q, k, v = random_qkv(length=40, dtype=torch.float64)

    out = attention(q, k, v)

    for head in range(3):
        for row in range(2):
            weights = features(attention, q[row, head], head) @ features(attention, k[row, head], head).T
            matrix = weights / weights.sum(dim=-1, keepdim=True)
            if block_size:
                matrix = (matrix + block_softmax(q[row, head], k[row, head], block_size)) / 2
            torch.testing.assert_close(out[row, head], matrix @ v[row, head])


@pytest.mark.parametrize(("name", "options"), [("hedgehog", {}), ("t2r", {"num_features": 12})])
def test_branches_share_parameters_and_average_to_the_whole(name, options):
    attention = build_attention(name, num_heads=3, head_dim=32, max_positions=64, block_size=7, **options)
    attention = attention.double().eval()
    torch.nn.init.normal_(attention.weight)
    q, k, v = random_qkv(length=40, dtype=torch.float64)

    branches = attention.branches()

    assert branches["Linear only"].weight is attention.weight
    parts = [branch(q, k, v) for branch in branches.values()]
    torch.testing.assert_close(sum(parts) / 2, attention(q, k, v))
