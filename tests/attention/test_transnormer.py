"""TransNormer's NormAttention and ReLU attention in blocks against the paper's formulas, and its local layers."""

import pytest
import torch
import torch.nn.functional as F

from lln_fairseq.attention import build_attention
from tests.attention.definition import assert_matches_definition
from tests.helpers import random_padding, random_qkv

LENGTH = 97
BLOCK_SIZE = 20
BLOCK = torch.arange(LENGTH) // BLOCK_SIZE
SAME_BLOCK = BLOCK[:, None] == BLOCK[None, :]

# (name, local_layers): the weights of all pairs of tokens, without padding.
WEIGHTS = {
    ("transnormer_t1", 0): lambda q, k: F.elu(q) @ F.elu(k).mT,
    ("transnormer_t2", 0): lambda q, k: (1 + F.elu(q)) @ (1 + F.elu(k)).mT,
    ("transnormer_t1", 1): lambda q, k: (q @ k.mT / 32**0.5).clamp(min=0) * SAME_BLOCK,
}


def build(name, **options):
    return build_attention(name, num_heads=3, head_dim=32, max_positions=100, **options)


@pytest.mark.parametrize(("name", "local_layers"), WEIGHTS)
def test_matches_formula(name, local_layers):
    attention = build(name, block_size=BLOCK_SIZE, local_layers=local_layers)
    mask = random_padding(2, LENGTH)

    def definition(q, k, v):
        weights = WEIGHTS[name, local_layers](q, k) * ~mask[:, None, None, :]
        tokens = (weights @ v).transpose(1, 2).flatten(2)  # (B, N, H · D)
        # Padded tokens are not compared. In a block that is all padding the formula would be 0/0.
        tokens = tokens.masked_fill(mask[:, :, None], 1.0)
        normalized = tokens / tokens.norm(dim=-1, keepdim=True) * (3 * 32) ** 0.5
        return normalized.unflatten(-1, (3, 32)).transpose(1, 2)

    assert_matches_definition(attention, definition, random_qkv(length=LENGTH), mask)


@pytest.mark.parametrize(
    ("layers", "options", "expected"),
    [
        (1, {}, [False]),
        (4, {}, [True, True, False, False]),
        (5, {}, [True, True, False, False, False]),
        (4, {"local_layers": 1}, [True, False, False, False]),
        (2, {"local_layers": 0}, [False, False]),
    ],
)
def test_depth_decides_which_layers_are_local(layers, options, expected):
    attention = build("transnormer_t2", **options)
    for layer in range(layers):
        attention.set_depth(layer, layers)
        assert attention.is_local == expected[layer]
        assert attention.has_matrix == attention.is_local
        assert attention.rows_sum_to_one == attention.is_local
