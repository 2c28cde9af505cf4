"""The learned offset and global tokens of LLN+Diag's joint form. The contract tests cover everything else."""

import pytest
import torch

from lln_fairseq.attention import Context, build_attention
from lln_fairseq.ops import reference
from lln_fairseq.ops.formula import MAX_FIRST_SEGMENT
from lln_fairseq.ops.lln import lln_diag_attention
from tests.helpers import FLOAT32_FORWARD, random_padding, random_qkv, relative_rms

BLOCK_SIZE = 16


def build(**options):
    sizes = dict(num_heads=3, head_dim=32, max_positions=200)
    return build_attention("lln_diag", **sizes, mix="joint_offset", block_size=BLOCK_SIZE, **options)


def test_joint_offset_changes_output_and_matrix_of_its_head():
    attention = build()
    q, k, v = random_qkv(length=97)
    mask = random_padding(2, 97)
    initial = attention(q, k, v, Context(mask))
    assert torch.equal(initial, lln_diag_attention(q, k, v, None, None, mask, BLOCK_SIZE, mix="joint_offset"))

    with torch.no_grad():
        attention.offset.copy_(torch.tensor([-2.0, 0.0, 3.0]))
    changed = attention(q, k, v, Context(mask))
    assert torch.equal(changed[:, 1], initial[:, 1])
    assert relative_rms(changed[:, [0, 2]], initial[:, [0, 2]]) > 0.05

    matrix = attention.double().attention_matrix(q.double(), k.double(), Context(mask))
    assert relative_rms(changed, matrix @ v.double()) <= FLOAT32_FORWARD
    (gradient,) = torch.autograd.grad(attention(q, k, v, Context(mask)).square().sum(), attention.offset)
    assert (gradient != 0).all()


def test_tokens_of_first_segments_are_global():
    attention = build(global_tokens="first_segment")
    q, k, v = random_qkv(batch=3, length=190)
    mask = random_padding(3, 190)
    context = Context(mask, first_lengths=torch.tensor([1, 20, 180]))
    output = attention(q, k, v, context)
    assert torch.equal(
        output,
        lln_diag_attention(
            q,
            k,
            v,
            None,
            None,
            mask,
            BLOCK_SIZE,
            mix="joint_offset",
            global_tokens=torch.tensor([1, 20, MAX_FIRST_SEGMENT]),
        ),
    )
    matrix = attention.double().attention_matrix(q.double(), k.double(), context)
    assert relative_rms(output, matrix @ v.double()) <= FLOAT32_FORWARD
    softmax = reference.softmax_matrix(q.double(), k.double(), mask)
    torch.testing.assert_close(matrix[1, :, :20], softmax[1, :, :20])
    assert not torch.allclose(matrix[1, :, 20:], softmax[1, :, 20:])


def test_first_segment_without_lengths_is_rejected():
    attention = build(global_tokens="first_segment")
    q, k, v = random_qkv()
    with pytest.raises(ValueError, match="global_tokens=first_segment needs the lengths of the first segments"):
        attention(q, k, v)
    with pytest.raises(ValueError, match="global_tokens=first_segment needs the lengths of the first segments"):
        attention.attention_matrix(q, k)


@pytest.mark.parametrize("global_tokens", ["20", "first_segment"])
def test_branch_with_global_tokens_attends_inside_by_softmax(global_tokens):
    attention = build(global_tokens=global_tokens, gain="learned")
    q, k, v = random_qkv(length=97)
    mask = random_padding(2, 97)
    context = Context(mask, first_lengths=torch.tensor([20, 20]))
    block = torch.arange(97) // BLOCK_SIZE
    is_global = torch.arange(97) < 20
    inside = (block[:, None] == block) | is_global | is_global[:, None]
    expected = reference.softmax_matrix(q, k, mask, inside) @ v.masked_fill(mask[:, None, :, None], 0.0)

    diag = attention.branches()["Diag only"]

    assert not list(diag.parameters())
    real = ~mask[:, None, :, None].expand_as(v)
    torch.testing.assert_close(diag(q, k, v, context)[real], expected[real], rtol=1e-5, atol=1e-5)
    real_rows = ~mask[:, None, :, None].expand(2, 3, 97, 97)
    matrix = reference.softmax_matrix(q, k, mask, inside)
    torch.testing.assert_close(diag.attention_matrix(q, k, context)[real_rows], matrix[real_rows], rtol=1e-5, atol=1e-5)


def test_branch_without_global_tokens_is_block_diagonal():
    assert type(build().branches()["Diag only"]).__name__ == "BlockDiagAttention"
