"""Numbers of global tokens, what they attend to, and which numbers are accepted.

test_backends.py tests one number of global tokens like every other mix.
"""

import pytest
import torch

from lln_fairseq.ops import reference
from lln_fairseq.ops.block_diag import block_diag_attention
from lln_fairseq.ops.lln import lln_diag_attention
from tests.helpers import FLOAT32_FORWARD, poison_empty, random_qkv, relative_rms
from tests.ops.mixes import (
    BLOCK,
    assert_float32_accuracy,
    attend,
    clear_rounding,
    device_of,
    holes,
    inputs,
    oracle,
    output_and_gradients,
)

MIX = "joint_offset"
PER_SEQUENCE = torch.tensor([7, 0, 21])
MORE_THAN_N = 1000


def left_padding(batch, length):
    """Return a mask, bool (B, N), with 0, 9, 18, ... padded tokens on the left."""
    return torch.arange(length)[None] < 9 * torch.arange(batch)[:, None]


MASKS = {"no padding": lambda batch, length: None, "holes": holes, "left": left_padding}
# Tokens, head dimension and block size; padding; global tokens. A block has fewer, as many or more tokens than are
# global; the sequences of 40 and of one token have one block.
CASES = [
    ((63, 32, 32), "no padding", 1),
    ((63, 32, 32), "left", MORE_THAN_N),
    ((70, 64, 16), "holes", 37),
    ((70, 64, 16), "left", PER_SEQUENCE),
    ((100, 32, 48), "no padding", 5),
    ((100, 32, 48), "holes", PER_SEQUENCE),
    ((40, 16, 64), "no padding", PER_SEQUENCE),
    ((40, 16, 64), "holes", 5),
    ((1, 32, 16), "left", 1),
    ((65, 16, 16), "holes", BLOCK),
]


def without_padding(function, mask):
    """Return the function with 0 in the output's padded rows."""
    if mask is None:
        return function
    return lambda *tensors: function(*tensors).masked_fill(mask[:, None, :, None], 0.0)


@pytest.mark.parametrize(("shape", "padding", "number"), CASES, ids=str)
def test_equals_the_oracle_whatever_padding_contains(shape, padding, number, backend, monkeypatch):
    length, dim, block = shape
    device = device_of(backend)
    mask = MASKS[padding](3, length)
    if mask is not None:
        mask = mask.to(device)
    if isinstance(number, torch.Tensor):
        number = number.to(device)
    tensors = inputs(MIX, 3, 2, length, dim, device=device)
    definition = without_padding(oracle(MIX, mask, block, number), mask)
    expected = output_and_gradients(definition, tensors, torch.float64)
    clear_rounding(expected)
    poison_empty(monkeypatch)
    if mask is not None:
        padded = mask[:, None, :, None].expand_as(tensors[0])
        tensors[:3] = [x.masked_fill(padded, torch.nan) for x in tensors[:3]]

    function = without_padding(attend(MIX, backend, mask, block, global_tokens=number), mask)
    actual = output_and_gradients(function, tensors)

    assert_float32_accuracy(actual, expected)
    if mask is not None:
        assert all((grad[padded] == 0).all() for grad in actual[1:4])


@pytest.mark.parametrize("zero", [0, torch.zeros(3, dtype=torch.int32)], ids=["number", "tensor"])
def test_no_global_tokens_change_no_bit(zero, backend):
    tensors = inputs(MIX, 3, device=device_of(backend))
    mask = holes(3, 40, device_of(backend))
    expected = output_and_gradients(attend(MIX, backend, mask), tensors)
    actual = output_and_gradients(attend(MIX, backend, mask, global_tokens=zero), tensors)
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("number", [0, 3])
def test_rows_sum_to_1(number, backend):
    """Also rows whose block has no real key."""
    q, k, v, *parameters = inputs(MIX, 3, device=device_of(backend))
    mask = holes(3, 40, device_of(backend))
    out = attend(MIX, backend, mask, global_tokens=number)(q, k, torch.ones_like(v), *parameters)
    expected = torch.ones_like(v)
    expected[2] = 0  # the last sequence is all padding
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("number", [0, 4])
def test_dropout_concerns_the_block_and_the_global_tokens(number, backend):
    device = device_of(backend)
    q, k, _ = random_qkv(batch=4, heads=8, length=64, dim=64, device=device)
    v = torch.eye(64, device=device).expand_as(q)  # so that the output is the matrix
    function = attend("joint_offset", backend, block=16, global_tokens=number)
    plain = function(q, k, v, 1.0, 1.0)
    torch.manual_seed(1)
    dropped = attend("joint_offset", backend, block=16, global_tokens=number, dropout_p=0.25)(q, k, v, 1.0, 1.0)

    token = torch.arange(64, device=device)
    inside = token[:, None] // 16 == token // 16
    inside = (inside | (token < number) | (token < number)[:, None]).expand_as(plain)
    torch.testing.assert_close(dropped[~inside], plain[~inside])
    kept = dropped[inside].abs() > 1e-6
    # The fraction of 32,768 or 45,056 weights has a standard deviation of 0.0024 or 0.002.
    assert abs(kept.float().mean().item() - 0.75) < 0.015
    torch.testing.assert_close(dropped[inside][kept], plain[inside][kept] / 0.75, rtol=1e-4, atol=1e-6)
    if number:  # also among the global keys of the other blocks alone: 48 rows of 4 weights in 32 heads
        assert abs((dropped[:, :, 16:, :4].abs() > 1e-6).float().mean().item() - 0.75) < 0.03


