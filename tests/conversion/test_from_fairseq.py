"""fairseq checkpoints of any age and architecture as checkpoints of this project, and those that are rejected."""

import argparse

import pytest
import torch

from lln_fairseq.checkpoints.reading import load_checkpoint_lazily
from lln_fairseq.conversion.convert import convert
from lln_fairseq.errors import UserError
from lln_fairseq.inference.loading import load_model
from lln_fairseq.text.tokenizers import train_sentencepiece
from tests.conversion.sources import PIECES, TEXTS, compute_logits
from tests.fairseq_runs import LLN, MASKED_LM, make_corpus, parameters_of_2019, train


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a directory with dict.txt and a checkpoint of a RoBERTa with softmax attention."""
    folder = make_corpus(tmp_path_factory.mktemp("corpus"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        train(monkeypatch, folder / "log", folder, folder, *MASKED_LM, *LLN, "--attention", "softmax")
    return folder


def as_old_checkpoint(state):
    """Return the state as fairseq wrote it in 2019, with an architecture that is not registered."""
    args = argparse.Namespace(arch="roberta_small", encoder_attention_heads=2, task="masked_lm", criterion="x")
    return {**state, "model": parameters_of_2019(state["model"]), "args": args, "cfg": None}


@pytest.mark.parametrize("form", ["new", "old"])
def test_converted_checkpoint_gives_same_logits(form, trained, tmp_path):
    source = trained / "checkpoint_last.pt"
    if form == "old":
        source = tmp_path / "old.pt"
        torch.save(as_old_checkpoint(torch.load(trained / "checkpoint_last.pt")), source)

    assert convert(source, tmp_path / "out", "softmax", dictionary=trained / "dict.txt").notes == []

    tokens = torch.randint(4, 60, (3, 20))
    tokens[1, 11:] = 1
    model, _ = load_model(str(trained / "checkpoint_last.pt"), str(trained))
    with torch.no_grad():
        expected = model(tokens)[0]
    assert torch.equal(compute_logits(tmp_path / "out" / "model.pt", tokens), expected)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_prefixes_of_wrapped_models_are_removed(prefix, trained, tmp_path, caplog):
    state = torch.load(trained / "checkpoint_last.pt")
    expected = state["model"]
    state["model"] = {prefix + name: value for name, value in expected.items()}
    torch.save(state, tmp_path / "wrapped.pt")

    convert(tmp_path / "wrapped.pt", tmp_path / "out", "softmax", dictionary=trained / "dict.txt")

    assert "wrapped.pt: removed module. and _orig_mod." in caplog.text
    converted = load_checkpoint_lazily(str(tmp_path / "out" / "model.pt"))["model"]
    loaded, _ = load_model(str(tmp_path / "wrapped.pt"), str(trained))
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, expected[name])
        assert torch.equal(converted[name], expected[name])


def test_parameters_of_same_attention_are_kept(trained, tmp_path, monkeypatch):
    options = ("--attention", "linformer", "--linformer-projected-length", 16, "--max-update", 1)
    train(monkeypatch, tmp_path / "log", trained, tmp_path / "run", *MASKED_LM, *LLN, *options)
    source = tmp_path / "run" / "checkpoint_last.pt"
    dictionary = trained / "dict.txt"

    assert convert(source, tmp_path / "out", "linformer", dictionary=dictionary).notes == []

    expected = load_checkpoint_lazily(str(source))["model"]
    actual = load_checkpoint_lazily(str(tmp_path / "out" / "model.pt"))["model"]
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], value) for name, value in expected.items())
    # Linformer's parameters depend on the length.
    with pytest.raises(UserError, match=r"attention\.\w+ must be \(.*\) for this model, got \(.*\)"):
        convert(source, tmp_path / "longer", "linformer", positions=128, dictionary=dictionary)


def replace_parameter(state, name, value):
    """Return the state with another value of an encoder parameter, or without the parameter if `value` is None."""
    name = f"encoder.sentence_encoder.{name}"
    parameters = dict(state["model"])
    parameters.pop(name, None)
    if value is not None:
        parameters[name] = value
    return {**state, "model": parameters}


def with_activation(state, name):
    state["cfg"]["model"]["activation_fn"] = name
    return state


# For each case: a function from the state of a checkpoint to a bad one, and a regular expression for the error.
BAD_CHECKPOINTS = {
    "nothing": (None, "no such directory or checkpoint"),
    "other": (
        lambda state: {**state, "model": {"x": torch.zeros(1)}},
        r"is not a RoBERTa: it has no .*\(architecture: lln_roberta_tiny\)",
    ),
    "shape": (
        lambda state: replace_parameter(state, "layers.1.fc1.bias", torch.zeros(3)),
        r"layers.1.fc1.bias must be \(64,\) according to its embeddings and first layer, got \(3,\)",
    ),
    "missing": (
        lambda state: replace_parameter(state, "layers.1.fc1.bias", None),
        r"lacks encoder.sentence_encoder.layers.1.fc1.bias",
    ),
    "activation": (
        lambda state: with_activation(state, "tanh"),
        "activation_fn=tanh cannot be exported: choose from gelu, gelu_accurate, gelu_fast, relu",
    ),
    "unknown": (
        lambda state: replace_parameter(state, "adapter.bias", torch.zeros(3)),
        r"is not a RoBERTa: unexpected parameters encoder.sentence_enc",
    ),
    "integers": (
        lambda state: replace_parameter(state, "layers.1.fc1.bias", torch.zeros(64, dtype=torch.int8)),
        r"layers.1.fc1.bias is of dtype int8",
    ),
    "infinite": (
        lambda state: replace_parameter(state, "layers.1.fc1.bias", torch.full((64,), torch.inf)),
        "layers.1.fc1.bias has NaN or infinite values",
    ),
    "heads": (
        lambda state: {**state, "cfg": {"model": {"_name": "x"}}},
        "does not state the number of attention heads",
    ),
}


@pytest.mark.parametrize("name", BAD_CHECKPOINTS)
def test_bad_checkpoint_is_rejected(name, trained, tmp_path):
    change, message = BAD_CHECKPOINTS[name]
    if change is not None:
        torch.save(change(torch.load(trained / "checkpoint_last.pt")), tmp_path / "a.pt")

    with pytest.raises(UserError, match=message):
        convert(tmp_path / "a.pt", tmp_path / "out", "softmax", dictionary=trained / "dict.txt")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def copied_checkpoint(trained, tmp_path):
    """Return the path of a checkpoint without dict.txt in its directory."""
    path = tmp_path / "checkpoint.pt"
    path.write_bytes((trained / "checkpoint_last.pt").read_bytes())
    return path


def test_missing_dictionary_is_reported(copied_checkpoint, tmp_path):
    with pytest.raises(UserError, match=r"no dict\.txt in .*: give --dictionary"):
        convert(copied_checkpoint, tmp_path / "out", "softmax")


def test_dictionary_of_other_size_is_rejected(copied_checkpoint, trained, tmp_path):
    lines = (trained / "dict.txt").read_text().splitlines()
    (tmp_path / "dict.txt").write_text("\n".join(lines[:-1]) + "\n")
    with pytest.raises(UserError, match=r"dict\.txt does not fit .* must have 65 symbols, .* got 64"):
        convert(copied_checkpoint, tmp_path / "out", "softmax")


def test_tokenizer_that_does_not_fit_dictionary_is_rejected(copied_checkpoint, trained, tmp_path):
    (tmp_path / "dict.txt").write_bytes((trained / "dict.txt").read_bytes())
    (tmp_path / "spm.model").write_bytes(train_sentencepiece(TEXTS * 3, PIECES))
    with pytest.raises(UserError, match=r"dict\.txt does not fit the sentencepiece tokenizer"):
        convert(copied_checkpoint, tmp_path / "out", "softmax")
