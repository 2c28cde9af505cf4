"""Transformer-LS against its formula, query by query."""

import pytest
import torch

from lln_fairseq.attention import build_attention
from tests.helpers import random_qkv


def build(window, rank=5):
    torch.manual_seed(0)
    attention = build_attention(
        "transformer_ls", num_heads=3, head_dim=32, max_positions=64, window=window, rank=rank
    ).double()
    for norm in (attention.long_norm, attention.short_norm):
        torch.nn.init.normal_(norm.weight)
        torch.nn.init.normal_(norm.bias)
    return attention.eval()


def norm(layer, x):
    """Of x (N, H D), written out."""
    centred = x - x.mean(dim=-1, keepdim=True)
    return centred / (centred.square().mean(dim=-1, keepdim=True) + layer.eps).sqrt() * layer.weight + layer.bias


def by_query(attention, q, k, v, real, window, rank):
    """q, k, v (H, N, D) of one sequence whose tokens `real`, a list, are no padding -> (H, N, D) at these."""
    heads, _, dim = q.shape
    k, v = (x.transpose(0, 1).flatten(1) for x in (k, v))  # (N, H D)
    scores = k @ attention.dynamic_proj.weight.T  # (N, H r)
    k, v = norm(attention.long_norm, k), norm(attention.long_norm, v)
    out = torch.zeros_like(q)
    short = []
    for x in (k, v):
        rows = torch.zeros(rank, heads * dim, dtype=x.dtype)
        for column in range(heads * rank):
            head, row = divmod(column, rank)
            weights = torch.softmax(scores[real, column], dim=0)
            features = slice(head * dim, (head + 1) * dim)
            rows[row, features] = weights @ x[real][:, features]
        short.append(norm(attention.short_norm, rows))
    for head in range(heads):
        features = slice(head * dim, (head + 1) * dim)
        for i in real:
            start = i // window * window
            near = [j for j in real if start - window // 2 <= j < start + window + window // 2]
            keys, values = (
                torch.cat([y[:, features], x[near][:, features]]) for x, y in zip((k, v), short, strict=True)
            )
            out[head, i] = torch.softmax(keys @ q[head, i] / dim**0.5, dim=0) @ values
    return out[:, real]


@pytest.mark.parametrize("window", [1, 2, 5, 40])
@pytest.mark.parametrize("length", [1, 8, 23])
def test_query_by_query(window, length):
    attention = build(window)
    q, k, v = random_qkv(length=length, dtype=torch.float64)
    mask = torch.zeros(2, length, dtype=torch.bool)
    if length > 1:
        mask[0, -3:] = mask[1, :2] = mask[1, length // 2] = True  # at the right, at the left and in between
    out = attention(q, k, v, mask)
    for b in range(2):
        real = (~mask[b]).nonzero()[:, 0].tolist()
        torch.testing.assert_close(out[b, :, real], by_query(attention, q[b], k[b], v[b], real, window, rank=5))
