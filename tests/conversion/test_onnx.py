"""Exported ONNX files in onnxruntime: the outputs for any batch, length and padding, 8-bit weights, and bad input."""

import contextlib
import io
import json
import re
import shutil
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from lln_fairseq.__main__ import main
from lln_fairseq.conversion import export as export_program
from lln_fairseq.conversion import onnx_int8, to_onnx
from lln_fairseq.conversion.convert import convert
from lln_fairseq.conversion.export import export
from lln_fairseq.errors import UserError
from lln_fairseq.inference.loading import load_model
from tests.conversion.sources import add_noise, compute_logits, make_model, padded_batch
from tests.fairseq_runs import CLASSIFICATION, LLN, make_classification, train

ENCODER_OUTPUTS = ("token_embeddings", "sentence_embedding", "last_hidden_state")
ONE_LAYER = ("--encoder-layers", 1)  # the exporter takes seconds for each layer
BLOCKS = ("--lln-diag-block-size", 8)
DIAG = ("--block-diag-block-size", 8)
ROTARY = ("--rotary", "--encoder-normalize-before")
LOCAL_GLOBAL = ("--window-block-size", 8, *ROTARY, "--encoder-layers", 2, "--softmax-layers", "every:2")
JOINT = (*BLOCKS, "--lln-diag-mix", "joint_offset")
MODELS = {
    "softmax": ("--encoder-layers", 2),
    "lln": ("--lln-constants", "paper"),
    "lln_diag joint_offset": (*BLOCKS, "--lln-diag-mix", "joint_offset", "--lln-diag-gain", "learned"),
    "lln_diag one block": ("--lln-diag-block-size", 64, "--lln-diag-mix", "joint_offset"),  # one block holds all tokens
    "lln softmax": ("--encoder-layers", 2, "--softmax-layers", "0"),
    "lln_diag global": (*JOINT, "--lln-diag-global-tokens", "11"),
    "lln_diag segment": (*JOINT, "--lln-diag-global-tokens", "first_segment", "--max-positions", 300),
    "block_diag segment": (*DIAG, "--block-diag-global-tokens", "first_segment", "--max-positions", 300),
    "softmax rotary pre-norm": (*ROTARY, "--encoder-layers", 2),
    "lln_diag rotary pre-norm": (*JOINT, *ROTARY),
    "window rotary pre-norm": LOCAL_GLOBAL,
    "window band": ("--window-block-size", 8, "--window-band", 11),
    "window segment": ("--window-block-size", 8, "--window-global-tokens", "first_segment", "--max-positions", 300),
    "lln_diag batch": (*BLOCKS, "--lln-diag-scope", "batch"),
}


def run_onnx(folder, tokens, file="onnx/model.onnx", outputs=("logits",)):
    """Check the inputs and outputs of an ONNX file and return its outputs for the tokens (B, N), a single one alone."""
    session = onnxruntime.InferenceSession(folder / file)
    inputs = [(item.name, item.shape, item.type) for item in session.get_inputs()]
    assert inputs == [
        ("input_ids", ["batch", "length"], "tensor(int64)"),
        ("attention_mask", ["batch", "length"], "tensor(int64)"),
    ]
    assert [item.name for item in session.get_outputs()] == list(outputs)
    values = {"input_ids": tokens.numpy(), "attention_mask": (tokens != 1).numpy().astype(np.int64)}
    results = [torch.from_numpy(value) for value in session.run(list(outputs), values)]
    if len(results) == 1:
        return results[0]
    return results


def count_products(path):
    """Return the numbers of 8-bit products with weights, of float products with weights, and of products without."""
    graph = onnx.load(path).graph
    types = {weight.name: weight.data_type for weight in graph.initializer}
    quantized = [node for node in graph.node if node.op_type == "MatMulInteger"]
    assert all(types[node.input[1]] == onnx.TensorProto.INT8 for node in quantized)
    products = [node for node in graph.node if node.op_type == "MatMul"]
    with_weights = [node for node in products if node.input[1] in types]
    return len(quantized), len(with_weights), len(products) - len(with_weights)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MODELS)
