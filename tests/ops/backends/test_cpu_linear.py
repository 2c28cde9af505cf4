"""Tests of the C kernel for linear layers with packed weights."""

import pytest
import torch
import torch.nn.functional as F

from lln_fairseq.ops.backends.cpu.linear import pack_weight, packed_linear
from tests.helpers import FLOAT32_FORWARD, relative_rms

needs_compiler = pytest.mark.skipif(pack_weight(torch.zeros(32, 1)) is None, reason="there is no C compiler or no AVX")


def random_layer(rows, inner, columns):
    """Return x (rows, inner), a weight (columns, inner) and a bias (columns)."""
    generator = torch.Generator().manual_seed(rows + inner + columns)
    x = torch.randn(rows, inner, generator=generator)
    weight = torch.randn(columns, inner, generator=generator)
    bias = torch.randn(columns, generator=generator)
    return x, weight, bias


def assert_float32_accuracy(x, weight, bias):
    """Compare the kernel with torch in float64, with and without GELU."""
    expected = F.linear(x.double(), weight.double(), bias.double())
    packed = pack_weight(weight)
    assert relative_rms(packed_linear(x, packed, bias), expected) <= FLOAT32_FORWARD
    assert relative_rms(packed_linear(x, packed, bias, gelu=True), F.gelu(expected)) <= FLOAT32_FORWARD


@needs_compiler
@pytest.mark.parametrize("rows", [*range(1, 31), 113, 130])
def test_every_number_of_rows_equals_the_oracle(rows):
    assert_float32_accuracy(*random_layer(rows, 48, 64))


@needs_compiler
@pytest.mark.parametrize("inner", [1, 16, 255, 256, 257, 1024, 2048])
@pytest.mark.parametrize("columns", [32, 96])
def test_every_width_equals_the_oracle(inner, columns):
    assert_float32_accuracy(*random_layer(17, inner, columns))


@needs_compiler
def test_no_rows_and_batches_keep_their_shape():
    x, weight, bias = random_layer(30, 16, 32)
    packed = pack_weight(weight)
    assert packed_linear(x[:0], packed, bias).shape == (0, 32)
    batched = packed_linear(x.view(5, 6, 16), packed, bias)
    assert torch.equal(batched.view(30, 32), packed_linear(x, packed, bias))
    transposed = packed_linear(x.view(5, 6, 16).transpose(0, 1), packed, bias)
    assert torch.equal(transposed, batched.transpose(0, 1))


@needs_compiler
def test_a_row_does_not_depend_on_other_rows_or_threads():
    x, weight, bias = random_layer(130, 300, 64)
    packed = pack_weight(weight)
    expected = packed_linear(x, packed, bias, gelu=True)
    assert torch.equal(packed_linear(x[37:38], packed, bias, gelu=True), expected[37:38])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(threads, 2))
        assert torch.equal(packed_linear(x, packed, bias, gelu=True), expected)
    finally:
        torch.set_num_threads(threads)


@needs_compiler
def test_gelu_of_small_large_and_infinite_numbers():
    numbers = torch.cat(
        [torch.linspace(-30, 30, 4001), torch.tensor([1e-30, -1e-30, 1e30, -1e30, torch.inf, torch.nan])]
    )
    bias = F.pad(numbers, (0, -numbers.numel() % 32))
    packed = pack_weight(torch.zeros(bias.numel(), 1))
    actual = packed_linear(torch.zeros(1, 1), packed, bias, gelu=True)[0]
    torch.testing.assert_close(actual.double(), F.gelu(bias.double()), rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(
    "weight",
    [
        torch.zeros(33, 8),
        torch.zeros(32, 0),
        torch.zeros(32, 8, dtype=torch.float64),
        torch.zeros(32, 8, device="meta"),
    ],
    ids=["columns", "empty", "float64", "meta"],
)
def test_unsupported_weights_are_not_packed(weight):
    assert pack_weight(weight) is None
