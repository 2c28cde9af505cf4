import torch

from lln_fairseq.ops import reference
from lln_fairseq.ops.linear_attention import linear_attention
from tests.helpers import FLOAT32_FORWARD, random_padding, random_qkv, relative_rms


def test_linear_attention_equals_quadratic_form_with_infinite_padding():
    q, k, v = random_qkv(length=130)
    phi_q = q.exp()
    phi_k = k.exp()
    mask = random_padding(2, 130, full_row=True)
    expected = reference.kernel_matrix(phi_q.double(), phi_k.double(), mask) @ v.double()

    for x in (phi_k, v):
        x[mask[:, None, :].expand(x.shape[:3])] = torch.inf

    assert relative_rms(linear_attention(phi_q, phi_k, v, mask), expected) <= FLOAT32_FORWARD


def test_query_without_common_feature_gives_zero():
    q, k, v = random_qkv(length=4)
    assert (linear_attention(torch.zeros_like(q), k.exp(), v) == 0).all()


def test_gradients_equal_those_of_quadratic_form_with_rows_of_zeros():
    q, k, v = (x.double() for x in random_qkv(length=20))
    mask = random_padding(2, 20, full_row=True)
    q[:, :, 3] = -1.0
    phi_q = q.relu().requires_grad_()
    phi_k = k.relu().requires_grad_()
    weights = torch.randn(v.shape, dtype=v.dtype, generator=torch.Generator().manual_seed(3))
    expected = torch.autograd.grad((reference.kernel_matrix(phi_q, phi_k, mask) @ v * weights).sum(), (phi_q, phi_k))
    actual = torch.autograd.grad((linear_attention(phi_q, phi_k, v, mask) * weights).sum(), (phi_q, phi_k))
    for gradient, expected_gradient in zip(actual, expected, strict=True):
        torch.testing.assert_close(gradient, expected_gradient)
