"""The learned factors of LLN's α and β. The contract tests cover everything else."""

import pytest
import torch

from lln_fairseq.attention import Context, build_attention
from tests.helpers import random_padding, random_qkv


@pytest.mark.parametrize("name", ["lln", "lln_diag"])
@pytest.mark.parametrize("fixed", [{}, {"alpha": 1.5, "beta": 2.0}])
def test_learned_gain_multiplies_alpha_and_beta_of_each_head(name, fixed):
    sizes = dict(num_heads=3, head_dim=32, max_positions=200)
    plain = build_attention(name, **sizes, **fixed)
    learned = build_attention(name, **sizes, gain="learned", **fixed)
    q, k, v = random_qkv(length=97)
    mask = random_padding(2, 97)
    plain_out = plain(q, k, v, Context(mask))
    torch.testing.assert_close(learned(q, k, v, Context(mask)), plain_out, rtol=1e-5, atol=1e-6)

    with torch.no_grad():
        learned.log_gain.copy_(torch.tensor([[0.0, 0.7, 0.0], [0.0, 0.0, -0.7]]))
    with torch.no_grad():
        alpha, beta = learned.alpha_beta(q, k, Context(mask))
    plain_alpha, plain_beta = plain.alpha_beta(q, k, Context(mask))
    factor = torch.tensor(0.7).exp()
    torch.testing.assert_close(alpha / plain_alpha, torch.tensor([1.0, factor, 1.0]).expand(2, 3))
    torch.testing.assert_close(beta / plain_beta, torch.tensor([1.0, 1.0, 1 / factor]).expand(2, 3))

    out = learned(q, k, v, Context(mask))
    assert torch.allclose(out[:, 0], plain_out[:, 0], atol=1e-6)  # the gain of head 0 is still 1
    (gradient,) = torch.autograd.grad(out.square().sum(), learned.log_gain)
    assert (gradient != 0).all()
