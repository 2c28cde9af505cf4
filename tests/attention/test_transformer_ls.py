"""Transformer-LS against its formula, computed for every query separately."""

import pytest
import torch

from lln_fairseq.attention import Context, build_attention
from tests.helpers import random_qkv

RANK = 5


def build(window):
    torch.manual_seed(0)
    attention = build_attention(
        "transformer_ls", num_heads=3, head_dim=32, max_positions=64, window=window, rank=RANK
    ).double()
    for norm in (attention.long_norm, attention.short_norm):
        torch.nn.init.normal_(norm.weight)
        torch.nn.init.normal_(norm.bias)
    return attention.eval()


def layer_norm(layer, x):
    centered = x - x.mean(dim=-1, keepdim=True)
    return centered / (centered.square().mean(dim=-1, keepdim=True) + layer.eps).sqrt() * layer.weight + layer.bias


def mixtures(attention, x, scores, real, heads, dim):
    """Return the normalized mixtures (r, H D) of the real tokens of x (N, H D), for scores (N, H r)."""
    mixed = torch.zeros(RANK, heads * dim, dtype=x.dtype)
    for head in range(heads):
        features = slice(head * dim, (head + 1) * dim)
        for row in range(RANK):
            weights = torch.softmax(scores[real, head * RANK + row], dim=0)
            mixed[row, features] = weights @ x[real][:, features]
    return layer_norm(attention.short_norm, mixed)


def attend_query_by_query(attention, q, k, v, real, window):
    """Compute the attention for q, k, v (H, N, D) of one sequence. Return the rows of the real tokens, a list."""
    heads, _, dim = q.shape
    k = k.transpose(0, 1).flatten(1)  # (N, H D)
    v = v.transpose(0, 1).flatten(1)
    scores = k @ attention.dynamic_proj.weight.T  # (N, H r)
    k = layer_norm(attention.long_norm, k)
    v = layer_norm(attention.long_norm, v)
    k_mixed = mixtures(attention, k, scores, real, heads, dim)
    v_mixed = mixtures(attention, v, scores, real, heads, dim)
    out = torch.zeros_like(q)
    for head in range(heads):
        features = slice(head * dim, (head + 1) * dim)
        for i in real:
            start = i // window * window
            near = [j for j in real if start - window // 2 <= j < start + window + window // 2]
            keys = torch.cat([k_mixed[:, features], k[near][:, features]])
            values = torch.cat([v_mixed[:, features], v[near][:, features]])
            out[head, i] = torch.softmax(keys @ q[head, i] / dim**0.5, dim=0) @ values
    return out[:, real]


@pytest.mark.parametrize("window", [1, 2, 5, 40])
@pytest.mark.parametrize("length", [1, 8, 23])
def test_matches_formula_of_each_query(window, length):
    attention = build(window)
    q, k, v = random_qkv(length=length, dtype=torch.float64)
    mask = torch.zeros(2, length, dtype=torch.bool)
    if length > 1:
        mask[0, -3:] = True  # right padding
        mask[1, [0, 1, length // 2]] = True  # padding on the left and in the middle
    out = attention(q, k, v, Context(mask))
    for b in range(2):
        real = (~mask[b]).nonzero()[:, 0].tolist()
        expected = attend_query_by_query(attention, q[b], k[b], v[b], real, window)
        torch.testing.assert_close(out[b, :, real], expected)