@pytest.mark.parametrize("attention", ["joint", "blocks"])
def test_numbers_are_not_read_with_a_bound(attention, monkeypatch):
    q, k, v = random_qkv(batch=3, length=97)

    def compute(number, **bound):
        if attention == "blocks":
            return block_diag_attention(q, k, v, None, BLOCK, global_tokens=number, **bound)
        return lln_diag_attention(q, k, v, 1.0, 1.0, block_size=BLOCK, mix=MIX, global_tokens=number, **bound)

    expected = compute(PER_SEQUENCE)
    expected_limited = compute(PER_SEQUENCE.clamp(max=9))
    monkeypatch.setattr(torch.Tensor, "tolist", None)

    torch.testing.assert_close(compute(PER_SEQUENCE, max_global_tokens=21), expected)
    torch.testing.assert_close(compute(PER_SEQUENCE, max_global_tokens=200), expected)
    torch.testing.assert_close(compute(PER_SEQUENCE, max_global_tokens=9), expected_limited)
    with pytest.raises(ValueError, match="must be at least 0, got -1"):
        compute(PER_SEQUENCE, max_global_tokens=-1)


@pytest.mark.parametrize("number", [20, torch.tensor([20, 3])], ids=str)
def test_compiled_calls_use_the_formula(number):
    tensors = inputs(MIX)
    function = attend(MIX, global_tokens=number)
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    assert relative_rms(compiled(*tensors), function(*tensors)) <= FLOAT32_FORWARD


def test_numbers_of_meta_tensors_are_not_read():
    q, k, v = torch.empty(3, 2, 3, 40, 32, device="meta").requires_grad_()
    number = torch.zeros(2, dtype=torch.int64, device="meta")
    out = attend("joint_offset", global_tokens=number)(q, k, v, 1.0, 1.0)
    (grad,) = torch.autograd.grad(out.sum(), k)
    assert grad.shape == out.shape == q.shape


@pytest.mark.parametrize("shape", [(0, 3, 7, 32), (2, 0, 7, 32), (2, 3, 0, 32)])
def test_numbers_of_empty_sequences_are_accepted(shape, backend):
    number = torch.full((shape[0],), 3)
    tensors = inputs("joint_offset", *shape, device=device_of(backend))
    assert attend("joint_offset", backend, global_tokens=number)(*tensors).shape == shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(mix="average"), "mix 'average' has no global tokens, choose joint_offset"),
        (dict(global_tokens=-1), "global_tokens must be at least 0, got -1"),
        (dict(global_tokens=torch.tensor([3, -2])), "global_tokens must be at least 0, got -2"),
        (dict(global_tokens=torch.tensor([3.0, 2.0])), "an integer tensor of shape .B,. = .2,., got torch.float32"),
        (dict(global_tokens=torch.tensor([3])), "got torch.int64 of .1,."),
        (dict(global_tokens=torch.tensor(3)), "an integer tensor of shape"),
    ],
)
def test_bad_argument_is_rejected_in_one_line(change, message):
    q, k, v = torch.zeros(3, 2, 2, 4, 8)
    arguments = dict(mix="joint_offset", global_tokens=3) | change
    with pytest.raises(ValueError, match=message) as error:
        lln_diag_attention(q, k, v, 1.0, 1.0, **arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("padding", "number"),
    [("no padding", 5), ("no padding", PER_SEQUENCE), ("holes", 37), ("left", MORE_THAN_N), ("left", PER_SEQUENCE)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernels", "torch"])
def test_block_diagonal_equals_the_oracle(dtype, padding, number, monkeypatch):
    mask = MASKS[padding](3, 97)
    tensors = inputs("average", 3, 2, 97, 32)[:3]

    def definition(q, k, v):
        return reference.block_diag_matrix(q, k, BLOCK, mask, number) @ v

    def attention(q, k, v):
        return block_diag_attention(q, k, v, mask, BLOCK, global_tokens=number)

    expected = output_and_gradients(without_padding(definition, mask), tensors, torch.float64)
    clear_rounding(expected)
    poison_empty(monkeypatch)
    if mask is not None:
        tensors = [x.masked_fill(mask[:, None, :, None], torch.nan) for x in tensors]

    assert_float32_accuracy(output_and_gradients(without_padding(attention, mask), tensors, dtype), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernels", "torch"])
def test_block_diagonal_with_dropout_has_gradients_of_what_it_drops(dtype):
    q, k, v = random_qkv(length=97, dtype=dtype)
    ones = torch.ones_like(v).requires_grad_()
    torch.manual_seed(3)

    out = block_diag_attention(q, k, ones, block_size=BLOCK, dropout_p=0.5, global_tokens=5)
    out.sum().backward()

    # Without the rows of the global queries: with values 1, an output is the sum of its kept weights.
    kept = out[:, :, 5:, 0]
    assert 0.8 < kept.mean() < 1.2
    assert kept.std() > 0.05
    torch.testing.assert_close(ones.grad.sum(), out.sum(), rtol=1e-4, atol=0)
