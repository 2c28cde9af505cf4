"""Comparison of an attention with its definition in the paper."""

import torch

from lln_fairseq.attention import Context
from tests.helpers import FLOAT32_FORWARD, FLOAT32_GRADIENT, relative_rms


def assert_matches_definition(attention, definition, inputs, mask):
    """Compare output and input gradients of an attention in float32 with definition(q, k, v) in float64.

    Only real tokens are compared. At padding the output must be finite. `inputs` are q, k, v (B, H, N, D) and `mask`
    is bool (B, N), True = padded.
    """
    inputs = [x.requires_grad_() for x in inputs]
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    expected = definition(*exact_inputs)
    out = attention(*inputs, Context(mask))
    is_real = ~mask[:, None, :, None].expand(out.shape)
    assert relative_rms(out[is_real], expected[is_real]) <= FLOAT32_FORWARD
    assert out.isfinite().all()

    grad = torch.randn(out[is_real].shape, generator=torch.Generator().manual_seed(1))
    out[is_real].backward(grad)
    expected[is_real].backward(grad.double())
    for x, exact in zip(inputs, exact_inputs, strict=True):
        assert relative_rms(x.grad, exact.grad) <= FLOAT32_GRADIENT
