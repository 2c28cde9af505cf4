"""The contract of every registered attention. A new file in lln_fairseq/attention is tested without a change here."""

import math

import pytest
import torch

from lln_fairseq.attention import ATTENTION_REGISTRY, Attention, Context, build_attention
from lln_fairseq.attention.registry import parse_attention_spec
from tests.helpers import FLOAT32_FORWARD, random_padding, random_qkv, relative_rms

HEADS = 3
DIM = 32
MAX_POSITIONS = 1100

# Every attention with its default options, and the options that lead to other code.
VARIANTS = {name: (name, {}) for name in ATTENTION_REGISTRY} | {
    "lln-fixed": ("lln", dict(alpha=2.0, beta=1.5)),
    "lln-paper-batch": ("lln", dict(constants="paper", scope="batch")),
    "lln-gain": ("lln", dict(gain="learned")),
    "lln_diag-gain": ("lln_diag", dict(gain="learned", mix="joint_offset")),
    "block_diag-7": ("block_diag", dict(block_size=7)),
    "window-7": ("window", dict(block_size=7)),
    "window-16-2": ("window", dict(block_size=16, neighbors=2)),
    "lln_diag-7": ("lln_diag", dict(block_size=7)),
    "lln_diag-joint-offset": ("lln_diag", dict(mix="joint_offset")),
    "lln_diag-joint-offset-7": ("lln_diag", dict(mix="joint_offset", block_size=7)),
    "lln_diag-joint-offset-48": ("lln_diag", dict(mix="joint_offset", block_size=48)),
    "block_diag-global-16": ("block_diag", dict(block_size=7, global_tokens="16")),
    "window-global-16": ("window", dict(block_size=7, global_tokens="16")),
    "lln_diag-joint-global-16": ("lln_diag", dict(mix="joint_offset", block_size=7, global_tokens="16")),
    "lln_diag-joint-global-100": ("lln_diag", dict(mix="joint_offset", global_tokens=100)),
    "hedgehog-diag-7": ("hedgehog", dict(block_size=7)),
    "t2r-diag-7": ("t2r", dict(block_size=7, num_features=12)),
    "transnormer_t1-local": ("transnormer_t1", dict(local_layers=1)),
    "transnormer_t2-local-diag": ("transnormer_t2", dict(local_layers=1, block_size=7)),
    "nystrom-7": ("nystrom", dict(landmarks=7)),
    "nystrom-conv": ("nystrom", dict(landmarks=13, conv_kernel=33)),
    "linformer-20": ("linformer", dict(projected_length=20)),
    "longformer-5": ("longformer", dict(one_sided_window=5)),
    "longformer-64": ("longformer", dict(one_sided_window=64)),
    "skyformer-9": ("skyformer", dict(landmarks=9)),
    "transformer_ls-7": ("transformer_ls", dict(window=7, rank=3)),
    "transformer_ls-64": ("transformer_ls", dict(window=64)),
    "reformer-5": ("reformer", dict(chunk_size=5)),
    "reformer-16": ("reformer", dict(chunk_size=16, hashes=1)),
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def build(variant, dropout=0.0):
    name, options = VARIANTS[variant]
    torch.manual_seed(0)
    attention = build_attention(
        name, num_heads=HEADS, head_dim=DIM, max_positions=MAX_POSITIONS, dropout=dropout, **options
    )
    return attention.eval()


@every_variant
def test_forward_equals_matrix_times_values(variant):
    attention = build(variant)
    if not attention.has_matrix:
        with pytest.raises(ValueError, match="no single attention matrix"):
            attention.attention_matrix(*random_qkv()[:2])
        return

    for length in (1, 97, 130):
        q, k, v = random_qkv(length=length)
        mask = random_padding(2, length, full_row=True)
        matrix = attention.double().attention_matrix(q.double(), k.double(), Context(mask))
        assert relative_rms(attention.float()(q, k, v, Context(mask)), matrix @ v.double()) <= FLOAT32_FORWARD
        if not attention.rows_sum_to_one:
            continue
        assert (matrix.sum(dim=-1) <= 1 + 1e-9).all()
        # Rows of a block-diagonal part are 0 in blocks that are all padding, and with neighbors that are.
        has_blocks = "window" in variant or ("diag" in variant and "joint" not in variant)
        if not has_blocks:
            row_sums = (~mask.all(dim=1)).double()[:, None, None].expand(2, HEADS, length)
            torch.testing.assert_close(matrix.sum(dim=-1), row_sums)


def test_default_matrix_is_that_of_evaluation():
    """Softmax overrides the default with the formula."""
    attention = build("softmax", dropout=0.5).train()
    q, k, _ = random_qkv(length=97, dtype=torch.float64)
    mask = random_padding(2, 97, full_row=True)

    matrix = Attention.attention_matrix(attention, q.requires_grad_(), k, Context(mask))

    torch.testing.assert_close(matrix, attention.attention_matrix(q, k, Context(mask)))
    assert not matrix.requires_grad
    assert attention.training


@every_variant
def test_padding_content_does_not_matter(variant):
    """The output and the gradients of real tokens do not change, and no gradient reaches the padding."""
    attention = build(variant)
    mask = random_padding(2, 97)
    mask[0, :3] = True
    mask[0, 40] = True
    is_padded = mask[:, None, :, None].expand(2, HEADS, 97, DIM)
    weight = torch.randn(is_padded.shape, generator=torch.Generator().manual_seed(1)).masked_fill(is_padded, 0.0)

    def output_and_gradients(*inputs):
        inputs = [x.requires_grad_() for x in inputs]
        out = attention(*inputs, Context(mask))
        gradients = torch.autograd.grad(out, [*inputs, *attention.parameters()], weight)
        return out[~is_padded], *gradients

    inputs = random_qkv(length=97)
    expected = output_and_gradients(*inputs)
    for garbage in (torch.nan, 3e38, 1e4):
        actual = output_and_gradients(*(x.detach().masked_fill(is_padded, garbage) for x in inputs))
        for x, y in zip(actual, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
        for gradient in actual[1:4]:
            assert (gradient[is_padded] == 0).all()


@every_variant
def test_autocast_trains_and_matches_float32(variant):
    attention = build(variant)
    context = Context(random_padding(2, 97))
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [x.to(dtype).requires_grad_() for x in random_qkv(length=97)]

        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = attention(*inputs, context)
            out.float().square().sum().backward()

        expected = attention(*(x.detach().float() for x in inputs), context)
        assert relative_rms(out.float(), expected) < 0.01
        assert out.isfinite().all()
        for x in inputs:
            assert x.grad.dtype == dtype
            assert x.grad.isfinite().all()


@every_variant
def test_output_depends_neither_on_padding_nor_on_the_batch(variant):
    attention = build(variant)
    q, k, v = random_qkv(batch=1, length=41)
    batch = random_qkv(batch=2, length=97, seed=1)
    mask = torch.zeros(2, 97, dtype=torch.bool)
    mask[0, 41:] = True
    for x, sequence in zip(batch, (q, k, v), strict=True):
        x[:1, :, :41] = sequence

    unpadded = attention(q, k, v)
    padded = attention(*(x[:1] for x in batch), Context(mask[:1]))[:, :, :41]
    in_batch = attention(*batch, Context(mask))[:1, :, :41]

    torch.testing.assert_close(padded, unpadded, rtol=1e-5, atol=1e-5)
    if attention.batch_independent:
        torch.testing.assert_close(in_batch, unpadded, rtol=1e-5, atol=1e-5)
    else:
        assert not torch.allclose(in_batch, unpadded, rtol=1e-5, atol=1e-5)


@every_variant
def test_large_inputs_stay_finite(variant):
    attention = build(variant)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        inputs = [x.requires_grad_() for x in random_qkv(length=97, scale=50.0, dtype=dtype)]
        out = attention(*inputs, Context(random_padding(2, 97, full_row=True)))
        out.float().square().mean().backward()
        assert out.dtype == dtype
        assert out.isfinite().all()
        assert all(x.grad.isfinite().all() for x in inputs)


@every_variant
def test_dropout_only_acts_in_training_and_follows_the_seed(variant):
    attention = build(variant, dropout=0.5)
    without_dropout = build(variant)
    q, k, v = random_qkv(length=64)
    expected = without_dropout(q, k, v)
    assert torch.equal(attention(q, k, v), expected)

    attention.train()
    torch.manual_seed(1)
    first = attention(q, k, v)
    second = attention(q, k, v)
    torch.manual_seed(1)
    assert torch.equal(attention(q, k, v), first)
    has_no_effect = torch.equal(first, expected)  # without softmax, there are no weights to drop
    assert torch.equal(second, first) == has_no_effect
    if VARIANTS[variant][0] in ("softmax", "block_diag", "window", "lln_diag"):
        assert not has_no_effect


BAD_ARGUMENTS = [
    (dict(name="lln_dia"), "did you mean 'lln_diag'.*known: .*softmax"),
    (dict(name="lln_diag", blocksize=3), "no option 'blocksize'; did you mean 'block_size'"),
    (dict(name="lln", scope="layer"), "choose from head, batch"),
    (dict(name="lln", alpha=1.0), "together"),
    (dict(name="lln", alpha=-1.0, beta=1.0), "positive"),
    (dict(name="lln", alpha=math.inf, beta=1.0), "attention 'lln': alpha must be finite in float32, got inf"),
    (dict(name="lln_diag", alpha=1.0, beta=math.nan), "beta must be finite in float32, got nan"),
    (dict(name="skyformer", gamma=1e39), "gamma must be finite in float32, got 1e\\+39"),
    (dict(name="lln_diag", block_size=0), "at least 1"),
    (dict(name="lln_diag", global_tokens="16"), "global_tokens=16 needs the mix joint_offset, got mix 'average'"),
    (dict(name="lln_diag", global_tokens="first_segment"), "needs the mix joint_offset, got mix 'average'"),
    (dict(name="lln_diag", global_tokens="all"), "none, first_segment or a positive number, got 'all'"),
    (dict(name="block_diag", global_tokens="all"), "none, first_segment or a positive number, got 'all'"),
    (dict(name="lln_diag", global_tokens=0), "none, first_segment or a positive number, got '0'"),
    (dict(name="transnormer_t2", local_layers=-1), "at least 0"),
    (dict(name="nystrom", landmarks=0), "at least 1"),
    (dict(name="nystrom", conv_kernel=8), "must be odd"),
    (dict(name="linformer", projected_length="foo"), "projected_length must be a number, got 'foo'"),
    (dict(name="window", neighbors=None), "neighbors must be a number, got 'None'"),
    (dict(name="window", neighbors=1.5), "neighbors must be a whole number, got 1.5"),
    (dict(name="longformer", one_sided_window=0), "at least 1"),
    (dict(name="skyformer", gamma=0.0), "gamma must be positive"),
    (dict(name="transformer_ls", rank=0), "at least 1"),
    (dict(name="reformer", hashes=0), "at least 1"),
    (dict(name="performer", num_features=0), "num_features must be at least 1, got 0"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS)
def test_build_rejects_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        build_attention(**arguments, num_heads=2, head_dim=8, max_positions=9)


def test_attention_spec_rejects_option_without_value():
    with pytest.raises(ValueError, match="OPTION=VALUE, got 'mix'"):
        parse_attention_spec("lln_diag:block_size=8,mix")
