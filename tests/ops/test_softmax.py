"""torch's fused softmax attention."""

from lln_fairseq.ops import softmax
from tests.helpers import random_qkv


def test_the_log_says_once_where_torch_does_not_fuse_it(caplog):
    softmax._say_that_it_is_slow.cache_clear()
    q, k, v = random_qkv()
    softmax.softmax_attention(q, k, v)
    assert not caplog.records
    for _ in range(3):
        softmax.softmax_attention(q, k, v, dropout_p=0.1)
    (record,) = caplog.records
    assert "is not fused on a CPU" in record.getMessage()
