"""What softmax does not notice of an alignment, and that folding it changes nothing."""

import pytest
import torch
from torch import nn

from lln_fairseq.attention import build_attention
from lln_fairseq.linearize.attention_transfer import (
    AttentionCall,
    QKReparameterization,
    Student,
    TokenStream,
    relative_error,
)
from tests.helpers import random_padding, random_qkv, relative_rms

HEADS, DIM = 3, 32


def random_alignment():
    torch.manual_seed(1)
    alignment = QKReparameterization(HEADS, DIM)
    with torch.no_grad():
        for parameter, size in zip(alignment.parameters(), (0.3, 0.5, 1.0), strict=True):
            parameter.normal_(0, size)
    return alignment


def attention(name, **options):
    return build_attention(name, num_heads=HEADS, head_dim=DIM, max_positions=200, **options)


@pytest.mark.parametrize("name", ["softmax", "block_diag"])
def test_softmax_does_not_notice_an_alignment(name):
    (q, k, v), mask = random_qkv(), random_padding(2, 97)
    plain, aligned = attention(name), Student(attention(name), HEADS, DIM)
    assert torch.equal(aligned(q, k, v, mask), plain(q, k, v, mask))  # the identity at first
    aligned.alignment = random_alignment()
    assert relative_rms(aligned.alignment(q, k)[0], q) > 0.5
    assert relative_rms(aligned(q, k, v, mask), plain(q, k, v, mask)) < 1e-5


def test_lln_notices_every_part_of_it():
    (q, k, v), lln = random_qkv(), attention("lln")
    for kept in range(3):
        student = Student(lln, HEADS, DIM)
        student.alignment = random_alignment()
        for number, parameter in enumerate(student.alignment.parameters()):
            if number != kept:
                nn.init.zeros_(parameter)
        assert relative_rms(student(q, k, v), lln(q, k, v)) > 0.05


def test_the_error_is_relative_to_the_teacher_and_leaves_padding_out():
    (q, k, v), mask = random_qkv(), random_padding(2, 97)
    teacher, projection = AttentionCall(q, k, v, mask, v), torch.randn(16, HEADS * DIM)
    changed = 1.5 * v
    changed[mask[:, None, :, None].expand_as(v)] = 1e6
    assert relative_error(changed, teacher, projection).item() == pytest.approx(0.25, rel=1e-5)
    unmasked = teacher._replace(mask=None)
    assert relative_error(1.5 * v, unmasked, projection).item() == pytest.approx(0.25, rel=1e-5)


def test_texts_are_cut_at_every_place():
    texts = TokenStream(torch.arange(10, 20), bos=0, eos=2)
    batch = texts.batch(200, 6, torch.Generator().manual_seed(0))
    assert batch.shape == (200, 6)
    assert (batch[:, 0] == 0).all()
    assert (batch[:, -1] == 2).all()
    assert (batch[:, 1:-1].diff() == 1).all()
    assert set(batch[:, 1].tolist()) == set(range(10, 17))
    with pytest.raises(ValueError, match="10 tokens are too few for a text of 13"):
        texts.batch(1, 13, torch.Generator())
