"""The precision of a loaded model. The GPU is a fake: the model believes to be there, and computes on the CPU."""

import logging

import pytest
import torch

from lln_fairseq.errors import UserError
from lln_fairseq.inference import loading
from lln_fairseq.inference.loading import use_precision
from tests.models.small_model import build_model

TOKENS = torch.randint(4, 60, (3, 50), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def fake_gpu(monkeypatch):
    """Return a function that makes `use_precision` see a GPU of a compute capability in place of the CPU."""

    def install(*capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(loading, "_device_of", lambda model: torch.device("cuda"))

    return install


@pytest.mark.parametrize(
    ("requested", "capability", "used"),
    [
        (None, (9, 0), "bfloat16"),
        (None, (7, 5), "float16"),
        ("auto", (8, 0), "bfloat16"),
        ("float16", (9, 0), "float16"),
        ("bfloat16", (7, 5), "bfloat16"),
        ("float32", (9, 0), "float32"),
        ("int8", (9, 0), "bfloat16"),
    ],
)
def test_model_on_gpu_computes_in_half_precision(requested, capability, used, fake_gpu, caplog):
    fake_gpu(*capability)
    model = build_model()
    expected = model(TOKENS)[0]

    with caplog.at_level(logging.WARNING):
        assert use_precision(model, requested) == used

    dtypes = {parameter.dtype for parameter in model.encoder.sentence_encoder.layers.parameters()}
    assert dtypes == {getattr(torch, used)}
    logits = model(TOKENS)[0]
    assert torch.equal(logits, expected) == (used == "float32")
    torch.testing.assert_close(logits, expected, rtol=0, atol=0.05)
    assert ("int8 is for CPUs: on the GPU, the model computes in bfloat16" in caplog.text) == (requested == "int8")


@pytest.mark.parametrize("requested", [None, "float32", "float16"])
def test_model_on_cpu_computes_in_float32(requested, caplog):
    model = build_model()
    with caplog.at_level(logging.WARNING):
        assert use_precision(model, requested) == "float32"
    assert ("float16 is for GPUs" in caplog.text) == (requested == "float16")


def test_unknown_precision_is_rejected(fake_gpu):
    fake_gpu(9, 0)
    with pytest.raises(UserError, match=r"precision must be one of .*float16, got 'fp16'"):
        use_precision(build_model(), "fp16")
