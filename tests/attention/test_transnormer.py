"""NormAttention and ReLU attention in blocks, against the paper's formulas; the mean square is over all heads."""

import pytest
import torch
import torch.nn.functional as F

from lln_fairseq.attention import build_attention
from tests.attention.definition import assert_equals_definition
from tests.helpers import random_padding, random_qkv

LENGTH, BLOCK = 97, 20
SAME_BLOCK = torch.arange(LENGTH)[:, None] // BLOCK == torch.arange(LENGTH)[None, :] // BLOCK

# The weight of every pair of tokens, before padding is left out.
WEIGHTS = {
    ("transnormer_t1", 0): lambda q, k: F.elu(q) @ F.elu(k).mT,
    ("transnormer_t2", 0): lambda q, k: (1 + F.elu(q)) @ (1 + F.elu(k)).mT,
    ("transnormer_t1", 1): lambda q, k: (q @ k.mT / 32**0.5).clamp(min=0) * SAME_BLOCK,
}


@pytest.mark.parametrize(("name", "local_layers"), WEIGHTS)
def test_is_the_papers_formula_forward_and_backward(name, local_layers):
    attention = build_attention(name, num_heads=3, head_dim=32, max_positions=100, block_size=BLOCK,
                                local_layers=local_layers)  # fmt: skip
    mask = random_padding(2, LENGTH)

    def definition(q, k, v):
        heads = (WEIGHTS[name, local_layers](q, k) * ~mask[:, None, None, :] @ v).transpose(1, 2)  # (B, N, H, D)
        # Outputs at padding are nobody's business: in a block without a real key the formula is 0 / 0.
        tokens = heads.flatten(2).masked_fill(mask[:, :, None], 1.0)
        return (tokens / tokens.norm(dim=-1, keepdim=True) * (3 * 32) ** 0.5).unflatten(-1, (3, 32)).transpose(1, 2)

    assert_equals_definition(attention, definition, random_qkv(length=LENGTH), mask)


def test_the_kind_follows_the_depth():
    def kinds(layers, **options):
        attention = build_attention("transnormer_t2", num_heads=3, head_dim=32, max_positions=100, **options)
        found = []
        for layer in range(layers):
            attention.place(layer, layers)
            assert attention.has_matrix == attention.stochastic_rows == attention.is_local
            found.append(attention.is_local)
        return found

    assert kinds(1) == [False]
    assert kinds(4) == [True, True, False, False]
    assert kinds(5) == [True, True, False, False, False]
    assert kinds(4, local_layers=1) == [True, False, False, False]
    assert kinds(2, local_layers=0) == [False, False]


@pytest.mark.parametrize("local_layers", [0, 1])
def test_the_scale_of_the_values_is_normalised_away(local_layers):
    q, k, v = (x.double() for x in random_qkv())
    attention = build_attention("transnormer_t1", num_heads=3, head_dim=32, max_positions=100,
                                local_layers=local_layers)  # fmt: skip
    torch.testing.assert_close(attention(q, k, 1000 * v), attention(q, k, v))
    sequence = torch.ones(2, 97, dtype=torch.bool)
    assert (attention(q, k, v, sequence) == 0).all()
