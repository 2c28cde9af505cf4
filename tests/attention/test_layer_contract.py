"""The contract of every mechanism that replaces an encoder layer. A new one is tested without a change here."""

import pytest
import torch

from lln_fairseq.attention import LAYER_REGISTRY, Context, build_layer
from tests.helpers import random_padding, relative_rms

DIM = 48

# Every layer with its default options, and the options that lead to other code.
VARIANTS = {name: (name, {}) for name in LAYER_REGISTRY} | {
    "flash-quadratic": ("flash", dict(form="quadratic", chunk_size=16)),
    "flash-7": ("flash", dict(chunk_size=7, units=1)),
    "tnn-short": ("tnn", dict(gamma=0.5, rpe_layers=0)),
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def build(variant, **dropouts):
    name, options = VARIANTS[variant]
    torch.manual_seed(0)
    return build_layer(name, dim=DIM, **dropouts, **options).eval()


def random_tokens(length, batch=2, seed=0, dtype=torch.float32):
    """Return standard normal tokens (T, B, C), the layout of fairseq's layers."""
    return torch.randn(length, batch, DIM, generator=torch.Generator().manual_seed(seed)).to(dtype)


@every_variant
def test_any_length_and_padding_give_finite_output(variant):
    layer = build(variant)
    for length in (1, 97, 1025):
        x = random_tokens(length)
        mask = random_padding(2, length, full_row=True)
        unpadded = layer(x)
        assert unpadded.shape == x.shape
        assert unpadded.isfinite().all()
        assert layer(x, Context(mask)).isfinite().all()
        assert torch.equal(layer(x, Context(torch.zeros_like(mask))), unpadded)
    for shape in ((0, 2, DIM), (5, 0, DIM)):
        assert layer(torch.zeros(shape)).shape == shape


@every_variant
def test_padding_content_does_not_matter(variant):
    """The output and the gradients of real tokens do not change, and no gradient reaches the padding."""
    layer = build(variant)
    mask = random_padding(2, 97)
    mask[0, :3] = True
    mask[0, 40] = True
    is_padded = mask.T[:, :, None].expand(97, 2, DIM)
    weight = random_tokens(97, seed=1).masked_fill(is_padded, 0.0)

    def output_and_gradients(x):
        x = x.detach().requires_grad_()
        out = layer(x, Context(mask))
        return out[~is_padded], *torch.autograd.grad(out, [x, *layer.parameters()], weight)

    x = random_tokens(97)
    expected = output_and_gradients(x)
    for garbage in (torch.nan, 3e38):
        actual = output_and_gradients(x.masked_fill(is_padded, garbage))
        for tensor, expected_tensor in zip(actual, expected, strict=True):
            torch.testing.assert_close(tensor, expected_tensor, rtol=1e-5, atol=1e-5)
        assert (actual[1][is_padded] == 0).all()


@every_variant
def test_output_depends_neither_on_padding_nor_on_the_batch(variant):
    layer = build(variant)
    x = random_tokens(41, batch=1)
    batch = random_tokens(97, seed=1)
    batch[:41, :1] = x
    mask = torch.zeros(2, 97, dtype=torch.bool)
    mask[0, 41:] = True

    unpadded = layer(x)
    padded = layer(batch[:, :1], Context(mask[:1]))[:41]
    in_batch = layer(batch, Context(mask))[:41, :1]

    torch.testing.assert_close(padded, unpadded, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(in_batch, unpadded, rtol=1e-5, atol=1e-5)


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_large_inputs_give_finite_output_and_gradients(variant, dtype):
    layer = build(variant).to(dtype)
    x = (50 * random_tokens(97)).to(dtype).requires_grad_()
    out = layer(x, Context(random_padding(2, 97, full_row=True)))
    out.float().square().mean().backward()
    assert out.dtype == dtype
    assert out.isfinite().all()
    for tensor in (x, *layer.parameters()):
        assert tensor.grad.isfinite().all()
        assert tensor.grad.abs().max() > 0 or dtype == torch.float16


@every_variant
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 0.01), (torch.bfloat16, 0.1)])
def test_half_precision_is_close_to_float32(variant, dtype, tolerance):
    layer = build(variant)
    x = random_tokens(300, dtype=dtype)
    mask = random_padding(2, 300)
    is_real = ~mask.T
    expected_change = layer(x.float(), Context(mask)) - x.float()
    change = layer.to(dtype)(x, Context(mask)).float() - x.float()
    assert relative_rms(change[is_real], expected_change[is_real]) < tolerance


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_trains_and_matches_float32(variant, dtype):
    layer = build(variant)
    x = random_tokens(97, dtype=dtype).requires_grad_()
    mask = random_padding(2, 97)
    is_real = ~mask.T

    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x, Context(mask))
        out.float().square().sum().backward()

    expected = layer(x.detach().float(), Context(mask))
    assert x.grad.dtype == dtype
    assert x.grad.isfinite().all()
    assert relative_rms(out[is_real], expected[is_real]) < 0.02


@every_variant
@pytest.mark.parametrize("kind", ["dropout", "attention_dropout", "activation_dropout"])
def test_dropout_only_acts_in_training_and_follows_the_seed(variant, kind):
    layer = build(variant, **{kind: 0.5})
    without_dropout = build(variant)
    x = random_tokens(64)
    assert torch.equal(layer(x), without_dropout(x))

    layer.train()
    torch.manual_seed(1)
    first = layer(x)
    torch.manual_seed(1)
    assert torch.equal(layer(x), first)
    has_no_effect = kind == "attention_dropout" and variant.startswith("tnn")
    assert torch.equal(first, without_dropout(x)) == has_no_effect


BAD_ARGUMENTS = [
    (dict(name="flsh"), "did you mean 'flash'.*known: .*tnn"),
    (dict(name="lln_diag"), "'lln_diag' is an attention and does not replace a layer"),
    (dict(name="flash", chunks=3), "no option 'chunks'; did you mean 'chunk_size'"),
    (dict(name="flash", form="linear"), "choose from chunked, quadratic"),
    (dict(name="flash", chunk_size=0), "at least 1"),
    (dict(name="flash", key_dim=7), "must be even"),
    (dict(name="tnn", gamma=0.0), "gamma must be above 0"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS)
def test_build_rejects_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        build_layer(**arguments, dim=DIM)
