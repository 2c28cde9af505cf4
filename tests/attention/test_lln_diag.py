"""The learned parameters of LLN+Diag's joint mixes. The contract tests cover everything else."""

import torch

from lln_fairseq.attention import build_attention
from lln_fairseq.ops.lln import lln_diag_attention
from tests.helpers import FLOAT32_FORWARD, random_padding, random_qkv, relative_rms

BLOCK_SIZE = 16


def build(mix):
    return build_attention("lln_diag", num_heads=3, head_dim=32, max_positions=200, mix=mix, block_size=BLOCK_SIZE)


def test_joint_offset_learns_one_number_per_head():
    attention = build("joint_offset")
    ((name, offset),) = attention.named_parameters()
    assert name == "offset"
    assert offset.shape == (3,)


def test_joint_offset_changes_output_and_matrix_of_its_head():
    attention = build("joint_offset")
    q, k, v = random_qkv(length=97)
    mask = random_padding(2, 97)
    initial = attention(q, k, v, mask)
    assert torch.equal(initial, lln_diag_attention(q, k, v, None, None, mask, BLOCK_SIZE, mix="joint_offset"))

    with torch.no_grad():
        attention.offset.copy_(torch.tensor([-2.0, 0.0, 3.0]))
    changed = attention(q, k, v, mask)
    assert torch.equal(changed[:, 1], initial[:, 1])
    assert relative_rms(changed[:, [0, 2]], initial[:, [0, 2]]) > 0.05

    matrix = attention.double().attention_matrix(q.double(), k.double(), mask)
    assert relative_rms(changed, matrix @ v.double()) <= FLOAT32_FORWARD
    (gradient,) = torch.autograd.grad(attention(q, k, v, mask).square().sum(), attention.offset)
    assert (gradient != 0).all()


def test_joint_has_no_parameters():
    assert not list(build("joint").parameters())


def test_large_joint_offset_attends_only_outside_the_block():
    attention = build("joint_offset")
    q, k, _ = random_qkv(length=97)
    block = torch.arange(97) // BLOCK_SIZE
    with torch.no_grad():
        attention.offset.fill_(12.0)
    matrix = attention.attention_matrix(q, k)
    assert matrix[..., block[:, None] == block[None, :]].max() < 1e-3


def test_very_negative_joint_offset_is_block_diagonal_softmax():
    attention = build("joint_offset")
    block_diag = build_attention("block_diag", num_heads=3, head_dim=32, max_positions=200, block_size=BLOCK_SIZE)
    q, k, v = random_qkv(length=97)
    with torch.no_grad():
        attention.offset.fill_(-80.0)
    assert relative_rms(attention(q, k, v), block_diag(q, k, v)) < 1e-6
