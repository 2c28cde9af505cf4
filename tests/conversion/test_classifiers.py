"""Classifiers from Hugging Face: the same logits for texts and pairs, on the way in, in use, and on the way out."""

import json

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from lln_fairseq import load
from lln_fairseq.__main__ import main
from lln_fairseq.conversion.convert import convert
from lln_fairseq.conversion.export import export
from lln_fairseq.inference.loading import load_model
from tests.conversion.classifiers import (
    CLASSIFIERS,
    LABELS,
    PAIRS,
    TEXTS,
    make_classifier,
    transformers_logits,
)

HEAD = "sentence_classification_head"


def logits_of(checkpoint, texts, data=None):
    """Return the logits (texts, classes) that a checkpoint gives to texts and pairs, in batches with padding."""
    model = load(checkpoint, data)
    outputs = model._map_texts(texts, model.inputs, model._class_logits, "truncate")
    return torch.stack([logits for _, logits in outputs])


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory):
    """Return a dictionary from kind to (Hugging Face classifier, its directory)."""
    folder = tmp_path_factory.mktemp("classifiers")
    return {kind: (make_classifier(kind, folder / kind), folder / kind) for kind in CLASSIFIERS}


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_converted_classifier_gives_same_logits_for_texts_and_pairs(kind, classifiers, tmp_path, capsys):
    model, folder = classifiers[kind]

    assert main(["convert", str(folder), str(tmp_path / "out"), "--attention", "softmax"]) == 0

    assert "3 labels: not the same, same, the plot" in capsys.readouterr().out
    inputs = [*TEXTS, *PAIRS]
    expected = transformers_logits(model, folder, inputs)
    assert (expected[:, :1] - expected[:, 1:]).abs().min() > 0.01
    torch.testing.assert_close(logits_of(tmp_path / "out/model.pt", inputs), expected, rtol=1e-5, atol=1e-5)
    predictions = load(tmp_path / "out/model.pt").predict(inputs)
    assert [prediction.label for prediction in predictions] == [LABELS[row] for row in expected.argmax(dim=-1)]
