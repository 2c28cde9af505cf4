"""LLN and LLN+Diag as public functions; test_backends.py compares their results with oracles."""

import pytest
import torch

from lln_fairseq.ops import dispatch
from lln_fairseq.ops.lln import lln_attention, lln_diag_attention
from tests.helpers import FLOAT32_FORWARD, FLOAT32_GRADIENT, random_qkv, relative_rms
from tests.ops.mixes import TESTED_MIXES, attend, oracle, output_and_gradients


def test_activation_checkpointing_repeats_the_dropout():
    q, k, v = (x.requires_grad_() for x in random_qkv(length=70))

    def attention(q, k, v):
        return lln_diag_attention(q, k, v, 2.0, 2.0, dropout_p=0.3)

    torch.manual_seed(3)
    plain = attention(q, k, v)
    torch.manual_seed(3)
    recomputed = torch.utils.checkpoint.checkpoint(attention, q, k, v, use_reentrant=False)

    assert torch.equal(plain, recomputed)
    gradients = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (plain, recomputed)]
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("mix", TESTED_MIXES)
@pytest.mark.parametrize("shape", [(), (2,), (3, 1), (3, 2)])
def test_alpha_and_beta_broadcast(shape, mix):
    q, k, v = random_qkv(batch=3, heads=2, length=40)
    tensors = [q, k, v, torch.full(shape, 1.2), torch.full(shape, 0.7)]

    actual = output_and_gradients(lambda *x: attend(mix)(*x, offset=None), tensors)
    expected = output_and_gradients(
        lambda q, k, v, a, b: oracle(mix)(q, k, v, a.expand(3, 2), b.expand(3, 2), 0.0), tensors, torch.float64
    )

    assert relative_rms(actual[0], expected[0]) <= FLOAT32_FORWARD
    for x, y in zip(actual[1:], expected[1:], strict=True):
        assert x.shape == y.shape
        assert relative_rms(x, y) <= FLOAT32_GRADIENT


def test_unavailable_backend_is_rejected_with_the_reason(monkeypatch):
    q, k, v = random_qkv(length=20, dim=32)
    with pytest.raises(ValueError, match="blocks of 16 to 256 tokens, not 7"):
        lln_diag_attention(q, k, v, 2.0, 2.0, block_size=7, backend="triton")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="Triton is not installed"):
        lln_attention(q, k, v, 2.0, 2.0, backend="triton")


def test_gpu_without_kernels_for_these_tensors_is_reported_once(monkeypatch, caplog):
    monkeypatch.setitem(dispatch._AUTO_BY_DEVICE_TYPE, "cpu", "triton")
    q, k, v = random_qkv(length=20, dim=24)
    for _ in range(2):
        lln_attention(q, k, v, 2.0, 2.0)
    assert caplog.messages == [
        "attention on this GPU runs in PyTorch, several times slower: The Triton kernels support the head dims "
        "(16, 32, 64, 128), not 24."
    ]