def test_onnxruntime_gives_same_logits(name, pretrain, tmp_path, monkeypatch):
    checkpoint = pretrain("--attention", name.split()[0], *ONE_LAYER, *MODELS[name])
    if name == "softmax":  # writes the weights to a file of their own
        monkeypatch.setattr(to_onnx, "ONE_FILE_BYTES", 0)

    export(checkpoint, tmp_path / "out", onnx=True)

    data = tmp_path / "out" / "onnx/model.onnx.data"
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


def count_elements(model, length):
    """Return the number of elements of all tensors that onnxruntime computes for a sequence of this length."""
    names = []
    for node in model.graph.node:
        names += [name for name in node.output if name]
    traced = onnx.ModelProto()
    traced.CopyFrom(model)
    del traced.graph.output[:]
    traced.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    session = onnxruntime.InferenceSession(traced.SerializeToString())
    tokens = np.full((1, length), 5)
    values = session.run(names, {"input_ids": tokens, "attention_mask": np.ones_like(tokens)})
    return sum(np.size(value) for value in values)


@pytest.mark.exhaustive
@pytest.mark.parametrize("global_tokens", ["none", "first_segment"])
def test_onnx_work_is_linear_in_the_length(global_tokens, pretrain, tmp_path):
    options = (*ONE_LAYER, *JOINT, "--lln-diag-global-tokens", global_tokens, "--max-positions", 2048)
    checkpoint = pretrain("--attention", "lln_diag", *options)

    export(checkpoint, tmp_path / "out", onnx=True)

    model = onnx.load(tmp_path / "out" / "onnx/model.onnx")
    ratio = count_elements(model, 2048) / count_elements(model, 1024)
    assert 1.9 < ratio < 2.01
    card = (tmp_path / "out" / "README.md").read_text()
    assert "onnx/model.onnx: for batches of at least one sequence, each of 1 to 2048 tokens with its padding" in card


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("options", "products"),  # the classifier has two float products with weights
    [(ONE_LAYER, (6, 2, 4)), (("--attention", "window", *LOCAL_GLOBAL), (12, 2, 4))],
)
def test_onnx_classifier_gives_same_logits(options, products, tmp_path, monkeypatch, capsys):
    data = make_classification(tmp_path / "data")
    train(monkeypatch, tmp_path / "log", data, tmp_path / "run", *CLASSIFICATION, *LLN, *options)
    checkpoint = add_noise(tmp_path / "run" / "checkpoint_last.pt")
    out = tmp_path / "out"
    capsys.readouterr()

    assert main(["export", str(checkpoint), str(out), "--int8"]) == 0

    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.splitlines() == [
        "writing model.onnx and comparing its outputs, which can take a minute",
        "without a tokenizer: give --tokenizer DIRECTORY",
        f"{out}: LLNRobertaForSequenceClassification",
        f"in ONNX: {out / 'onnx/model.onnx'}, {out / 'onnx/model_quantized.onnx'}",
    ]
    for file in ("onnx/model.onnx", "onnx/model_quantized.onnx"):
        content = (out / file).read_bytes()
        assert b".py" not in content  # no names of this machine's source files
        assert str(tmp_path).encode() not in content
    assert not list(out.rglob("*inferred*"))
    expected = compute_logits(checkpoint, padded_batch(), "sentence_classification_head")
    actual = run_onnx(out, padded_batch())
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    quantized = run_onnx(out, padded_batch(), "onnx/model_quantized.onnx")
    assert 0 < (quantized - actual).abs().max() < 0.05 * actual.abs().max()
    assert count_products(out / "onnx/model_quantized.onnx") == products


