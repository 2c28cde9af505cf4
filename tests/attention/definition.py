"""The comparison of a mechanism with its definition in the paper."""

import torch

from tests.helpers import FLOAT32_FORWARD, FLOAT32_GRADIENT, relative_rms


def assert_equals_definition(attention, definition, inputs, mask):
    """Compare output and gradients of the real tokens in float32 with definition(q, k, v) in float64."""
    inputs = [x.requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = definition(*exact)
    out = attention(*inputs, mask)
    real = ~mask[:, None, :, None].expand(out.shape)
    assert relative_rms(out[real], expected[real]) <= FLOAT32_FORWARD
    assert out.isfinite().all()
    grad = torch.randn(out[real].shape, generator=torch.Generator().manual_seed(1))
    out[real].backward(grad)
    expected[real].backward(grad.double())
    for x, y in zip(inputs, exact, strict=True):
        assert relative_rms(x.grad, y.grad) <= FLOAT32_GRADIENT
