"""Classifiers from Hugging Face: the same logits for texts and pairs, on the way in, in use, and on the way out."""

import contextlib
import io
import json
import re
import shutil
import sys

import onnxruntime
import pytest
import torch
from tokenizers import processors
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lln_fairseq import load
from lln_fairseq.__main__ import main
from lln_fairseq.checkpoints.pooling import Pooling
from lln_fairseq.checkpoints.reading import load_checkpoint_lazily
from lln_fairseq.conversion.convert import convert
from lln_fairseq.conversion.export import export
from lln_fairseq.errors import UserError
from lln_fairseq.inference.evaluate import compute_outputs, load_finetuned_model
from lln_fairseq.inference.loading import load_model
from lln_fairseq.models.adapt import SECOND_TEXT
from lln_fairseq.text.samples import cut_sample
from tests.conversion.classifiers import (
    CLASSIFIERS,
    LABELS,
    PAIRS,
    TEXTS,
    make_classifier,
    transformers_logits,
)
from tests.conversion.sources import make_sentencepiece
from tests.fairseq_runs import hydra_train
from tests.text_runs import make_glue, texts_of

LONG = " ".join(TEXTS * 5)
LONG_INPUTS = [LONG, (LONG, TEXTS[0]), (TEXTS[0], LONG), (LONG, LONG + " a")]
INPUTS = [*TEXTS, *PAIRS]


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory):
    """Return a dictionary from kind to (Hugging Face classifier, its directory)."""
    folder = tmp_path_factory.mktemp("classifiers")
    return {kind: (make_classifier(kind, folder / kind), folder / kind) for kind in CLASSIFIERS}


def our_logits(checkpoint, texts):
    """Return the logits (texts, classes) that a checkpoint gives to texts and pairs, in batches with padding."""
    model = load(checkpoint)
    outputs = model._map_texts(texts, model.inputs, model._class_logits, "truncate")
    return torch.stack([logits for _, logits in outputs])


def load_exported(folder):
    """Return an exported classifier, loaded by transformers."""
    return AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_converted_classifier_gives_same_logits_for_texts_and_pairs(kind, classifiers, tmp_path, capsys):
    model, folder = classifiers[kind]

    assert main(["convert", str(folder), str(tmp_path / "out")]) == 0

    assert "3 labels: not the same, same, the plot" in capsys.readouterr().out
    inputs = [*INPUTS, *LONG_INPUTS]
    expected = transformers_logits(model, folder, inputs, longest=40)
    assert (expected[:, :1] - expected[:, 1:]).abs().min() > 1e-3
    torch.testing.assert_close(our_logits(tmp_path / "out/model.pt", inputs), expected, rtol=1e-5, atol=1e-5)
    predictions = load(tmp_path / "out/model.pt").predict(inputs)
    assert [prediction.label for prediction in predictions] == [LABELS[row] for row in expected.argmax(dim=-1)]


def test_exported_tokenizer_cuts_where_predict_does(classifiers, tmp_path):
    convert(classifiers["roberta"][1], tmp_path / "in")
    state = torch.load(tmp_path / "in" / "model.pt")
    state["cfg"]["task"]["max_positions"] = 12  # as after fine-tuning on shorter texts than the model takes
    torch.save(state, tmp_path / "in" / "model.pt")

    export(tmp_path / "in" / "model.pt", tmp_path / "out")

    assert "longest sequence: 12 tokens" in (tmp_path / "out" / "README.md").read_text()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    model = load(tmp_path / "in" / "model.pt")
    for texts in LONG_INPUTS:
        row = [texts] if isinstance(texts, str) else texts
        (sample,) = model.ids.encode_rows([row])
        assert tokenizer(*row, truncation=True)["input_ids"] == cut_sample(sample, 12).tolist()


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_classifier_comes_out_and_in_again(kind, classifiers, tmp_path):
    model, folder = classifiers[kind]
    convert(folder, tmp_path / "in", "softmax")

    export(tmp_path / "in/model.pt", tmp_path / "out")
    convert(tmp_path / "out", tmp_path / "again", "softmax")

    expected = transformers_logits(model, folder, INPUTS)
    exported = load_exported(tmp_path / "out")
    actual = transformers_logits(exported, tmp_path / "out", INPUTS)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(our_logits(tmp_path / "again/model.pt", INPUTS), expected, rtol=1e-5, atol=1e-5)
    assert exported.config.id2label == model.config.id2label
    has_code = type(exported).__name__ != "RobertaForSequenceClassification"
    assert has_code == (kind == "distilbert")  # RoBERTa's head has another activation