@pytest.mark.exhaustive
def test_onnx_with_wrong_logits_is_not_written(pretrain, tmp_path, monkeypatch, capsys):
    checkpoint = pretrain("--attention", "softmax", *ONE_LAYER)
    output_function = export_program._output_function

    def wrong_output_function(model, head, pooling):
        outputs = output_function(model, head, pooling)
        return lambda tokens: {"logits": 1.01 * outputs(tokens)["logits"]}

    monkeypatch.setattr(export_program, "_output_function", wrong_output_function)
    capsys.readouterr()

    assert main(["export", str(checkpoint), str(tmp_path / "out"), "--onnx"]) == 1

    message = r"error: model.onnx gives other logits than the model: relative error 1e-02, 1 x 1 tokens.*\n"
    assert re.fullmatch(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_onnx_logit_near_zero_may_have_a_small_error(tmp_path, monkeypatch):
    monkeypatch.setattr(to_onnx, "open_session", lambda path: None)

    def check(name, expected, actual):
        monkeypatch.setattr(to_onnx, "run_session", lambda session, tokens: {name: torch.tensor([[actual]])})
        tokens = torch.tensor([[0, 5, 2]])
        to_onnx._check_onnx_outputs(tmp_path, iter([tokens]), lambda tokens: {name: torch.tensor([[expected]])})

    check("logits", 1e-4, 1.1e-4)
    for name, expected, actual in (("logits", 1e-4, 5e-4), ("logits", 9.0, 9.01), ("sentence_embedding", 0.1, 0.1001)):
        with pytest.raises(UserError, match=f"gives other {name} than the model"):
            check(name, expected, actual)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """Return the directory of a converted encoder, exported with --int8, and what the program printed."""
    folder = tmp_path_factory.mktemp("encoder")
    make_model("bert", folder / "bert", headless=True, num_hidden_layers=1)
    convert(folder / "bert", folder / "converted", "lln_diag")
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout):
        assert main(["export", str(folder / "converted" / "model.pt"), str(folder / "out"), "--int8"]) == 0
    return folder, stdout.getvalue()


def test_onnx_encoder_gives_hidden_states_and_sentence_vectors(encoder):
    folder, _ = encoder
    model, _ = load_model(str(folder / "converted" / "model.pt"))
    for tokens in (padded_batch(), padded_batch()[2:3, :5]):
        hidden, vectors, copy = run_onnx(folder / "out", tokens, outputs=ENCODER_OUTPUTS)

        with torch.no_grad():
            expected, _ = model(tokens, features_only=True)
        real = tokens != 1
        torch.testing.assert_close(hidden[real], expected[real], rtol=1e-4, atol=1e-4)
        assert torch.equal(copy, hidden)
        means = torch.stack([row[mask].mean(dim=0) for row, mask in zip(expected, real, strict=True)])
        torch.testing.assert_close(vectors, means, rtol=1e-4, atol=1e-4)


def test_int8_encoder_agrees_with_float(encoder):
    folder, printed = encoder
    batch = padded_batch()
    _, vectors, _ = run_onnx(folder / "out", batch, outputs=ENCODER_OUTPUTS)
    _, quantized, _ = run_onnx(folder / "out", batch, "onnx/model_quantized.onnx", ENCODER_OUTPUTS)

    cosines = torch.cosine_similarity(vectors, quantized)
    assert 0.99 < cosines.min() < 0.999999
    assert count_products(folder / "out" / "onnx/model_quantized.onnx") == (
        6,
        0,
        4,
    )  # q, k, v, out, fc1, fc2; attention
    assert f"{folder / 'out'}: LLNRobertaModel, sentence vectors (pooling: mean)\n" in printed


def test_missing_package_is_reported_first(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    for options in ({"onnx": True}, {"int8": True}):
        with pytest.raises(UserError, match=r"--onnx needs onnxruntime: pip install 'lln-fairseq\[onnx\]'"):
            export(tmp_path / "nowhere.pt", tmp_path / "out", **options)


def test_int8_outputs_that_are_not_finite_are_rejected(encoder, tmp_path, monkeypatch):
    out = shutil.copytree(encoder[0] / "out", tmp_path / "out")
    config = json.loads((out / "config.json").read_text())

    def give_outputs(at_tokens, at_padding):
        def run_session(session, tokens):
            return {"logits": torch.where(tokens.ne(1), at_tokens, at_padding)[..., None]}

        monkeypatch.setattr(to_onnx, "run_session", run_session)

    give_outputs(1.0, torch.nan)
    onnx_int8.write_int8(out, config)
    give_outputs(torch.nan, 1.0)
    with pytest.raises(UserError, match=r"logits of model_quantized\.onnx is not finite: export without --int8"):
        onnx_int8.write_int8(out, config)
