"""Test models in transformers and onnxruntime: their outputs, and what is missing."""

import importlib.util
import sys

import pytest
import torch

from lln_fairseq.conversion.convert import convert
from lln_fairseq.conversion.export import export
from lln_fairseq.errors import UserError
from lln_fairseq.inference.runtimes import load_onnx, load_transformers
from tests.conversion.classifiers import LABELS, make_classifier

TOKENS = torch.tensor([[0, 7, 9, 8, 2], [0, 6, 2, 1, 1]])
INPUTS = {"input_ids": TOKENS, "attention_mask": TOKENS.ne(1).long()}


@pytest.fixture(scope="module")
def roberta(tmp_path_factory):
    """Return a RoBERTa classifier of transformers and its directory."""
    folder = tmp_path_factory.mktemp("roberta")
    return make_classifier("roberta", folder), folder


def expected_logits(model, **inputs):
    with torch.no_grad():
        return model(**inputs).logits


def test_transformers_gives_logits_in_both_precisions(roberta):
    model, folder = roberta
    expected = expected_logits(model, **INPUTS)

    torch.testing.assert_close(load_transformers(folder)(INPUTS), expected)
    actual = load_transformers(folder, torch.bfloat16)(INPUTS)

    assert actual.dtype == torch.float32
    assert 0 < (actual - expected).abs().max() < 0.1 * expected.abs().max()


def test_transformers_reads_second_texts_of_bert(tmp_path):
    model = make_classifier("bert", tmp_path)
    tokens = torch.tensor([[2, 7, 3, 8, 3]])
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    inputs["token_type_ids"] = torch.tensor([[0, 0, 0, 1, 1]])

    torch.testing.assert_close(load_transformers(tmp_path)(inputs), expected_logits(model, **inputs))


def test_exported_model_gives_logits(roberta, tmp_path):
    model, folder = roberta
    convert(folder, tmp_path / "converted", "lln_diag")
    export(tmp_path / "converted" / "model.pt", tmp_path / "out")

    logits = load_transformers(tmp_path / "out", trust_remote_code=True)(INPUTS)

    assert logits.shape == (2, len(LABELS))
    assert not torch.equal(logits, expected_logits(model, **INPUTS))


def test_directory_that_is_no_model_is_one_line(tmp_path):
    with pytest.raises(UserError, match=f"transformers cannot load {tmp_path}: ") as caught:
        load_transformers(tmp_path)
    assert "\n" not in str(caught.value)


def write_onnx(path, outputs):
    """Write a model whose outputs (B, N), by name, are the sums of the inputs, times 1, 2, ..."""
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    integers = onnx.TensorProto.INT64
    floats = onnx.TensorProto.FLOAT
    nodes = [helper.make_node("Add", ["input_ids", "attention_mask"], ["sum"])]
    nodes.append(helper.make_node("Cast", ["sum"], ["x0"], to=floats))
    for number, name in enumerate(outputs, start=1):
        nodes.append(helper.make_node("Sum", ["x0"] * number, [name]))
    inputs = [helper.make_tensor_value_info(name, integers, ["B", "N"]) for name in INPUTS]
    values = [helper.make_tensor_value_info(name, floats, ["B", "N"]) for name in outputs]
    graph = helper.make_graph(nodes, "sums", inputs, values)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, path)


@pytest.mark.skipif(importlib.util.find_spec("onnxruntime") is None, reason="needs onnxruntime")
@pytest.mark.parametrize(("outputs", "factor"), [(["logits"], 1), (["token_embeddings", "sentence_embedding"], 2)])
def test_onnx_output_is_chosen_by_name_and_unknown_inputs_are_left_out(tmp_path, outputs, factor):
    write_onnx(tmp_path / "model.onnx", outputs)

    actual = load_onnx(tmp_path / "model.onnx", threads=1)(INPUTS | {"token_type_ids": TOKENS})

    torch.testing.assert_close(actual, factor * sum(INPUTS.values()).float())


def test_onnx_model_without_known_output_is_an_error(tmp_path):
    write_onnx(tmp_path / "model.onnx", ["last_hidden_state"])

    with pytest.raises(UserError, match="has no output logits or sentence_embedding: its outputs are last_hidden"):
        load_onnx(tmp_path / "model.onnx", threads=1)


def test_missing_packages_are_one_line(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)

    with pytest.raises(UserError, match="running a model in transformers needs it: pip install"):
        load_transformers(tmp_path)
    with pytest.raises(UserError, match="running a model in ONNX needs onnxruntime: pip install"):
        load_onnx(tmp_path / "model.onnx", threads=1)
