"""model.onnx in onnxruntime: our logits, whatever the batch, its length and its padding; and what is refused."""

import re
import sys

import numpy as np
import onnxruntime
import pytest
import torch

from lln_fairseq.__main__ import main
from lln_fairseq.conversion import export as program
from lln_fairseq.conversion import modeling_lln_roberta as modeling
from lln_fairseq.conversion import to_onnx
from lln_fairseq.conversion.export import export
from lln_fairseq.errors import InputError
from tests.conversion.sources import ours, padded_batch, shaken
from tests.fairseq_runs import CLASSIFICATION, LLN, make_classification, train
from tests.helpers import with_representatives

HEAD = "sentence_classification_head"
SMALL = ("--encoder-layers", 1)  # the exporter takes seconds for each
BLOCKS = ("--lln-diag-block-size", 8)
MODELS = {
    "softmax": ("--encoder-layers", 2),
    "lln": ("--lln-constants", "paper"),
    "lln_diag joint_offset": (*BLOCKS, "--lln-diag-mix", "joint_offset", "--lln-diag-gain", "learned"),
    "lln_diag joint": ("--lln-diag-block-size", 64, "--lln-diag-mix", "joint"),  # one block for all
    "lln_diag scale": (*BLOCKS, "--lln-diag-mix", "scale", "--lln-diag-scope", "batch"),
}


def run(folder, tokens):
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    assert [(x.name, x.shape, x.type) for x in session.get_inputs()] == [
        (name, ["batch", "length"], "tensor(int64)") for name in ("input_ids", "attention_mask")
    ]
    inputs = {"input_ids": tokens.numpy(), "attention_mask": (tokens != 1).numpy().astype(np.int64)}
    return torch.from_numpy(session.run(["logits"], inputs)[0])


@pytest.mark.parametrize("name", with_representatives(MODELS, "lln_diag joint_offset"))
def test_onnxruntime_gives_our_logits(name, pretrained, tmp_path, monkeypatch):
    checkpoint = pretrained("--attention", name.split()[0], *SMALL, *MODELS[name])
    if name == "softmax":  # weights too large for a protobuf are beside it
        monkeypatch.setattr(to_onnx, "ONE_FILE", 0)
    export(checkpoint, tmp_path / "out", onnx=True)
    data = tmp_path / "out" / "model.onnx.data"
    assert data.stat().st_size > 10_000 if name == "softmax" else not data.exists()
    padded = padded_batch()
    for tokens in (padded, padded[:1], padded[:2, :16], padded[2:3, :9], padded[3:, :1]):
        real = tokens != 1
        expected = ours(checkpoint, tokens)[real]
        assert expected.abs().max() > 0.5
        torch.testing.assert_close(run(tmp_path / "out", tokens)[real], expected, rtol=1e-4, atol=1e-4)
    assert modeling.HAS_KERNELS


@pytest.mark.exhaustive
def test_a_classifier_with_the_average_of_both_parts(tmp_path, monkeypatch, capsys):
    data = make_classification(tmp_path / "data")
    train(monkeypatch, tmp_path / "log", data, tmp_path / "run", *CLASSIFICATION, *LLN, *SMALL)
    checkpoint = shaken(tmp_path / "run" / "checkpoint_last.pt")
    capsys.readouterr()
    assert main(["export", str(checkpoint), str(tmp_path / "out"), "--onnx"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.splitlines()[-1] == f"{tmp_path / 'out'}: LLNRobertaForSequenceClassification"
    assert b".py" not in (tmp_path / "out" / "model.onnx").read_bytes()
    expected = ours(checkpoint, padded_batch(), HEAD)
    torch.testing.assert_close(run(tmp_path / "out", padded_batch()), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.exhaustive
def test_a_model_that_is_another_one_is_not_written(pretrained, tmp_path, monkeypatch, capsys):
    checkpoint = pretrained("--attention", "softmax", *SMALL)
    right = program._logits
    monkeypatch.setattr(program, "_logits", lambda *given: lambda tokens: 1.01 * right(*given)(tokens))
    capsys.readouterr()
    assert main(["export", str(checkpoint), str(tmp_path / "out"), "--onnx"]) == 1
    said = capsys.readouterr().err
    assert re.fullmatch(
        r"error: model.onnx gives other logits than the model: relative error 1e-02, 1 x 1 tokens.*\n", said
    )
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_missing_packages_are_named_before_anything_is_read(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(InputError, match=r"--onnx needs onnxruntime: pip install 'lln-fairseq\[onnx\]'"):
        export(tmp_path / "nowhere.pt", tmp_path / "out", onnx=True)
