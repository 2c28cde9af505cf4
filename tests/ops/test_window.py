"""Softmax over the tokens of the own and of neighboring blocks, with every backend, against its matrix."""

import functools

import pytest
import torch

from lln_fairseq.ops import dispatch, reference
from lln_fairseq.ops.backends import load_backend
from lln_fairseq.ops.block_diag import block_diag_attention
from lln_fairseq.ops.formula import DIAG, Inputs, Spec, hybrid_formula
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

FORMULA = "formula"
# Tokens, head dimension, block size and neighbors, of which block-diagonal attention has 0. A tile of Triton's
# interpreter has several blocks, one, and a part of one. The last block is full or shorter, and in the last rows there
# are fewer blocks than the neighbors reach.
SHAPES = [
    (130, 32, 48, 0),
    (163, 16, 16, 0),
    (160, 16, 16, 1),
    (163, 16, 16, 2),
    (203, 16, 64, 1),
    (250, 16, 100, 1),
    (70, 16, 32, 3),
    (40, 16, 64, 1),
    (1, 32, 16, 1),
]


@pytest.fixture(params=["torch", "cpu", "triton"])
def kernels(request):
    return name_or_skip(request.param)


@pytest.fixture(params=["torch", "cpu", "triton", FORMULA])
def backend(request):
    return name_or_skip(request.param)


def name_or_skip(name):
    q = torch.empty(1, 1, 1, 32, device=device_of(name))
    if name != FORMULA and (reason := load_backend(name).reason_against(Spec(DIAG, 16), q)):
        pytest.skip(reason)
    return name


def window(backend, block, neighbors, mask=None, counts=None, dropout=0.0, seed=7):
    """Return the attention as a function of q, k and v, without the rows of global tokens."""
    most = 0 if counts is None else int(counts.max())
    spec = Spec(DIAG, block, dropout, max_global=most, neighbors=neighbors)

    def function(q, k, v):
        tensors = Inputs(q, k, v, padding=mask, global_counts=counts if most else None)
        if backend == FORMULA:
            return hybrid_formula(spec, tensors)
        if dropout:
            tensors = tensors._replace(seed=torch.tensor([seed], device=q.device))
        return dispatch.AttentionFunction.apply(spec, backend, *tensors)

    return function


def without_rows(function, excluded):
    return lambda *tensors: function(*tensors).masked_fill(excluded[:, None, :, None], 0.0)


