import torch

from lln_fairseq.ops import reference
from lln_fairseq.ops.linear_attention import linear_attention
from tests.helpers import FLOAT32_FORWARD, random_padding, random_qkv, relative_rms


def test_equals_the_quadratic_form_and_ignores_padding():
    q, k, v = random_qkv(length=130)
    q, k = q.exp(), k.exp()
    mask = random_padding(2, 130, full_row=True)
    expected = reference.kernel_matrix(q.double(), k.double(), mask) @ v.double()
    for x in (k, v):
        x[mask[:, None, :].expand(x.shape[:3])] = torch.inf
    assert relative_rms(linear_attention(q, k, v, mask), expected) <= FLOAT32_FORWARD


def test_a_query_that_shares_no_feature_with_any_key_gives_zero():
    q, k, v = random_qkv(length=4)
    assert (linear_attention(torch.zeros_like(q), k.exp(), v) == 0).all()
