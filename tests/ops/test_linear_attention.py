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
