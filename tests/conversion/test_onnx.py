"""model.onnx in onnxruntime: the model's logits for any batch, length and padding, and models that are rejected."""

import re
import sys

import numpy as np
import onnxruntime
import pytest
import torch

from lln_fairseq.__main__ import main
from lln_fairseq.conversion import export as export_program
from lln_fairseq.conversion import modeling_lln_roberta as modeling
from lln_fairseq.conversion import to_onnx
from lln_fairseq.conversion.export import export
from lln_fairseq.errors import InputError
from tests.conversion.sources import add_noise, compute_logits, padded_batch
from tests.fairseq_runs import CLASSIFICATION, LLN, make_classification, train
from tests.helpers import with_representatives

ONE_LAYER = ("--encoder-layers", 1)  # the exporter takes seconds for each layer
BLOCKS = ("--lln-diag-block-size", 8)
JOINT = (*BLOCKS, "--lln-diag-mix", "joint_offset")
MODELS = {
    "softmax": ("--encoder-layers", 2),
    "lln": ("--lln-constants", "paper"),
    "lln_diag joint_offset": (*BLOCKS, "--lln-diag-mix", "joint_offset", "--lln-diag-gain", "learned"),
    "lln_diag joint": ("--lln-diag-block-size", 64, "--lln-diag-mix", "joint"),  # one block holds all tokens
    "lln softmax": ("--encoder-layers", 2, "--softmax-layers", "0"),
    "lln_diag global": (*JOINT, "--lln-diag-global-tokens", "11"),
    "lln_diag segment": (*JOINT, "--lln-diag-global-tokens", "first_segment", "--max-positions", 300),
    "lln_diag scale": (*BLOCKS, "--lln-diag-mix", "scale", "--lln-diag-scope", "batch"),
}


def run_onnx(folder, tokens):
    """Check the inputs of model.onnx and return its logits for the tokens (B, N)."""
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    inputs = [(item.name, item.shape, item.type) for item in session.get_inputs()]
    assert inputs == [
        ("input_ids", ["batch", "length"], "tensor(int64)"),
        ("attention_mask", ["batch", "length"], "tensor(int64)"),
    ]
    values = {"input_ids": tokens.numpy(), "attention_mask": (tokens != 1).numpy().astype(np.int64)}
    return torch.from_numpy(session.run(["logits"], values)[0])


@pytest.mark.parametrize("name", with_representatives(MODELS, "lln_diag joint_offset"))
def test_onnxruntime_gives_same_logits(name, pretrain, tmp_path, monkeypatch):
    checkpoint = pretrain("--attention", name.split()[0], *ONE_LAYER, *MODELS[name])
    if name == "softmax":  # writes the weights to a file of their own
        monkeypatch.setattr(to_onnx, "ONE_FILE_BYTES", 0)

    export(checkpoint, tmp_path / "out", onnx=True)

    data = tmp_path / "out" / "model.onnx.data"
    if name == "softmax":
        assert data.stat().st_size > 10_000
    else:
        assert not data.exists()
    batch = padded_batch()
    batches = [batch, batch[:1], batch[:2, :16], batch[2:3, :9], batch[3:, :1]]
    if "segment" in name:
        pair = batch.clone()
        pair[0, 20:22] = 2
        batches += [pair, pair[:1].repeat(1, 7)]
    for tokens in batches:
        real = tokens != 1
        expected = compute_logits(checkpoint, tokens)[real]
        assert expected.abs().max() > 0.5
        actual = run_onnx(tmp_path / "out", tokens)[real]
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert modeling.HAS_KERNELS


@pytest.mark.exhaustive
def test_onnx_classifier_gives_same_logits(tmp_path, monkeypatch, capsys):
    data = make_classification(tmp_path / "data")
    train(monkeypatch, tmp_path / "log", data, tmp_path / "run", *CLASSIFICATION, *LLN, *ONE_LAYER)
    checkpoint = add_noise(tmp_path / "run" / "checkpoint_last.pt")
    out = tmp_path / "out"
    capsys.readouterr()

    assert main(["export", str(checkpoint), str(out), "--onnx"]) == 0

    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.splitlines()[-1] == f"{out}: LLNRobertaForSequenceClassification"
    assert b".py" not in (out / "model.onnx").read_bytes()  # no names of this machine's source files
    expected = compute_logits(checkpoint, padded_batch(), "sentence_classification_head")
    torch.testing.assert_close(run_onnx(out, padded_batch()), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.exhaustive
def test_onnx_with_wrong_logits_is_not_written(pretrain, tmp_path, monkeypatch, capsys):
    checkpoint = pretrain("--attention", "softmax", *ONE_LAYER)
    logits_function = export_program._logits_function

    def wrong_logits_function(model, head):
        logits = logits_function(model, head)
        return lambda tokens: 1.01 * logits(tokens)

    monkeypatch.setattr(export_program, "_logits_function", wrong_logits_function)
    capsys.readouterr()

    assert main(["export", str(checkpoint), str(tmp_path / "out"), "--onnx"]) == 1

    message = r"error: model.onnx gives other logits than the model: relative error 1e-02, 1 x 1 tokens.*\n"
    assert re.fullmatch(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_missing_package_is_reported_first(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(InputError, match=r"--onnx needs onnxruntime: pip install 'lln-fairseq\[onnx\]'"):
        export(tmp_path / "nowhere.pt", tmp_path / "out", onnx=True)