@pytest.mark.parametrize(
    ("kind", "activation"),
    [("bert", "gelu_python"), ("bert", "gelu_fast"), ("roberta", "gelu_new"), ("distilbert", "relu")],
)
def test_activation_of_layers_is_exported(kind, activation, tmp_path):
    option = "activation" if kind == "distilbert" else "hidden_act"
    model = make_classifier(kind, tmp_path / "in", **{option: activation})
    convert(tmp_path / "in", tmp_path / "converted")

    export(tmp_path / "converted/model.pt", tmp_path / "out")
    convert(tmp_path / "out", tmp_path / "again")

    expected = transformers_logits(model, tmp_path / "in", INPUTS)
    actual = transformers_logits(load_exported(tmp_path / "out"), tmp_path / "out", INPUTS)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(our_logits(tmp_path / "again/model.pt", INPUTS), expected, rtol=1e-5, atol=1e-5)


def test_classifier_of_this_project_is_converted_after_an_export(classifiers, tmp_path):
    advice = "convert the directory that `lln-fairseq export` writes"
    for kind in ("bert", "roberta"):
        convert(classifiers[kind][1], tmp_path / kind)
    with pytest.raises(UserError, match=advice):  # an encoder of fairseq has no second token type
        convert(tmp_path / "bert/model.pt", tmp_path / "encoder")
    encoder = convert(tmp_path / "roberta/model.pt", tmp_path / "encoder")
    assert any(advice in note for note in encoder.notes)
    # Its language-model head was never trained, so that it is an encoder of sentence vectors.
    assert "left out: the masked-language-model head, which does not fit a fine-tuned encoder" in encoder.notes
    assert encoder.pooling == Pooling("mean")
    with pytest.raises(UserError, match="encoder of sentence vectors and cannot fill a <mask>"):
        load(tmp_path / "encoder/model.pt").fill("a <mask>")
    export(tmp_path / "bert/model.pt", tmp_path / "exported")

    convert(tmp_path / "exported", tmp_path / "longer", positions=256)

    expected = our_logits(tmp_path / "bert/model.pt", INPUTS)
    torch.testing.assert_close(our_logits(tmp_path / "longer/model.pt", INPUTS), expected, rtol=1e-5, atol=1e-5)


def test_token_types_are_not_used_without_those_of_the_tokenizer(tmp_path):
    """multilingual-e5, for example, is a BERT with the tokenizer of XLM-R."""
    model = make_classifier("bert", tmp_path / "in", make_tokenizer=make_sentencepiece, tokenizer="XLMRobertaTokenizer")

    convert(tmp_path / "in", tmp_path / "out", "softmax")

    expected = transformers_logits(model, tmp_path / "in", INPUTS)
    torch.testing.assert_close(our_logits(tmp_path / "out/model.pt", INPUTS), expected, rtol=1e-5, atol=1e-5)


def test_regression_gives_its_output(tmp_path, capsys):
    model = make_classifier("distilbert", tmp_path / "in", ["similarity"], problem_type="regression")
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    assert "a regression of texts and pairs" in capsys.readouterr().out
    assert not (tmp_path / "out/label").exists()

    scores = load(tmp_path / "out/model.pt").predict(INPUTS)

    expected = transformers_logits(model, tmp_path / "in", INPUTS)
    torch.testing.assert_close(torch.tensor(scores)[:, None], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "options", "dropout"),
    [
        ("roberta", {"hidden_dropout_prob": 0.3}, 0.3),
        ("bert", {"classifier_dropout": 0.2}, 0.2),
        ("bert", {"classifier_dropout": 0.0, "hidden_dropout_prob": 0.3}, 0.0),
        ("distilbert", {"seq_classif_dropout": 0.4, "dropout": 0.3}, 0.4),
    ],
)
def test_dropout_of_head_is_kept(kind, options, dropout, tmp_path):
    make_classifier(kind, tmp_path / "in", **options)
    convert(tmp_path / "in", tmp_path / "out", "softmax")
    model, _ = load_model(str(tmp_path / "out/model.pt"))
    assert model.classification_heads["sentence_classification_head"].dropout.p == dropout


