"""TextMapper gives the outputs of `load`, without fairseq, and the errors of rows in their places."""

import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

from lln_fairseq import load
from lln_fairseq.conversion.convert import convert
from lln_fairseq.conversion.export import export
from lln_fairseq.engines import TextMapper, read_text
from lln_fairseq.errors import UserError
from lln_fairseq.text.read_lines import MAX_LINE
from tests.conversion.classifiers import make_classifier
from tests.conversion.sources import make_model

TEXTS = [
    "The plot isn't new",
    b"\xff",
    "Éva saw 2 films\n".encode(),
    None,
    "a film " * 9,
    "x" * (MAX_LINE + 1),
    "",
    "\ud800",
]
SECOND = ["a film"] * len(TEXTS)
READABLE = [0, 2, 4, 6]
LABELS = ["bad", "middle", "good"]
# Runs pickled mappers, of which each file has one, as in an environment without fairseq.
RUN = """
import pathlib, pickle, sys
for name in ("fairseq", "hydra", "omegaconf"):
    sys.modules[name] = None  # as if it were not installed
batch = pickle.loads(pathlib.Path("batch").read_bytes())
for path in pathlib.Path().glob("*.mapper"):
    mapper = pickle.loads(path.read_bytes())
    outputs = mapper(batch)
    assert len(pickle.dumps(mapper)) < 999  # the model is not part of it
    path.with_suffix(".outputs").write_bytes(pickle.dumps(outputs))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a directory with converted and exported models, and the outputs of their mappers for TEXTS."""
    folder = tmp_path_factory.mktemp("models")
    make_model("bert", folder / "encoder_in", headless=True)
    make_classifier("bert", folder / "classifier_in", LABELS)
    make_classifier("bert", folder / "reranker_in", ["relevance"])
    batch = {"id": np.arange(len(TEXTS)), "text": TEXTS, "second": SECOND}
    (folder / "batch").write_bytes(pickle.dumps(batch))
    for name, columns in {"encoder": "text", "classifier": "text", "reranker": ("text", "second")}.items():
        convert(folder / f"{name}_in", folder / f"{name}_converted", "lln_diag")
        export(folder / f"{name}_converted" / "model.pt", folder / name)
        mapper = TextMapper(str(folder / name), columns, batch_tokens=20)
        (folder / f"{name}.mapper").write_bytes(pickle.dumps(mapper))
    subprocess.run([sys.executable, "-c", RUN], cwd=folder, check=True)
    return folder


def outputs_and_model(folder, name):
    outputs = pickle.loads((folder / f"{name}.outputs").read_bytes())
    assert list(outputs["id"]) == list(range(len(TEXTS)))  # other columns are passed on
    assert [error == "" for error in outputs["error"]] == [number in READABLE for number in range(len(TEXTS))]
    return outputs, load(folder / f"{name}_converted" / "model.pt", device="cpu")


def readable_texts():
    return [read_text(TEXTS[number]) for number in READABLE]


def test_vectors_are_those_of_encode(models):
    outputs, model = outputs_and_model(models, "encoder")
    assert np.isnan(outputs["vector"][1]).all()
    np.testing.assert_allclose(outputs["vector"][READABLE], model.encode(readable_texts()), atol=1e-5)


def test_labels_are_those_of_predict(models):
    outputs, model = outputs_and_model(models, "classifier")
    assert outputs["label"][1] == ""
    assert np.isnan(outputs["probability"][1])
    for number, prediction in zip(READABLE, model.predict(readable_texts()), strict=True):
        assert outputs["label"][number] == prediction.label
        assert outputs["probability"][number] == pytest.approx(prediction.probability, abs=1e-5)


def test_scores_of_pairs_are_those_of_predict(models):
    outputs, model = outputs_and_model(models, "reranker")
    expected = model.predict([(text, "a film") for text in readable_texts()])
    assert outputs["score"][READABLE] == pytest.approx(expected, abs=1e-5)


def test_outputs_that_are_not_finite_are_errors(models):
    mapper = TextMapper(str(models / "classifier"))
    mapper({"text": []})  # loads the model
    compute = mapper._model.compute

    def infinite_for_longest(samples):
        outputs = compute(samples)
        outputs[[len(sample["input_ids"]) > 10 for sample in samples]] = np.inf
        return outputs

    mapper._model.compute = infinite_for_longest
    outputs = mapper({"text": ["a film", "a film " * 9]})
    assert list(outputs["error"]) == ["", "the outputs are not finite"]
    assert list(outputs["label"])[1] == ""


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "expected a text, got None"),
        (3.0, "expected a text, got 3.0"),
        (b"film \xff", r"not UTF-8 \(invalid start byte at byte 5\)"),
        (b"x" * (MAX_LINE + 1), "more than 4 MiB"),
        ("\ud800", "half of a character"),
    ],
)
def test_values_that_are_not_texts_are_rejected(value, message):
    with pytest.raises(UserError, match=message):
        read_text(value)


def test_texts_are_tokenized_in_chunks(models, monkeypatch):
    monkeypatch.setattr("lln_fairseq.text.samples.CHUNK_TEXTS", 2)
    mapper = TextMapper(str(models / "classifier"))
    texts = ["a film", "the plot", "a film saw the plot", "a"]
    mapper({"text": []})  # loads the model
    chunks = []
    tokenize = mapper._model.tokenize
    monkeypatch.setattr(mapper._model, "tokenize", lambda rows: chunks.append(len(rows)) or tokenize(rows))

    outputs = mapper({"text": [*texts, None]})

    assert chunks == [2, 2]
    alone = [mapper({"text": [text]})["probability"][0] for text in texts]
    assert outputs["probability"][:4] == pytest.approx(alone, abs=1e-5)


def test_mapper_of_a_new_export_has_another_pickle(tmp_path):
    """The cache of datasets compares pickles."""
    folder = tmp_path / "exported"
    assert pickle.dumps(TextMapper(str(folder))) == pickle.dumps(TextMapper(str(folder)))
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"first")
    first = pickle.dumps(TextMapper(str(folder)))
    assert pickle.dumps(TextMapper(str(folder))) == first

    (folder / "model.safetensors").write_bytes(b"other")
    os.utime(folder / "model.safetensors", (1e9, 1e9))

    assert pickle.dumps(TextMapper(str(folder))) != first


def test_missing_directory_is_an_error(tmp_path):
    with pytest.raises(
        UserError, match=r"missing has no config.json: name a directory that `lln-fairseq export` wrote"
    ):
        TextMapper(str(tmp_path / "missing"))({"text": ["a film"]})


def test_language_model_is_rejected(tmp_path):
    make_model("roberta", tmp_path / "model")
    with pytest.raises(UserError, match="neither a classifier nor an encoder"):
        TextMapper(str(tmp_path / "model"))({"text": ["a film"]})
