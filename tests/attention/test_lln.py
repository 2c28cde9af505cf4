"""The learned factors of LLN's α and β; the contract test asks everything else of them."""

import pytest
import torch

from lln_fairseq.attention import build_attention
from tests.helpers import random_padding, random_qkv


@pytest.mark.parametrize("name", ["lln", "lln_diag"])
@pytest.mark.parametrize("fixed", [{}, {"alpha": 1.5, "beta": 2.0}])
def test_each_head_learns_a_factor_of_alpha_and_of_beta(name, fixed):
    sizes = dict(num_heads=3, head_dim=32, max_positions=200)
    plain, learned = build_attention(name, **sizes, **fixed), build_attention(name, **sizes, gain="learned", **fixed)
    (q, k, v), mask = random_qkv(length=97), random_padding(2, 97)
    torch.testing.assert_close(learned(q, k, v, mask), plain(q, k, v, mask), rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        learned.log_gain.copy_(torch.tensor([[0.0, 0.7, 0.0], [0.0, 0.0, -0.7]]))
    (alpha, beta), (before_alpha, before_beta) = (each.alpha_beta(q, k, mask) for each in (learned, plain))
    factor = torch.tensor(0.7).exp()
    torch.testing.assert_close(alpha / before_alpha, torch.tensor([1.0, factor, 1.0]).expand(2, 3))
    torch.testing.assert_close(beta / before_beta, torch.tensor([1.0, 1.0, 1 / factor]).expand(2, 3))
    assert not alpha.requires_grad
    out = learned(q, k, v, mask)
    assert torch.allclose(out[:, 0], plain(q, k, v, mask)[:, 0], atol=1e-6)
    (gradient,) = torch.autograd.grad(out.square().sum(), learned.log_gain)
    assert (gradient != 0).all()
