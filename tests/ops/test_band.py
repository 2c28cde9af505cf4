"""Softmax over a band of tokens, with every backend, against its matrix."""

import pytest
import torch

from lln_fairseq.attention import build_attention
from lln_fairseq.ops import reference
from lln_fairseq.ops.block_diag import block_diag_attention
from lln_fairseq.ops.dispatch import AttentionFunction
from lln_fairseq.ops.formula import DIAG, Inputs, Spec, hybrid_formula, neighbors_of_band
from tests.helpers import poison_empty
from tests.ops.mixes import (
    assert_float32_accuracy,
    clear_rounding,
    device_of,
    errors,
    holes,
    inputs,
    output_and_gradients,
)
from tests.ops.test_window import FORMULA, name_or_skip

# Tokens, head dimension, block size and band: narrower than a block, as wide, and wider; one block and several, with a
# shorter last one; wider than the sequence; and a token that sees only itself.
SHAPES = [
    (163, 16, 16, 7),
    (160, 16, 16, 16),
    (163, 32, 16, 37),
    (203, 16, 64, 20),
    (250, 16, 100, 130),
    (40, 16, 64, 9),
    (33, 16, 16, 100),
    (50, 16, 16, 0),
    (1, 32, 16, 1),
]


@pytest.fixture(params=["torch", "cpu", "triton", FORMULA])
def backend(request):
    return name_or_skip(request.param)


def band_attention(backend, block, band, mask=None, dropout=0.0, seed=7):
    """Return the attention as a function of q, k and v."""

    def function(q, k, v):
        neighbors = min(neighbors_of_band(band, block), (q.shape[2] - 1) // block)
        spec = Spec(DIAG, block, dropout, neighbors=neighbors, band=band)
        tensors = Inputs(q, k, v, padding=mask)
        if backend == FORMULA:
            return hybrid_formula(spec, tensors)
        if dropout:
            tensors = tensors._replace(seed=torch.tensor([seed], device=q.device))
        return AttentionFunction.apply(spec, backend, *tensors)

    return function


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_matrix_whatever_padding_contains(shape, padded, backend, monkeypatch):
    length, dim, block, band = shape
    device = device_of(backend)
    mask = holes(2, length, device) if padded else None
    tensors = inputs("lln", 2, 1, length, dim, device=device)[:3]

    def without_padding(function):
        if mask is None:
            return function
        return lambda *tensors: function(*tensors).masked_fill(mask[:, None, :, None], 0.0)

    def definition(q, k, v):
        return reference.block_diag_matrix(q, k, block, mask, band=band) @ v

    expected = output_and_gradients(without_padding(definition), tensors, torch.float64)
    clear_rounding(expected)
    poison_empty(monkeypatch)
    if mask is not None:
        at_padding = mask[:, None, :, None].expand_as(tensors[0])
        tensors = [x.masked_fill(at_padding, torch.nan) for x in tensors]

    actual = output_and_gradients(without_padding(band_attention(backend, block, band, mask)), tensors)

    assert_float32_accuracy(actual, expected)
    if mask is not None:
        assert all((grad[at_padding] == 0).all() for grad in actual[1:4])


def test_matrix_has_the_keys_of_the_band():
    q = torch.zeros(1, 1, 10, 16)
    matrix = reference.block_diag_matrix(q, q, 4, band=2)[0, 0]
    keys = {query: matrix[query].nonzero().flatten().tolist() for query in (0, 5, 9)}
    assert keys == {0: [0, 1, 2], 5: [3, 4, 5, 6, 7], 9: [7, 8, 9]}


def test_block_size_has_no_influence(backend):
    tensors = inputs("lln", 2, 2, 170, 32, device=device_of(backend))[:3]
    mask = torch.arange(170, device=device_of(backend)) >= torch.tensor([[170], [111]], device=device_of(backend))
    real = ~mask[:, None, :, None]
    expected = output_and_gradients(
        lambda q, k, v: real * (reference.block_diag_matrix(q, k, 16, mask, band=30) @ v), tensors, torch.float64
    )
    for block in (16, 32, 64, 200):
        function = band_attention(backend, block, 30, mask)
        actual = output_and_gradients(lambda *x: real * function(*x), tensors)  # noqa: B023 - called at once
        assert max(errors(actual, expected).values()) < 1e-5, block


def test_gradients_have_the_dropout_of_the_output(backend):
    """The output is linear in v, so that <grad, out> = <v, dv>."""
    if backend == FORMULA:
        pytest.skip("draws from torch's generator")
    tensors = inputs("lln", 2, 1, 163, 16, device=device_of(backend))[:3]
    grad = torch.randn(tensors[0].shape, device=tensors[0].device)
    out, *_, dv = output_and_gradients(band_attention(backend, 16, 37, dropout=0.3), tensors, grad=grad)
    assert not torch.equal(out, band_attention(backend, 16, 37)(*tensors))
    torch.testing.assert_close((grad * out).sum(), (tensors[2] * dv).sum(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype, backend):
    if backend == "triton" and device_of(backend) == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter computes bfloat16 wrongly")
    tensors = inputs("lln", 2, 2, 150, 32, dtype=dtype, device=device_of(backend))[:3]
    exact = output_and_gradients(
        lambda q, k, v: reference.block_diag_matrix(q, k, 32, band=20) @ v, tensors, torch.float64
    )
    actual = output_and_gradients(band_attention(backend, 32, 20), tensors)
    assert max(errors(actual, exact).values()) < 8 * torch.finfo(dtype).eps


def test_compiled_call_has_the_band():
    tensors = inputs("lln", 2, 2, 150, 32)[:3]

    def function(q, k, v):
        return block_diag_attention(q, k, v, block_size=32, band=20)

    expected = output_and_gradients(function, tensors)
    torch._dynamo.reset()
    actual = output_and_gradients(torch.compile(function, backend="aot_eager", fullgraph=True), tensors)
    assert max(errors(actual, expected).values()) < 1e-6


def test_second_derivatives():
    tensors = [x.double().requires_grad_() for x in inputs("lln", 1, 1, 7, 4)[:3]]
    assert torch.autograd.gradgradcheck(lambda *x: block_diag_attention(*x, block_size=2, band=3), tensors)


def test_wide_band_costs_nothing_more():
    """Without a limit, the scratch memory would take terabytes."""
    q, k, v = inputs("lln", 2, 2, 100, 32)[:3]
    out = block_diag_attention(q, k, v, block_size=32, band=10**12)
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v), rtol=1e-4, atol=1e-5)


def test_wrong_bands_are_rejected():
    tensors = inputs("lln")[:3]
    with pytest.raises(ValueError, match="band must be at least 0, got -1"):
        block_diag_attention(*tensors, band=-1)
    with pytest.raises(ValueError, match="a window with a band cannot have global tokens"):
        block_diag_attention(*tensors, band=3, global_tokens=2)
    with pytest.raises(ValueError, match="global_tokens must be none with a band, got 3"):
        build_attention("window", num_heads=2, head_dim=16, max_positions=9, band=3, global_tokens="3")


def test_attention_has_the_band_and_its_matrix():
    q, k, v = inputs("lln", 2, 2, 50, 16)[:3]
    attention = build_attention("window", num_heads=2, head_dim=16, max_positions=50, band=5, block_size=16).eval()
    expected = reference.block_diag_matrix(q, k, 16, band=5)
    torch.testing.assert_close(attention.attention_matrix(q, k), expected)
    torch.testing.assert_close(attention(q, k, v), expected @ v, rtol=1e-4, atol=1e-5)
