"""Tests of the reparameterization of queries and keys, the loss and the texts of attention transfer."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lln_fairseq.attention import Context, build_attention
from lln_fairseq.linearize import attention_transfer
from lln_fairseq.linearize.attention_transfer import (
    AttentionCall,
    LayerwiseTrainer,
    QKReparameterization,
    Student,
    TokenStream,
    relative_error,
)
from lln_fairseq.ops.rotary import rotary_factors, rotate
from tests.helpers import random_padding, random_qkv, relative_rms

HEADS = 3
DIM = 32


def random_reparameterization(rotary=False):
    torch.manual_seed(1)
    reparameterization = QKReparameterization(HEADS, DIM, rotary)
    sizes = {"generator": 0.3, "angle": 1.0, "log_scale": 0.5, "key_shift": 1.0}
    for name, parameter in reparameterization.named_parameters():
        nn.init.normal_(parameter, std=sizes[name])
    return reparameterization


def attention(name, **options):
    return build_attention(name, num_heads=HEADS, head_dim=DIM, max_positions=200, **options)


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("name", ["softmax", "block_diag"])
def test_reparameterization_does_not_change_softmax(name, rotary):
    q, k, v = random_qkv()
    mask = random_padding(2, 97)
    plain = attention(name)
    student = Student(attention(name), HEADS, DIM, rotary)
    assert torch.equal(student(q, k, v, Context(mask)), plain(q, k, v, Context(mask)))  # it starts as the identity

    student.alignment = random_reparameterization(rotary)

    assert relative_rms(student.alignment(q, k)[0], q) > 0.5
    assert relative_rms(student(q, k, v, Context(mask)), plain(q, k, v, Context(mask))) < 1e-5


@pytest.mark.parametrize("rotary", [False, True])
def test_reparameterization_with_rotary_commutes_with_positions(rotary):
    q, k, _ = random_qkv()
    positions = torch.arange(q.shape[2])
    factors = rotary_factors(positions, DIM, torch.float32)
    reparameterization = random_reparameterization(rotary)
    with torch.no_grad():
        before = [rotate(x, factors) for x in reparameterization(q, k)]
        after = reparameterization(rotate(q, factors), rotate(k, factors))
    for x, y in zip(before, after, strict=True):
        assert (relative_rms(x, y) < 1e-5) == rotary


@pytest.mark.parametrize("rotary", [False, True])
def test_each_parameter_of_the_reparameterization_changes_lln(rotary):
    q, k, v = random_qkv()
    lln = attention("lln")
    names = [name for name, _ in random_reparameterization(rotary).named_parameters()]
    assert len(names) == (2 if rotary else 3)
    for kept in names:
        student = Student(lln, HEADS, DIM, rotary)
        student.alignment = random_reparameterization(rotary)
        for name, parameter in student.alignment.named_parameters():
            if name != kept:
                nn.init.zeros_(parameter)
        assert relative_rms(student(q, k, v, Context()), lln(q, k, v)) > 0.05


class OneLayer(LayerwiseTrainer):
    """Trains one student to match softmax on random inputs, which are in bfloat16 under autocast."""

    def errors(self, inputs):
        call = AttentionCall(*inputs, Context(), attention("softmax")(*inputs))
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
        out = self.module(*(x.to(dtype) for x in inputs), Context())
        return [relative_error(out, call, torch.eye(HEADS * DIM))]


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("name", ["lln_diag", "hedgehog", "linformer"])
def test_transfer_with_autocast_trains_float32_weights(name, rotary, monkeypatch):
    inputs = random_qkv()[:3]
    texts = SimpleNamespace(mixed_batch=lambda *_: inputs)

    def train():
        torch.manual_seed(0)
        student = Student(attention(name), HEADS, DIM, rotary)
        trainer = OneLayer(student, 0.01, steps=4, seed=0)
        losses = [trainer.train_step(texts, 0, 0)[0] for _ in range(4)]
        assert {parameter.dtype for parameter in student.parameters()} == {torch.float32}
        return torch.tensor(losses)

    expected = train()
    monkeypatch.setattr(attention_transfer, "bfloat16_on_gpu", lambda _: torch.autocast("cpu", torch.bfloat16))
    losses = train()

    assert expected[-1] < expected[0]
    assert not torch.equal(losses, expected)
    torch.testing.assert_close(losses, expected, rtol=0.01, atol=0.0)


def test_relative_error_is_exact_under_autocast():
    q, k, v = random_qkv()
    call = AttentionCall(q, k, v, Context(), attention("softmax")(q, k, v))
    projection = torch.randn(16, HEADS * DIM)
    expected = relative_error(1.001 * call.out, call, projection)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(relative_error(1.001 * call.out, call, projection), expected)


def test_relative_error_ignores_padding():
    q, k, v = random_qkv()
    mask = random_padding(2, 97)
    teacher = AttentionCall(q, k, v, Context(mask), v)
    projection = torch.randn(16, HEADS * DIM)
    changed = 1.5 * v
    changed[mask[:, None, :, None].expand_as(v)] = 1e6

    assert relative_error(changed, teacher, projection).item() == pytest.approx(0.25, rel=1e-5)
    unmasked = teacher._replace(context=Context())
    assert relative_error(1.5 * v, unmasked, projection).item() == pytest.approx(0.25, rel=1e-5)


def test_token_stream_cuts_texts_at_every_place():
    texts = TokenStream(torch.arange(10, 20), bos=0, eos=2)

    batch = texts.batch(200, 6, torch.Generator().manual_seed(0))

    assert batch.shape == (200, 6)
    assert (batch[:, 0] == 0).all()
    assert (batch[:, -1] == 2).all()
    assert (batch[:, 1:-1].diff() == 1).all()
    assert set(batch[:, 1].tolist()) == set(range(10, 17))
    with pytest.raises(ValueError, match="10 tokens are too few for a text of 13"):
        texts.batch(1, 13, torch.Generator())
