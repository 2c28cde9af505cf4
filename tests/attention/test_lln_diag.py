"""The learned parameters of LLN+Diag's joint mixes; the contract test asks everything else of them."""

import torch

from lln_fairseq.attention import build_attention
from lln_fairseq.ops.lln import lln_diag_attention
from tests.helpers import FLOAT32_FORWARD, random_padding, random_qkv, relative_rms


def build(mix):
    return build_attention("lln_diag", num_heads=3, head_dim=32, max_positions=200, mix=mix, block_size=16)


def test_each_head_learns_one_number():
    attention, (q, k, v), mask = build("joint_offset"), random_qkv(length=97), random_padding(2, 97)
    start = attention(q, k, v, mask)
    assert torch.equal(start, lln_diag_attention(q, k, v, None, None, mask, 16, mix="joint_offset"))
    ((found, parameter),) = attention.named_parameters()
    assert (found, parameter.shape) == ("offset", (3,))
    with torch.no_grad():
        parameter.copy_(torch.tensor([-2.0, 0.0, 3.0]))
    changed = attention(q, k, v, mask)
    assert torch.equal(changed[:, 1], start[:, 1])
    assert relative_rms(changed[:, [0, 2]], start[:, [0, 2]]) > 0.05
    matrix = attention.double().attention_matrix(q.double(), k.double(), mask)
    assert relative_rms(changed, matrix @ v.double()) <= FLOAT32_FORWARD
    (gradient,) = torch.autograd.grad(attention(q, k, v, mask).square().sum(), parameter)
    assert (gradient != 0).all()


def test_joint_has_nothing_to_learn_and_a_large_offset_leaves_the_outside():
    assert not list(build("joint").parameters())
    attention, (q, k, v) = build("joint_offset"), random_qkv(length=97)
    with torch.no_grad():
        attention.offset.fill_(12.0)
    block = torch.arange(97) // 16
    matrix = attention.attention_matrix(q, k)
    assert matrix[..., block[:, None] == block[None, :]].max() < 1e-3
    with torch.no_grad():
        attention.offset.fill_(-80.0)
    only_blocks = build_attention("block_diag", num_heads=3, head_dim=32, max_positions=200, block_size=16)
    assert relative_rms(attention(q, k, v), only_blocks(q, k, v)) < 1e-6