@pytest.mark.parametrize(
    ("padded", "has_global"), [(False, True), (True, False), (True, True)], ids=["global", "holes", "both"]
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_matrix_whatever_padding_contains(shape, padded, has_global, backend, monkeypatch):
    length, dim, block, neighbors = shape
    device = device_of(backend)
    mask = holes(2, length) if padded else None
    counts = None
    excluded = torch.zeros(2, length, dtype=torch.bool, device=device)
    if mask is not None:
        mask = mask.to(device)
        excluded = excluded | mask
    if has_global:
        counts = torch.tensor([3, 100], device=device).clamp(max=length)
        excluded = excluded | (torch.arange(length, device=device) < counts[:, None])
    tensors = inputs("lln", 2, 1, length, dim, device=device)[:3]

    def definition(q, k, v):
        return reference.block_diag_matrix(q, k, block, mask, counts, neighbors) @ v

    expected = output_and_gradients(without_rows(definition, excluded), tensors, torch.float64)
    clear_rounding(expected)
    poison_empty(monkeypatch)
    if mask is not None:
        padded = mask[:, None, :, None].expand_as(tensors[0])
        tensors = [x.masked_fill(padded, torch.nan) for x in tensors]

    function = window(backend, block, neighbors, mask, counts)
    actual = output_and_gradients(without_rows(function, excluded), tensors)

    assert_float32_accuracy(actual, expected)
    if mask is not None:
        assert all((grad[padded] == 0).all() for grad in actual[1:4])


def test_matrix_has_the_keys_of_three_blocks():
    """Queries of the first, of a middle and of the last block, which is shorter; the global token is no neighbor."""
    q = torch.zeros(1, 1, 10, 16)
    matrix = reference.block_diag_matrix(q, q, 2, global_tokens=1, neighbors=1)[0, 0]
    keys = {query: matrix[query].nonzero().flatten().tolist() for query in (1, 5, 9)}
    assert keys == {1: [0, 1, 2, 3], 5: [0, 2, 3, 4, 5, 6, 7], 9: [0, 6, 7, 8, 9]}


def test_sequence_has_the_same_output_alone_and_padded_in_a_batch(backend):
    """To the bit, because padding must not decide which neighbors a block has."""
    device = device_of(backend)
    q, k, v = inputs("lln", 2, 2, 150, 32, device=device)[:3]
    mask = torch.arange(150, device=device) >= torch.tensor([[150], [101]], device=device)
    together = window(backend, 32, 1, mask)(q, k, v)
    alone = window(backend, 32, 1)(q[1:, :, :101], k[1:, :, :101], v[1:, :, :101])
    if backend == FORMULA:  # torch multiplies matrices of other shapes in another order
        torch.testing.assert_close(together[1:, :, :101], alone, rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(together[1:, :, :101], alone)


def test_no_neighbors_are_blocks_and_all_neighbors_are_softmax(backend):
    tensors = inputs("lln", 3, device=device_of(backend))[:3]
    mask = holes(3, 40, device_of(backend))
    expected = block_diag_attention(*tensors, mask, 16)
    torch.testing.assert_close(window(backend, 16, 0, mask)(*tensors), expected, rtol=1e-5, atol=1e-6)
    everything = window(backend, 16, 2)(*tensors)  # three blocks, so that two neighbors reach all of them
    full = torch.nn.functional.scaled_dot_product_attention(*tensors)
    torch.testing.assert_close(everything, full, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES[::2], ids=str)
def test_gradients_have_the_dropout_of_the_output(shape, kernels):
    """The output is linear in v, so that <grad, out> = <v, dv>."""
    length, dim, block, neighbors = shape
    tensors = inputs("lln", 2, 1, length, dim, device=device_of(kernels))[:3]
    grad = torch.randn(tensors[0].shape, device=tensors[0].device)
    function = window(kernels, block, neighbors, dropout=0.3)
    out, *_, dv = output_and_gradients(function, tensors, grad=grad)
    assert length == 1 or not torch.equal(out, window(kernels, block, neighbors)(*tensors))
    torch.testing.assert_close((grad * out).sum(), (tensors[2] * dv).sum(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("neighbors", [0, 1])
def test_dropout_has_the_gradients_of_its_mask(neighbors, kernels):
    """The dropped weights are read from the output for v = 1; softmax with them has the same gradients."""
    q, k, v = inputs("lln", 1, 2, 64, 64, device=device_of(kernels))[:3]
    drop = functools.partial(window, kernels, 16, neighbors, dropout=0.25)
    identity = torch.eye(64, device=q.device).expand_as(v)
    kept = drop()(q, k, identity) != 0

    def definition(q, k, v):
        return (reference.block_diag_matrix(q, k, 16, neighbors=neighbors) * kept / 0.75) @ v

    actual = output_and_gradients(drop(), (q, k, v))
    assert max(errors(actual, output_and_gradients(definition, (q, k, v), torch.float64)).values()) < 2e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype, kernels):
    if kernels == "triton" and device_of(kernels) == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter computes bfloat16 wrongly")
    tensors = inputs("lln", 2, 2, 150, 32, dtype=dtype, device=device_of(kernels))[:3]
    exact = output_and_gradients(
        lambda q, k, v: reference.block_diag_matrix(q, k, 32, neighbors=1) @ v, tensors, torch.float64
    )
    actual = output_and_gradients(window(kernels, 32, 1), tensors)
    assert max(errors(actual, exact).values()) < 8 * torch.finfo(dtype).eps


def test_default_block_is_the_head_dimension():
    q, k, v = inputs("lln", length=130)[:3]
    assert torch.equal(block_diag_attention(q, k, v), block_diag_attention(q, k, v, block_size=32))


def test_second_derivatives():
    tensors = [x.double().requires_grad_() for x in inputs("lln", 1, 1, 7, 4)[:3]]
    function = functools.partial(block_diag_attention, block_size=2, neighbors=1)
    assert torch.autograd.gradgradcheck(function, tensors)


def test_more_neighbors_than_blocks_cost_nothing():
    """Without a limit, a million neighbors would take terabytes of scratch memory, or loops over tiles without keys."""
    q, k, v = inputs("lln", 2, 2, 100, 32)[:3]
    out = block_diag_attention(q, k, v, block_size=32, neighbors=10**6)
    assert torch.equal(out, block_diag_attention(q, k, v, block_size=32, neighbors=3))
    formula = hybrid_formula(Spec(DIAG, 32, neighbors=10**6), Inputs(q, k, v))  # as in exported models
    torch.testing.assert_close(formula, out)


def test_negative_number_of_neighbors_is_rejected():
    with pytest.raises(ValueError, match="neighbors must be at least 0, got -1"):
        block_diag_attention(*inputs("lln")[:3], neighbors=-1)