BAD_CONFIGS = {
    "tokens": ({"architectures": ["BertForTokenClassification"]}, "BertForTokenClassification has a head that cannot"),
    "multi-label": ({"problem_type": "multi_label_classification"}, "problem_type is multi_label_classification, but"),
    "targets": ({"problem_type": "regression"}, "problem_type is regression, but the model has 3 outputs"),
    "twice": ({"id2label": {"0": "a b", "1": "c", "2": "a b"}}, "id2label: labels 0 and 2 are both 'a b'"),
    "empty": ({"id2label": {"0": "a", "1": "", "2": "b"}}, "id2label: label 1 is '': a label must not be empty"),
    "filler": (
        {"id2label": {"0": "a", "1": "madeupword", "2": "b"}},
        "label 1 is 'madeupword': fairseq's dictionaries",
    ),
    "numbers": ({"id2label": {"0": "a", "1": "b", "3": "c"}}, "id2label: label 2 is '': a label must not be empty"),
    "fewer": ({"id2label": {"0": "a", "1": "b"}}, r"classifier.\w+ must have the shape \(2,.*\) according to"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_head_that_cannot_be_kept_ends_in_one_line(name, classifiers, tmp_path, capfd):
    changes, message = BAD_CONFIGS[name]
    folder = shutil.copytree(classifiers["bert"][1], tmp_path / "in")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    capfd.readouterr()

    assert main(["convert", str(folder), str(tmp_path / "out")]) == 1

    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error)
    assert not (tmp_path / "out").exists()


def test_other_token_types_are_rejected(classifiers, tmp_path, capfd):
    folder = shutil.copytree(classifiers["bert"][1], tmp_path / "in")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ends = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("[CLS]", "[SEP]")]
    template = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] [SEP]:1 $B:1 [SEP]:1", special_tokens=ends
    )
    tokenizer.backend_tokenizer.post_processor = template
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    input_names = ["input_ids", "attention_mask", "token_type_ids"]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": input_names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))

    assert main(["convert", str(folder), str(tmp_path / "out")]) == 1

    assert "the tokenizer must give a pair BERT's token types, 0 for the first" in capfd.readouterr().err


def test_lines_with_and_without_tab_are_pairs_and_texts(classifiers, tmp_path, capsys):
    model, folder = classifiers["bert"]
    convert(folder, tmp_path / "out", "softmax")
    lines = [text if isinstance(text, str) else "\t".join(text) for text in INPUTS]
    (tmp_path / "lines").write_text("\n".join([*lines, "", "a\tb\tc"]) + "\n")
    arguments = ["predict", str(tmp_path / "out/model.pt"), "--input", str(tmp_path / "lines")]

    assert main(arguments) == 1
    assert "line 9 must be one text without tabs or two texts separated by a tab" in capsys.readouterr().err
    (tmp_path / "lines").write_text("\n".join([*lines, ""]) + "\n")
    assert main(arguments) == 0

    *printed, empty = capsys.readouterr().out.splitlines()
    rows = transformers_logits(model, folder, INPUTS).argmax(dim=-1)
    assert [line.split("\t")[0] for line in printed] == [LABELS[row] for row in rows]
    assert empty == ""


STUDENT = ("mix=joint_offset", "gain=learned", "block_size=8", "global_tokens=first_segment")


