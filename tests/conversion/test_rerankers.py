"""Classifiers with one output: what their score means, from the source through convert, linearize and export."""

import json
import shutil

import pytest
import torch
from transformers import pipeline

from lln_fairseq import load
from lln_fairseq.__main__ import main
from lln_fairseq.checkpoints.source_settings import score_activation, stored_settings
from lln_fairseq.conversion.convert import convert
from lln_fairseq.conversion.export import export
from lln_fairseq.conversion.from_hugging_face import read_hugging_face_directory
from lln_fairseq.errors import UserError
from tests.conversion.classifiers import make_classifier
from tests.text_runs import make_glue, texts_of

PAIRS = [("The plot isn't new", "Éva saw 2 films"), ("a", "but it holds – we saw none!")]
IDENTITY = "torch.nn.modules.linear.Identity"
SIGMOID = "torch.nn.modules.activation.Sigmoid"


def change_json(path, **changes):
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | changes))


def cross_encoder_scores(folder, pairs=PAIRS):
    import sentence_transformers  # slow

    model = sentence_transformers.CrossEncoder(str(folder), trust_remote_code=True, device="cpu")
    return model.predict(pairs, convert_to_tensor=True)


def pipeline_scores(folder, pairs=PAIRS):
    """Return the labels and the scores that transformers' pipeline gives to pairs."""
    classify = pipeline("text-classification", model=str(folder), trust_remote_code=True, device="cpu")
    rows = classify([{"text": first, "text_pair": second} for first, second in pairs])
    return [row["label"] for row in rows], torch.tensor([row["score"] for row in rows])


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Return the directories of a BERT and a RoBERTa with one output, "toxic"."""
    folder = tmp_path_factory.mktemp("rerankers")
    for kind in ("bert", "roberta"):
        make_classifier(kind, folder / kind, ["toxic"])
    return folder


# For each case: the kind of the source, and the entries of its config.json about the meaning of the score.
MEANINGS = {
    "nothing named": ("bert", {}),
    "an activation": ("roberta", {"sentence_transformers": {"activation_fn": IDENTITY, "version": "4.1.0"}}),
    "an activation, before version 4": ("bert", {"sbert_ce_default_activation_function": IDENTITY}),
    "a regression": ("roberta", {"problem_type": "regression"}),
}


@pytest.mark.parametrize("name", MEANINGS)
def test_score_is_that_of_cross_encoder_and_pipeline_before_and_after_export(name, sources, tmp_path):
    kind, changes = MEANINGS[name]
    source = shutil.copytree(sources / kind, tmp_path / "in")
    change_json(source / "config.json", **changes)

    convert(source, tmp_path / "converted")
    export(tmp_path / "converted/model.pt", tmp_path / "out")

    scores = cross_encoder_scores(source)
    labels, probabilities = pipeline_scores(source)
    expected = probabilities if name == "a regression" else scores
    predicted = torch.tensor(load(tmp_path / "converted/model.pt").predict(PAIRS))
    torch.testing.assert_close(predicted, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cross_encoder_scores(tmp_path / "out"), scores, rtol=1e-5, atol=1e-5)
    exported_labels, exported_probabilities = pipeline_scores(tmp_path / "out")
    assert exported_labels == labels == ["toxic", "toxic"]
    torch.testing.assert_close(exported_probabilities, probabilities, rtol=1e-5, atol=1e-5)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["problem_type"] == changes.get("problem_type")
    card = (tmp_path / "out/README.md").read_text()
    assert ("score: the sigmoid of `logits`" in card) == (name == "nothing named")
    assert ('CrossEncoder("DIRECTORY")' in card) == (name != "a regression")


def test_directory_of_cross_encoder_5_7_is_converted(sources, tmp_path):
    """Since 5.4, CrossEncoder writes modules.json, and its activation to config_sentence_transformers.json."""
    source = shutil.copytree(sources / "bert", tmp_path / "in")
    change_json(source / "config.json", sbert_ce_default_activation_function=SIGMOID)
    change_json(source / "config_sentence_transformers.json", model_type="CrossEncoder", activation_fn=IDENTITY)
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"}
    ]
    (source / "modules.json").write_text(json.dumps(modules))

    settings = read_hugging_face_directory(source).settings

    assert isinstance(score_activation(settings), torch.nn.Identity)
    assert settings["sentence_transformers"] == {"activation_fn": IDENTITY}
    modules.append({"type": "sentence_transformers.base.modules.dense.Dense", "path": "1_Dense"})
    (source / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UserError, match="the only module of a classifier must be Transformer, got Transformer, Dense"):
        read_hugging_face_directory(source)


def test_classes_keep_activation_and_missing_problem_type(tmp_path):
    make_classifier("bert", tmp_path / "in")
    softmax = "torch.nn.modules.activation.Softmax"
    change_json(tmp_path / "in/config.json", sentence_transformers={"activation_fn": softmax})

    convert(tmp_path / "in", tmp_path / "converted")
    export(tmp_path / "converted/model.pt", tmp_path / "out")

    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["sentence_transformers"] == {"activation_fn": softmax}
    assert config["problem_type"] is None
    assert [prediction.label for prediction in load(tmp_path / "converted/model.pt").predict(PAIRS)]


def test_damaged_settings_of_checkpoint_are_rejected():
    for text in ("[]", "{", "1"):
        state = {"extra_state": {"lln_fairseq": {"source_settings": text}}}
        with pytest.raises(UserError, match="source_settings must be a JSON object"):
            stored_settings(state)


@pytest.fixture(scope="module")
def linearized(tmp_path_factory):
    """Return the folder of a reranker: `in`, `softmax`, rows with scores in `glue/STS-B`, `linear` and `exported`."""
    folder = tmp_path_factory.mktemp("linearized")
    make_classifier("bert", folder / "in", ["relevance"], positions=1000)
    convert(folder / "in", folder / "softmax")
    make_glue(folder / "glue", "STS-B", tokenizer=folder / "softmax")
    arguments = [folder / "softmax/model.pt", folder / "glue/STS-B", folder / "linear", "--steps", "2"]
    assert main(["linearize", *map(str, arguments), "--option", "block_size=8"]) == 0
    export(folder / "linear/model.pt", folder / "exported")
    return folder


def test_evaluate_writes_the_scores_of_cross_encoder(linearized, tmp_path):
    pairs = texts_of(linearized / "glue", "STS-B")
    arguments = [linearized / "softmax/model.pt", linearized / "glue/STS-B", "--predict", tmp_path / "scores.tsv"]

    assert main(["evaluate", *map(str, arguments)]) == 0

    rows = [line.split("\t")[1] for line in (tmp_path / "scores.tsv").read_text().splitlines()[1:]]
    expected = cross_encoder_scores(linearized / "in", pairs)
    assert 0 < expected.min() < expected.max() < 1
    torch.testing.assert_close(torch.tensor([float(row) for row in rows]), expected, rtol=0, atol=2e-6)


def test_linearized_reranker_keeps_the_meaning_of_its_score(linearized):
    predicted = torch.tensor(load(linearized / "linear/model.pt").predict(PAIRS))

    torch.testing.assert_close(cross_encoder_scores(linearized / "exported"), predicted, rtol=1e-5, atol=1e-5)
    labels, probabilities = pipeline_scores(linearized / "exported")
    assert labels == ["relevance", "relevance"]
    torch.testing.assert_close(probabilities, predicted, rtol=1e-5, atol=1e-5)
    assert 0 < predicted.min() < predicted.max() < 1


def test_regression_that_was_trained_here_gives_its_output_in_cross_encoder(linearized, tmp_path):
    shutil.copytree(linearized / "softmax", tmp_path / "run")
    checkpoint = tmp_path / "run/model.pt"
    state = torch.load(checkpoint)
    del state["extra_state"]["lln_fairseq"]["source_settings"]  # a training run writes none
    torch.save(state, checkpoint)

    export(checkpoint, tmp_path / "out")

    predicted = torch.tensor(load(checkpoint).predict(PAIRS))
    torch.testing.assert_close(cross_encoder_scores(tmp_path / "out"), predicted, rtol=1e-5, atol=1e-5)
    labels, scores = pipeline_scores(tmp_path / "out")
    assert labels == ["score", "score"]
    torch.testing.assert_close(scores, predicted, rtol=1e-5, atol=1e-5)
