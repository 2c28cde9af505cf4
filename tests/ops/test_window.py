"""Softmax over the own and neighboring blocks, or over a band of tokens, with every backend, against its matrix."""

import functools

import pytest
import torch

from lln_fairseq.attention import build_attention
from lln_fairseq.ops import dispatch, reference
from lln_fairseq.ops.block_diag import block_diag_attention
from lln_fairseq.ops.formula import DIAG, Inputs, Spec, hybrid_formula, neighbors_of_band
from tests.helpers import poison_empty
from tests.ops.mixes import (
    assert_float32_accuracy,
    backend_or_skip,
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
BLOCKS = [
    (130, 32, 48, 0),
    (83, 16, 16, 0),
    (80, 16, 16, 1),
    (99, 16, 16, 2),
    (140, 16, 64, 1),
    (210, 16, 100, 1),
    (70, 16, 32, 3),
    (40, 16, 64, 1),
    (1, 32, 16, 1),
]
# Tokens, head dimension, block size and band: narrower than a block, as wide, and wider; one block and several, with a
# shorter last one; wider than the sequence; and a token that sees only itself.
BANDS = [
    (83, 16, 16, 7),
    (80, 16, 16, 16),
    (131, 32, 16, 37),
    (140, 16, 64, 20),
    (210, 16, 100, 130),
    (40, 16, 64, 9),
    (33, 16, 16, 100),
    (50, 16, 16, 0),
    (1, 32, 16, 1),
]
# What a shape's last number is; whether there is padding, and whether there are global tokens.
CASES = [
    *((shape, "neighbors", *case) for shape in BLOCKS for case in ((False, True), (True, False), (True, True))),
    *((shape, "band", padded, False) for shape in BANDS for padded in (False, True)),
]
each_kind = pytest.mark.parametrize("kind", [{"neighbors": 1}, {"band": 20}], ids=str)


@pytest.fixture(params=["torch", "cpu", "triton"])
def kernels(request):
    return backend_or_skip(request.param)


@pytest.fixture(params=["torch", "cpu", "triton", FORMULA])
def backend(request):
    return FORMULA if request.param == FORMULA else backend_or_skip(request.param)


def window(backend, block, neighbors=0, mask=None, counts=None, dropout=0.0, band=None):
    """Return the attention as a function of q, k and v, without the rows of global tokens."""
    most = 0 if counts is None else int(counts.max())

    def function(q, k, v):
        reach = neighbors
        if band is not None:
            reach = min(neighbors_of_band(band, block), (q.shape[2] - 1) // block)
        spec = Spec(DIAG, block, dropout, max_global=most, neighbors=reach, band=band)
        tensors = Inputs(q, k, v, padding=mask, global_counts=counts if most else None)
        if backend == FORMULA:
            return hybrid_formula(spec, tensors)
        if dropout:
            tensors = tensors._replace(seed=torch.tensor([7], device=q.device))
        return dispatch.AttentionFunction.apply(spec, backend, *tensors)

    return function


def without_rows(function, excluded):
    return lambda *tensors: function(*tensors).masked_fill(excluded[:, None, :, None], 0.0)


@pytest.mark.parametrize(("shape", "kind", "padded", "has_global"), CASES, ids=str)
def test_equals_the_matrix_whatever_padding_contains(shape, kind, padded, has_global, backend, monkeypatch):
    length, dim, block, reach = shape
    device = device_of(backend)
    mask = holes(2, length) if padded else None
    counts = None
    excluded = torch.zeros(2, length, dtype=torch.bool, device=device)
    if mask is not None:
        mask = mask.to(device)
        excluded = excluded | mask
    if has_global:
        counts = torch.tensor([3, 60], device=device).clamp(max=length)
        excluded = excluded | (torch.arange(length, device=device) < counts[:, None])
    tensors = inputs("lln", 2, 1, length, dim, device=device)[:3]

    def definition(q, k, v):
        return reference.block_diag_matrix(q, k, block, mask, counts, **{kind: reach}) @ v

    expected = output_and_gradients(without_rows(definition, excluded), tensors, torch.float64)
    clear_rounding(expected)
    poison_empty(monkeypatch)
    if mask is not None:
        padded = mask[:, None, :, None].expand_as(tensors[0])
        tensors = [x.masked_fill(padded, torch.nan) for x in tensors]

    function = window(backend, block, mask=mask, counts=counts, **{kind: reach})
    actual = output_and_gradients(without_rows(function, excluded), tensors)

    assert_float32_accuracy(actual, expected)
    if mask is not None:
        assert all((grad[padded] == 0).all() for grad in actual[1:4])


@pytest.mark.parametrize(
    ("block", "options", "expected"),
    [
        # Queries of the first, of a middle and of the last block, which is shorter; the global token is no neighbor.
        (2, dict(global_tokens=1, neighbors=1), {1: [0, 1, 2, 3], 5: [0, 2, 3, 4, 5, 6, 7], 9: [0, 6, 7, 8, 9]}),
        (4, dict(band=2), {0: [0, 1, 2], 5: [3, 4, 5, 6, 7], 9: [7, 8, 9]}),
    ],
)
def test_matrix_has_the_keys_of_three_blocks_or_of_the_band(block, options, expected):
    q = torch.zeros(1, 1, 10, 16)
    matrix = reference.block_diag_matrix(q, q, block, **options)[0, 0]
    assert {query: matrix[query].nonzero().flatten().tolist() for query in expected} == expected


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


@pytest.mark.parametrize(
    ("block", "kind"),
    [
        (48, {"neighbors": 0}),
        (16, {"neighbors": 1}),
        (64, {"neighbors": 1}),
        (32, {"neighbors": 3}),
        (16, {"band": 37}),
    ],
    ids=str,
)
def test_gradients_have_the_dropout_of_the_output(block, kind, kernels):
    """The output is linear in v, so that <grad, out> = <v, dv>."""
    tensors = inputs("lln", 1, 1, 133, 16, device=device_of(kernels))[:3]
    grad = torch.randn(tensors[0].shape, device=tensors[0].device)
    out, *_, dv = output_and_gradients(window(kernels, block, dropout=0.3, **kind), tensors, grad=grad)
    assert not torch.equal(out, window(kernels, block, **kind)(*tensors))
    torch.testing.assert_close((grad * out).sum(), (tensors[2] * dv).sum(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [{"neighbors": 0}, {"neighbors": 1}, {"band": 20}], ids=str)
def test_dropout_has_the_gradients_of_its_mask(kind, kernels):
    """The dropped weights are read from the output for v = 1; softmax with them has the same gradients."""
    q, k, v = inputs("lln", 1, 2, 64, 64, device=device_of(kernels))[:3]
    drop = functools.partial(window, kernels, 16, dropout=0.25, **kind)
    identity = torch.eye(64, device=q.device).expand_as(v)
    kept = drop()(q, k, identity) != 0

    def definition(q, k, v):
        return (reference.block_diag_matrix(q, k, 16, **kind) * kept / 0.75) @ v

    actual = output_and_gradients(drop(), (q, k, v))
    assert max(errors(actual, output_and_gradients(definition, (q, k, v), torch.float64)).values()) < 2e-5


def test_dropout_differs_between_heads_blocks_and_seeds(kernels):
    q, k, _ = inputs("lln", 2, 2, 128, 64, device=device_of(kernels))[:3]
    v = torch.eye(64, device=q.device).repeat(2, 1).expand_as(q)  # the output is then the blocks' probabilities
    draws = []
    for seed in (1, 2, 2**40):
        tensors = Inputs(q, k, v, seed=torch.tensor([seed], device=q.device))
        draws.append(dispatch.attend(Spec(DIAG, 64, 0.5), tensors, kernels) != 0)

    blocks = torch.stack(draws).reshape(-1, 64 * 64).double()
    correlations = torch.corrcoef(blocks).cpu() - torch.eye(len(blocks))

    assert blocks.mean().item() == pytest.approx(0.5, abs=0.01)
    assert correlations.abs().max() < 0.08  # 5 standard deviations of the correlation of 4096 independent draws


@each_kind
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype, kind, backend):
    if backend != FORMULA:
        backend_or_skip(backend, dtype)
    tensors = inputs("lln", 1, 2, 150, 32, dtype=dtype, device=device_of(backend))[:3]
    exact = output_and_gradients(
        lambda q, k, v: reference.block_diag_matrix(q, k, 32, **kind) @ v, tensors, torch.float64
    )
    actual = output_and_gradients(window(backend, 32, **kind), tensors)
    assert max(errors(actual, exact).values()) < 8 * torch.finfo(dtype).eps


def test_default_block_is_the_head_dimension():
    q, k, v = inputs("lln", length=130)[:3]
    assert torch.equal(block_diag_attention(q, k, v), block_diag_attention(q, k, v, block_size=32))


@each_kind
def test_second_derivatives(kind):
    tensors = [x.double().requires_grad_() for x in inputs("lln", 1, 1, 7, 4)[:3]]
    assert torch.autograd.gradgradcheck(lambda *x: block_diag_attention(*x, block_size=2, **kind), tensors)


@pytest.mark.parametrize("kind", [{"neighbors": 10**6}, {"band": 10**12}], ids=str)
def test_wide_windows_cost_nothing_more(kind):
    """Without a limit, they would take terabytes of scratch memory, or loops over tiles without keys."""
    q, k, v = inputs("lln", 2, 2, 100, 32)[:3]
    out = block_diag_attention(q, k, v, block_size=32, **kind)
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v), rtol=1e-4, atol=1e-5)
    formula = hybrid_formula(Spec(DIAG, 32, **{"neighbors": 10**6, **kind}), Inputs(q, k, v))  # as in exported models
    torch.testing.assert_close(formula, out)


def test_attention_has_the_band_and_its_matrix():
    q, k, v = inputs("lln", 2, 2, 50, 16)[:3]
    attention = build_attention("window", num_heads=2, head_dim=16, max_positions=50, band=5, block_size=16).eval()
    expected = reference.block_diag_matrix(q, k, 16, band=5)
    torch.testing.assert_close(attention.attention_matrix(q, k), expected)
    torch.testing.assert_close(attention(q, k, v), expected @ v, rtol=1e-4, atol=1e-5)


def test_impossible_windows_are_rejected():
    tensors = inputs("lln")[:3]
    with pytest.raises(ValueError, match="neighbors must be at least 0, got -1"):
        block_diag_attention(*tensors, neighbors=-1)
    with pytest.raises(ValueError, match="band must be at least 0, got -1"):
        block_diag_attention(*tensors, band=-1)
    with pytest.raises(ValueError, match="a window with a band cannot have global tokens"):
        block_diag_attention(*tensors, band=3, global_tokens=2)
    with pytest.raises(ValueError, match="global_tokens must be none with a band, got 3"):
        build_attention("window", num_heads=2, head_dim=16, max_positions=9, band=3, global_tokens="3")
