"""What everything registered to replace an encoder layer promises; a new one is tested without a line here."""

import pytest
import torch

from lln_fairseq.attention import LAYER_REGISTRY, build_layer
from tests.helpers import random_padding, relative_rms

DIM = 48

# Every layer with its defaults, and the variants that take another path.
VARIANTS = {name: (name, {}) for name in LAYER_REGISTRY} | {
    "flash-quadratic": ("flash", dict(form="quadratic", chunk_size=16)),
    "flash-7": ("flash", dict(chunk_size=7, units=1)),
    "tnn-short": ("tnn", dict(gamma=0.5, rpe_layers=0)),
}
every_layer = pytest.mark.parametrize("variant", VARIANTS)


def build(variant, **dropouts):
    name, options = VARIANTS[variant]
    torch.manual_seed(0)
    return build_layer(name, dim=DIM, **dropouts, **options).eval()


def tokens(length, batch=2, seed=0, dtype=torch.float32):
    """(T, B, C), as fairseq's layers take them."""
    return torch.randn(length, batch, DIM, generator=torch.Generator().manual_seed(seed)).to(dtype)


@every_layer
@pytest.mark.parametrize("length", [1, 97, 1025])
def test_any_length_and_rows_that_are_all_padding(variant, length):
    layer, x = build(variant), tokens(length)
    whole = layer(x)
    assert whole.shape == x.shape
    assert whole.isfinite().all()
    mask = random_padding(2, length, full_row=True)
    assert layer(x, mask).isfinite().all()
    assert torch.equal(layer(x, torch.zeros_like(mask)), whole)


@every_layer
@pytest.mark.parametrize("shape", [(0, 2, DIM), (5, 0, DIM)])
def test_no_tokens_and_no_sequences(variant, shape):
    assert build(variant)(torch.zeros(shape)).shape == shape


@every_layer
@pytest.mark.parametrize("garbage", [torch.nan, 3e38])
def test_padding_may_hold_anything(variant, garbage):
    """The output and the gradients of the real tokens stay what they are, and no gradient flows to padding."""
    layer = build(variant)
    mask = random_padding(2, 97)
    mask[0, :3] = mask[0, 40] = True
    rows = mask.T[:, :, None].expand(97, 2, DIM)
    weight = tokens(97, seed=1).masked_fill(rows, 0.0)

    def run(x):
        x = x.detach().requires_grad_()
        out = layer(x, mask)
        return out[~rows], *torch.autograd.grad(out, [x, *layer.parameters()], weight)

    x = tokens(97)
    expected, found = run(x), run(x.masked_fill(rows, garbage))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert (found[1][rows] == 0).all()


@every_layer
def test_a_sequence_is_the_same_alone_padded_and_with_mates(variant):
    layer, x = build(variant), tokens(41, batch=1)
    alone = layer(x)
    others = tokens(97, seed=1)
    mask = torch.zeros(2, 97, dtype=torch.bool)
    mask[0, 41:] = True
    others[:41, :1] = x
    torch.testing.assert_close(layer(others[:, :1], mask[:1])[:41], alone, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer(others, mask)[:41, :1], alone, rtol=1e-5, atol=1e-5)


@every_layer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_large_inputs_stay_finite_with_gradients_of_every_parameter(variant, dtype):
    layer, x = build(variant).to(dtype), (50 * tokens(97)).to(dtype).requires_grad_()
    out = layer(x, random_padding(2, 97, full_row=True))
    out.float().square().mean().backward()
    assert out.dtype == dtype
    assert out.isfinite().all()
    for tensor in (x, *layer.parameters()):
        assert tensor.grad.isfinite().all()
        assert tensor.grad.abs().max() > 0 or dtype == torch.float16


@every_layer
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_near(variant, dtype):
    layer, x = build(variant), tokens(300, dtype=dtype)
    mask = random_padding(2, 300)
    real = ~mask.T
    expected = layer(x.float(), mask) - x.float()
    found = layer.to(dtype)(x, mask).float() - x.float()
    assert relative_rms(found[real], expected[real]) < (0.1 if dtype == torch.bfloat16 else 0.01)


@every_layer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(variant, dtype):
    layer, x, mask = build(variant), tokens(97, dtype=dtype).requires_grad_(), random_padding(2, 97)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x, mask)
        out.float().square().sum().backward()
    expected = layer(x.detach().float(), mask)
    real = ~mask.T
    assert x.grad.dtype == dtype
    assert x.grad.isfinite().all()
    assert relative_rms(out[real], expected[real]) < 0.02


@every_layer
@pytest.mark.parametrize("kind", ["dropout", "attention_dropout", "activation_dropout"])
def test_dropout_concerns_training_alone_and_follows_the_seed(variant, kind):
    layer, plain, x = build(variant, **{kind: 0.5}), build(variant), tokens(64)
    assert torch.equal(layer(x), plain(x))
    layer.train()
    torch.manual_seed(1)
    first = layer(x)
    torch.manual_seed(1)
    assert torch.equal(layer(x), first)
    has_weights = not variant.startswith("tnn")
    assert torch.equal(first, plain(x)) == (kind == "attention_dropout" and not has_weights)


def test_unknown_names_options_and_values_are_refused():
    for arguments, message in [
        (dict(name="flsh"), "did you mean 'flash'.*known: .*tnn"),
        (dict(name="lln_diag"), "'lln_diag' is an attention and does not replace a layer"),
        (dict(name="flash", chunks=3), "no option 'chunks'; did you mean 'chunk_size'"),
        (dict(name="flash", form="linear"), "choose from chunked, quadratic"),
        (dict(name="flash", chunk_size=0), "at least 1"),
        (dict(name="flash", key_dim=7), "must be even"),
        (dict(name="tnn", gamma=0.0), "gamma must be above 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            build_layer(**arguments, dim=DIM)