@pytest.fixture(scope="module", params=["roberta", "bert", "distilbert"])
def linearized(request, tmp_path_factory):
    """Return what a classifier of pairs becomes: (source, folder of all steps, what linearize printed, pairs).

    The folder has `source`, `softmax`, `glue/RTE` with the pairs of its split valid, `linear`, and `exported`.
    """
    folder = tmp_path_factory.mktemp(request.param)
    labels = ["entailment", "not_entailment"]
    source = make_classifier(request.param, folder / "source", labels, positions=1000)
    convert(folder / "source", folder / "softmax", "softmax")
    make_glue(folder / "glue", "RTE", tokenizer=folder / "softmax")
    pairs = texts_of(folder / "glue", "RTE")
    train = ("--steps", "3", "--distill", "2", "--tokens", "1024", "--option", *STUDENT)
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        data = folder / "glue/RTE"
        arguments = [folder / "softmax/model.pt", data, folder / "linear", *train]
        assert main(["linearize", *map(str, arguments)]) == 0
    export(folder / "linear/model.pt", folder / "exported")
    return source, folder, stdout.getvalue(), pairs


def test_pairs_of_binarized_data_have_form_of_source(linearized):
    source, folder, printed, pairs = linearized
    model, task = load_finetuned_model(str(folder / "softmax/model.pt"), str(folder / "glue/RTE"))

    outputs = compute_outputs(model, task, "valid")

    expected = transformers_logits(source, folder / "source", pairs)
    torch.testing.assert_close(outputs.logits, expected, rtol=1e-5, atol=1e-5)
    accuracy = (expected.argmax(dim=-1) == outputs.targets).double().mean().item()
    assert ["teacher", "accuracy", f"{accuracy:.2%}"] in [line.split() for line in printed.splitlines()]


def test_linearized_classifier_keeps_pairs_and_labels(linearized, monkeypatch):
    source, folder, printed, pairs = linearized
    checkpoint = folder / "linear/model.pt"
    assert "after the distillation" in printed

    expected = our_logits(checkpoint, [*pairs, *TEXTS])

    teacher = transformers_logits(source, folder / "source", [*pairs, *TEXTS])
    assert 1e-3 < (expected - teacher).abs().mean() < 0.5 * teacher.std()
    model, task = load_finetuned_model(str(checkpoint), str(folder / "glue/RTE"))
    torch.testing.assert_close(compute_outputs(model, task, "valid").logits, expected[: len(pairs)])
    exported = load_exported(folder / "exported")
    assert exported.config.id2label == source.config.id2label
    for has_kernels in (True, False):
        monkeypatch.setattr(sys.modules[type(exported).__module__], "HAS_KERNELS", has_kernels)
        actual = transformers_logits(exported, folder / "exported", [*pairs, *TEXTS])
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.exhaustive
def test_onnx_classifier_of_pairs_gives_same_logits(linearized, tmp_path):
    _, folder, _, pairs = linearized

    export(folder / "linear/model.pt", tmp_path / "out", onnx=True)

    session = onnxruntime.InferenceSession(tmp_path / "out/onnx/model.onnx")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    batch = tokenizer([first for first, _ in pairs], [second for _, second in pairs], padding=True, return_tensors="np")
    assert {item.name for item in session.get_inputs()} == batch.keys()
    (logits,) = session.run(["logits"], dict(batch))
    expected = our_logits(folder / "linear/model.pt", pairs)
    torch.testing.assert_close(torch.from_numpy(logits), expected, rtol=1e-4, atol=1e-4)


def test_finetuning_from_a_classifier_keeps_the_form_of_pairs(linearized, tmp_path, monkeypatch):
    _, folder, _, _ = linearized
    monkeypatch.chdir(tmp_path)
    start = f"checkpoint.finetune_from_model={folder}/linear/model.pt"
    data = f"task.data={folder}/glue/RTE"
    hydra_train(monkeypatch, "glue=rte", "run=cpu", data, start, "optimization.max_update=1", recipe="finetune")

    checkpoint = "runs/rte_lln_diag/checkpoint_last.pt"
    state = load_checkpoint_lazily(checkpoint)
    stored = load_checkpoint_lazily(str(folder / "linear/model.pt"))
    pair_form = stored["cfg"]["model"]["pair_form"]
    assert state["cfg"]["model"]["pair_form"] == pair_form
    assert (SECOND_TEXT in state["model"]) == (pair_form == "bert")
    if pair_form == "bert":
        assert (state["model"][SECOND_TEXT] - stored["model"][SECOND_TEXT]).abs().max() < 0.01
    model = load(checkpoint)
    assert model.inputs == (2,)
    assert model.ids.separator_token == (2 if pair_form == "roberta" else None)
