"""Checkpoints of fairseq, of any age and architecture, in ours; and those that cannot be."""

import argparse

import pytest
import torch

from lln_fairseq.checkpoints.reading import load_checkpoint_lazily
from lln_fairseq.conversion.convert import convert
from lln_fairseq.data.tokenizers import train_sentencepiece
from lln_fairseq.errors import InputError
from lln_fairseq.inference.loading import load_model
from tests.conversion.sources import PIECES, TEXTS, logits
from tests.fairseq_runs import LLN, MASKED_LM, make_corpus, train


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A directory with dict.txt and a checkpoint of fairseq's own RoBERTa."""
    folder = make_corpus(tmp_path_factory.mktemp("corpus"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        train(monkeypatch, folder / "log", folder, folder, *MASKED_LM, *LLN, "--attention", "softmax")
    return folder


def old(state):
    """As fairseq wrote it in 2019, for an architecture that nobody registers."""
    names = {name.replace("encoder.", "decoder.", 1).replace("layernorm_embedding", "emb_layer_norm"): value
             for name, value in state["model"].items() if not name.endswith("version")}  # fmt: skip
    for key in [key for key in names if ".q_proj." in key]:
        parts = [names.pop(key.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
        names[key.replace("q_proj.", "in_proj_")] = torch.cat(parts)
    args = argparse.Namespace(arch="roberta_small", encoder_attention_heads=2, task="masked_lm", criterion="x")
    return {**state, "model": names, "args": args, "cfg": None}


@pytest.mark.parametrize("form", ["new", "old"])
def test_a_checkpoint_of_fairseq(form, trained, tmp_path):
    source = trained / "checkpoint_last.pt"
    if form == "old":
        source = tmp_path / "old.pt"
        torch.save(old(torch.load(trained / "checkpoint_last.pt")), source)
    assert convert(source, tmp_path / "out", "softmax", dictionary=trained / "dict.txt").notes == []
    tokens = torch.randint(4, 60, (3, 20))
    tokens[1, 11:] = 1
    model, _ = load_model(str(trained / "checkpoint_last.pt"), str(trained))
    with torch.no_grad():
        assert torch.equal(logits(tmp_path / "out", tokens), model(tokens)[0])


def test_a_checkpoint_of_ours_with_another_attention(trained, tmp_path):
    source = trained / "checkpoint_last.pt"
    convert(source, tmp_path / "out", "lln_diag")
    options = load_checkpoint_lazily(str(tmp_path / "out" / "model.pt"))["cfg"]["model"]
    assert options["attention"] == "lln_diag"
    assert options["encoder_layers"] == 2


def test_parameters_of_an_attention_are_kept_with_its_options_and_fit_no_other_length(trained, tmp_path, monkeypatch):
    options = ("--attention", "linformer", "--linformer-projected-length", 16, "--max-update", 1)
    train(monkeypatch, tmp_path / "log", trained, tmp_path / "run", *MASKED_LM, *LLN, *options)
    source, words = tmp_path / "run" / "checkpoint_last.pt", trained / "dict.txt"
    assert convert(source, tmp_path / "out", "linformer", dictionary=words).notes == []
    expected, got = (load_checkpoint_lazily(str(path))["model"] for path in (source, tmp_path / "out" / "model.pt"))
    assert expected.keys() == got.keys()
    assert all(torch.equal(value, got[name]) for name, value in expected.items())
    with pytest.raises(InputError, match=r"attention\.\w+ is \(.*\) in the source, and \(.*\) here"):
        convert(source, tmp_path / "longer", "linformer", positions=128, dictionary=words)


BAD_CHECKPOINTS = {
    "nothing": (None, "no such directory or checkpoint"),
    "other": (lambda s: {**s, "model": {"x": torch.zeros(1)}}, r"is no RoBERTa, it is a lln_roberta_tiny: it has no"),
    "shape": (lambda s: change(s, "layers.1.fc1.bias", torch.zeros(3)), r"layers.1.fc1.bias is 3, and the others need"),
    "missing": (lambda s: change(s, "layers.1.fc1.bias", None), r"lacks encoder.sentence_encoder.layers.1.fc1.bias"),
    "unknown": (lambda s: change(s, "adapter.bias", torch.zeros(3)), r"has what no RoBERTa has: encoder.sentence_enc"),
    "integers": (
        lambda s: change(s, "layers.1.fc1.bias", torch.zeros(64, dtype=torch.int8)),
        r"layers.1.fc1.bias is of dtype int8, and weights must be floating-point",
    ),
    "infinite": (
        lambda s: change(s, "layers.1.fc1.bias", torch.full((64,), torch.inf)),
        "layers.1.fc1.bias has NaN or infinite values",
    ),
    "heads": (lambda s: {**s, "cfg": {"model": {"_name": "x"}}}, "does not say how many attention heads"),
}


def change(state, name, value):
    name = f"encoder.sentence_encoder.{name}"
    parameters = {key: old for key, old in state["model"].items() if key != name}
    return {**state, "model": parameters | ({} if value is None else {name: value})}


@pytest.mark.parametrize("name", BAD_CHECKPOINTS)
def test_bad_checkpoints(name, trained, tmp_path):
    make, message = BAD_CHECKPOINTS[name]
    if make:
        torch.save(make(torch.load(trained / "checkpoint_last.pt")), tmp_path / "a.pt")
    with pytest.raises(InputError, match=message):
        convert(tmp_path / "a.pt", tmp_path / "out", "softmax", dictionary=trained / "dict.txt")
    assert not (tmp_path / "out").exists()


def test_dictionaries_that_do_not_fit_a_checkpoint(trained, tmp_path):
    source = tmp_path / "checkpoint.pt"
    source.write_bytes((trained / "checkpoint_last.pt").read_bytes())
    with pytest.raises(InputError, match=r"no dict\.txt beside"):
        convert(source, tmp_path / "out", "softmax")
    lines = (trained / "dict.txt").read_text().splitlines()
    (tmp_path / "dict.txt").write_text("\n".join(lines[:-1]) + "\n")
    with pytest.raises(InputError, match=r"has 64 symbols with fairseq's own, and .* has 65"):
        convert(source, tmp_path / "out", "softmax")
    (tmp_path / "dict.txt").write_text("\n".join(lines) + "\n")
    (tmp_path / "spm.model").write_bytes(train_sentencepiece(TEXTS * 3, PIECES))
    with pytest.raises(InputError, match=r"dict\.txt does not fit the sentencepiece tokenizer: it lacks"):
        convert(source, tmp_path / "out", "softmax")
