"""Our checkpoints in Hugging Face: the same logits, padding and tokenizers, and back again to the bit."""

import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq.data import Dictionary
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
)

from lln_fairseq.__main__ import main
from lln_fairseq.conversion import modeling_lln_roberta as modeling
from lln_fairseq.conversion import to_hugging_face as to_hf
from lln_fairseq.conversion import write_tokenizer as tokenizer_out
from lln_fairseq.conversion.convert import convert
from lln_fairseq.conversion.directory import new_directory
from lln_fairseq.conversion.export import export
from lln_fairseq.data.text_ids import TextIds
from lln_fairseq.data.tokenizers import SentencePieceTokenizer, make_tokenizer, train_sentencepiece
from lln_fairseq.data.vocabulary import load_vocabulary, new_vocabulary
from lln_fairseq.errors import InputError
from lln_fairseq.inference.loading import load_model
from lln_fairseq.ops.moment_matching import standard_deviations
from tests.conversion.sources import (
    PIECES,
    TEXTS,
    TOKENIZERS,
    make_model,
    make_model_with_settings,
    ours,
    padded_batch,
    shaken,
)
from tests.fairseq_runs import CLASSIFICATION, LLN, USER_DIR, make_classification, train
from tests.helpers import with_representatives


def logits(model, tokens, **options):
    with torch.no_grad():
        return model.eval()(tokens, attention_mask=(tokens != 1).long(), **options).logits


def test_a_roberta_comes_back_to_the_bit(tmp_path):
    model = make_model("roberta", tmp_path / "in")
    with torch.no_grad():
        model.roberta.embeddings.token_type_embeddings.weight.zero_()
    model.save_pretrained(tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "ours", "softmax")
    export(tmp_path / "ours" / "model.pt", tmp_path / "out")
    back = RobertaForMaskedLM.from_pretrained(tmp_path / "out")
    before, after = model.state_dict(), back.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    tokens = padded_batch(model.config.vocab_size)
    torch.testing.assert_close(logits(back, tokens), logits(model, tokens), rtol=0, atol=1e-5)
    torch.testing.assert_close(logits(back, tokens)[tokens != 1], ours(tmp_path / "ours/model.pt", tokens)[tokens != 1],
                               rtol=1e-5, atol=1e-5)  # fmt: skip


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_text_gives_the_same_logits_after_both_ways(kind, tmp_path):
    model = make_model(kind, tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "ours", "softmax")
    assert main(["export", str(tmp_path / "ours" / "model.pt"), str(tmp_path / "out")]) == 0
    tokenizer, before = (
        AutoTokenizer.from_pretrained(tmp_path / "out"),
        TOKENIZERS[kind].from_pretrained(tmp_path / "in"),
    )
    back = AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    a, b = (x(TEXTS, padding=True, return_tensors="pt") for x in (before, tokenizer))
    assert torch.equal(a["attention_mask"], b["attention_mask"])
    rows = [tokenizer.convert_tokens_to_ids(before.convert_ids_to_tokens(i)) for i in range(len(before))]
    assert sorted(rows) == list(range(len(before)))
    assert torch.equal(torch.tensor(rows)[a["input_ids"]], b["input_ids"])
    with torch.no_grad():
        expected, got = model(**a).logits, back(**b).logits
    real = a["attention_mask"].bool()
    torch.testing.assert_close(got[real][:, rows], expected[real], rtol=1e-5, atol=1e-5)
    assert tokenizer.decode(b["input_ids"][2], skip_special_tokens=True).strip() == "a"
    assert tokenizer.model_max_length == 40


MIXED = {
    "lln": (),
    "lln fixed": ("--lln-alpha", 1.5, "--lln-beta", 2.0),
    "lln entropy": ("--lln-constants", "entropy"),
    "lln paper": ("--lln-constants", "paper"),
    "lln_diag": (),
    "lln_diag batch": ("--lln-diag-scope", "batch"),
    "lln_diag ratio": ("--lln-diag-mix", "ratio", "--lln-diag-block-size", 8),
    "lln_diag joint": ("--lln-diag-mix", "joint", "--lln-diag-block-size", 8),
    "lln_diag joint_offset": ("--lln-diag-mix", "joint_offset", "--lln-diag-block-size", 8),
    "lln_diag gain": ("--lln-diag-gain", "learned"),
    "lln_diag scale": ("--lln-diag-mix", "scale"),
}


@pytest.mark.parametrize("name", with_representatives(MIXED, "lln paper", "lln_diag batch", "lln_diag joint_offset"))
def test_lln_is_the_same_with_padding_and_without(name, pretrained, tmp_path, monkeypatch):
    checkpoint = pretrained("--attention", name.split()[0], *MIXED[name])
    export(checkpoint, tmp_path / "out")
    model, report = AutoModelForMaskedLM.from_pretrained(tmp_path / "out", trust_remote_code=True,
                                                         output_loading_info=True)  # fmt: skip
    assert not any(report.values())
    assert model.config.model_type == "lln_roberta"
    tokens = padded_batch()
    expected = ours(checkpoint, tokens)
    assert expected.abs().max() > 0.5
    for kernels in (True, False):
        monkeypatch.setattr(sys.modules[type(model).__module__], "HAS_KERNELS", kernels)
        got = logits(model, tokens)
        torch.testing.assert_close(got[tokens != 1], expected[tokens != 1], rtol=1e-4, atol=1e-5)
        if "batch" not in name:
            torch.testing.assert_close(logits(model, tokens[2:3, :9])[0], got[2, :9], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scope", ["head", "batch"])
def test_sigma_loses_no_digits_to_a_large_mean(scope):
    x = 1000 + torch.randn(2, 3, 40, 8, generator=torch.Generator().manual_seed(1))
    padded = torch.arange(40) >= torch.tensor([[40], [30]])
    (expected,) = standard_deviations([x.double()], padded, scope)
    torch.testing.assert_close(modeling.sigma(x, padded, scope).double(), expected, rtol=1e-5, atol=0)


def test_what_padding_holds_has_no_influence(pretrained, tmp_path, monkeypatch):
    export(pretrained("--attention", "lln_diag"), tmp_path / "out")
    model = AutoModel.from_pretrained(tmp_path / "out", trust_remote_code=True).eval()
    tokens, kernels = padded_batch(), sys.modules[type(model).__module__]
    other = torch.where(tokens == 1, 9, tokens)
    positions = (tokens != 1).cumsum(1) * (tokens != 1) + 1
    for plain in (False, True):
        monkeypatch.setattr(kernels, "HAS_KERNELS", not plain)
        with torch.no_grad():
            a, b = (model(x, attention_mask=tokens != 1, position_ids=positions)[0] for x in (tokens, other))
        assert torch.equal(a[tokens != 1], b[tokens != 1])
        assert torch.isfinite(a).all()
    with pytest.raises(ValueError, match=r"padding masks \(B, N\) alone"):
        model(torch.full((1, 5), 7), attention_mask=torch.ones(1, 5, 5).tril())


def test_gradients_reach_every_parameter(pretrained, tmp_path):
    export(pretrained("--attention", "lln_diag", "--lln-diag-mix", "scale"), tmp_path / "out")
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "out", trust_remote_code=True).train()
    model.gradient_checkpointing_enable()
    tokens = padded_batch()
    model(tokens, attention_mask=tokens != 1, labels=tokens.masked_fill(tokens == 1, -100)).loss.backward()
    assert all(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in model.parameters())
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForMaskedLM.from_pretrained(tmp_path / "again", trust_remote_code=True)
    torch.testing.assert_close(logits(again, tokens), logits(model, tokens))


def test_an_option_that_the_modeling_file_does_not_know_is_refused(pretrained):
    model, _ = load_model(str(pretrained("--attention", "lln_diag")))
    options = {"mix": "new", "constants": "calibrated"}
    with pytest.raises(InputError, match="lln_diag with mix new cannot be exported, only with average, ratio, scale"):
        to_hf.export(model.state_dict(), model.args, options)


def test_it_needs_none_of_our_code(pretrained, tmp_path):
    checkpoint = pretrained("--attention", "lln_diag")
    export(checkpoint, tmp_path / "out")
    code = f"""
import sys, torch
sys.modules["lln_fairseq"] = None  # as if it were not installed
from transformers import AutoModelForMaskedLM
model = AutoModelForMaskedLM.from_pretrained({str(tmp_path / "out")!r}, trust_remote_code=True).eval()
tokens = torch.load("tokens.pt")
torch.save(model(tokens, attention_mask=tokens != 1).logits, "logits.pt")
"""
    tokens = padded_batch()
    torch.save(tokens, tmp_path / "tokens.pt")
    environment = {"PATH": "", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, timeout=120)
    got, expected = torch.load(tmp_path / "logits.pt"), ours(checkpoint, tokens)
    torch.testing.assert_close(got[tokens != 1], expected[tokens != 1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", ["softmax", "lln_diag"])
def test_a_fine_tuned_model_keeps_its_labels(attention, tmp_path, monkeypatch):
    data = make_classification(tmp_path / "data", names=("bad", "good"))
    train(monkeypatch, tmp_path / "log", data, tmp_path / "run", *CLASSIFICATION, *LLN, "--attention", attention)
    checkpoint = shaken(tmp_path / "run" / "checkpoint_last.pt")
    (tmp_path / "run" / "valid.json").write_text(json.dumps({"split": "valid", "rows": 11, "accuracy": 0.5}))
    (data / "manifest.json").write_text(json.dumps({"sources": [{"name": "SST-2.zip"}], "settings": {"program": "x"}}))
    said = export(checkpoint, tmp_path / "out")
    assert said[0] == "without a tokenizer: give --tokenizer DIRECTORY"
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert model.config.id2label == {0: "bad", 1: "good"}
    assert isinstance(model, RobertaForSequenceClassification)
    tokens = padded_batch()
    expected = ours(checkpoint, tokens, "sentence_classification_head")
    torch.testing.assert_close(logits(model, tokens), expected, rtol=1e-4, atol=1e-5)
    card = (tmp_path / "out" / "README.md").read_text()
    for line in ("labels: bad, good", "data: SST-2.zip", "validation set: rows 11, accuracy 0.5", "To be stated by"):
        assert line in card


def test_a_model_that_fairseq_trained(tmp_path, monkeypatch):
    data = make_classification(tmp_path / "data")
    train(monkeypatch, tmp_path / "log", data, tmp_path / "run", *CLASSIFICATION, *USER_DIR, "--arch", "roberta",
          "--task", "sentence_prediction", "--max-update", 1)  # fmt: skip
    checkpoint = shaken(tmp_path / "run" / "checkpoint_last.pt")
    export(checkpoint, tmp_path / "out")
    model, tokens = RobertaForSequenceClassification.from_pretrained(tmp_path / "out"), padded_batch()
    expected = ours(checkpoint, tokens, "sentence_classification_head")
    torch.testing.assert_close(logits(model, tokens), expected, rtol=1e-4, atol=1e-5)


def test_a_regression_has_one_score_without_a_name(pretrained):
    model, _ = load_model(str(pretrained("--attention", "softmax")))
    model.register_classification_head("scores", num_classes=1)
    found = to_hf.export(model.state_dict(), model.args, {}, "scores")
    assert (found.config["problem_type"], found.config["id2label"]) == ("regression", {"0": "score"})
    model.register_classification_head("classes", num_classes=3)
    for labels in ((), ("bad", "good")):
        with pytest.raises(InputError, match=f"has 3 classes, and there are {len(labels)} labels"):
            to_hf.export(model.state_dict(), model.args, {}, "classes", labels)


PLAIN = ["a", "the", "plot", "film", "A", "É", "ж", "☃", "🙃", ".", "ﬁ", "²", "ß", "<0x41>", "é", "e\u0301", "E\u0301"]
BLANK = [character for character in map(chr, range(0x3001)) if character.isspace()]
NASTY = [*PLAIN, *BLANK, "\u200b", "\ufeff", "  ", "\r\n", "▁", "▁▁", " ▁", "▁ "]


@pytest.mark.parametrize(
    ("model_type", "byte_fallback", "fold"),
    [("bpe", True, False), ("bpe", False, True), ("unigram", False, False), ("unigram", True, True)],
)
def test_sentencepiece_encodes_nasty_texts_as_predict_does(model_type, byte_fallback, fold, tmp_path):
    lines = [*TEXTS, *(f"the film {a}{b} held" for a in "abcd" for b in "xyz")] * 3
    size = 302 if byte_fallback else 45
    vocabulary = new_vocabulary(
        SentencePieceTokenizer(train_sentencepiece(lines, size, model_type, byte_fallback, fold))
    )
    dictionary = Dictionary()
    for symbol in [*vocabulary.symbols, "<mask>"]:
        dictionary.add_symbol(symbol)
    files = tokenizer_out.exported(vocabulary.tokenizer.files, dictionary.symbols, 64)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    task = SimpleNamespace(cfg=SimpleNamespace(), source_dictionary=dictionary)
    generator = random.Random(0)
    texts = ["".join(generator.choices(NASTY, k=generator.randrange(10))) for _ in range(1000)]
    expected = TextIds(task, vocabulary, 64).encode_lines(texts)
    for text, ids in zip(texts, expected, strict=True):
        assert theirs(text)["input_ids"] == [0, *ids.tolist()], repr(text)
    assert tokenizer_out.is_approximate(vocabulary.tokenizer.files) == fold


def test_model_card_says_that_a_normalizing_sentencepiece_model_is_approximated(tmp_path):
    make_model("xlm-roberta", tmp_path / "in")
    model = train_sentencepiece([*TEXTS, "zxqjvk"] * 3, PIECES, "unigram", fold=True)
    (tmp_path / "in" / "sentencepiece.bpe.model").write_bytes(model)
    convert(tmp_path / "in", tmp_path / "ours", "softmax")
    export(tmp_path / "ours" / "model.pt", tmp_path / "out")
    assert "the ids may differ where a text has combining" in (tmp_path / "out" / "README.md").read_text()


def test_gpt2_encodes_the_same(tmp_path):
    files = {"encoder.json": b"", "vocab.bpe": b""}
    letters = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = [chr(i) for i in letters] + [chr(256 + i) for i in range(256 - len(letters))]
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ġ", "p"), ("l", "o")]
    tokens = [*alphabet, *map("".join, merges), "<|endoftext|>"]
    files["encoder.json"] = json.dumps({token: number for number, token in enumerate(tokens)}).encode()
    files["vocab.bpe"] = ("#version\n" + "".join(f"{a} {b}\n" for a, b in merges)).encode()
    tokenizer = make_tokenizer("gpt2", files)
    same_ids(tokenizer, new_vocabulary(tokenizer), [*TEXTS[:3], " the plot"], tmp_path)


def test_bpe_dropout_is_switched_off(sources, copy, tmp_path):
    theirs = TOKENIZERS["roberta"].from_pretrained(sources["roberta"][1])
    content = json.loads(theirs.backend_tokenizer.to_str())
    content["model"]["dropout"] = 0.5
    folder = copy("roberta")
    (folder / "tokenizer.json").write_text(json.dumps(content))
    convert(folder, tmp_path / "ours", "softmax")
    vocabulary = load_vocabulary(str(tmp_path / "ours"))
    for _ in range(5):
        assert vocabulary.tokenizer.encode_ids(TEXTS[:3]) == theirs(TEXTS[:3], add_special_tokens=False)["input_ids"]
    same_ids(vocabulary.tokenizer, vocabulary, TEXTS[:3] * 5, tmp_path)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_added_tokens_and_the_prefix_space_are_exported(kind, tmp_path):
    settings = {"add_prefix_space": True, "additional_special_tokens": ["<ent>", "</ent>"]}
    make_model_with_settings(kind, tmp_path / "in", settings)
    convert(tmp_path / "in", tmp_path / "ours", "softmax")
    vocabulary = load_vocabulary(str(tmp_path / "ours"))
    same_ids(vocabulary.tokenizer, vocabulary, [*TEXTS[:3], "the <ent>plot</ent>"], tmp_path)


def same_ids(tokenizer, vocabulary, texts, folder):
    symbols = ["<s>", "<pad>", "</s>", "<unk>", *vocabulary.symbols, "<mask>"]
    for name, content in tokenizer_out.exported(tokenizer.files, symbols, 64).items():
        (folder / name).write_bytes(content)
    theirs = AutoTokenizer.from_pretrained(folder)
    for text, ids in zip(texts, tokenizer.encode_ids(texts), strict=True):
        text = text.replace(" <mask>", "")
        (ids,) = tokenizer.encode_ids([text])
        assert theirs(text)["input_ids"] == [0, *vocabulary.table[ids].tolist(), 2], text
    assert (theirs.mask_token_id, theirs.pad_token_id) == (len(symbols) - 1, 1)
    assert theirs("a", "b")["input_ids"].count(2) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--attention", "performer"), "the attention performer cannot be exported, only softmax, lln, lln_diag"),
        (("--attention", "softmax", "--activation-fn", "relu"), "activation_fn is relu, and Hugging Face's RoBERTa"),
        (("--attention", "lln", "--pooling", "mean"), "pooling is mean"),
    ],
)
def test_what_cannot_be_exported_is_named(options, message, pretrained, tmp_path, capsys):
    checkpoint = pretrained(*options)
    capsys.readouterr()
    assert main(["export", str(checkpoint), str(tmp_path / "out")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_bad_places(pretrained, tmp_path):
    checkpoint = pretrained("--attention", "lln")
    (tmp_path / "there").mkdir()
    with pytest.raises(InputError, match="there is there already"):
        export(checkpoint, tmp_path / "there")
    with pytest.raises(InputError, match="there has no tokenizer"):
        export(checkpoint, tmp_path / "out", tokenizer=tmp_path / "there")
    (tmp_path / "there" / "spm.model").write_bytes(train_sentencepiece(TEXTS * 3, 36))
    with pytest.raises(InputError, match="the tokenizer does not fit the dictionary, which lacks"):
        export(checkpoint, tmp_path / "out", tokenizer=tmp_path / "there")
    assert not (tmp_path / "out").exists()


def test_next_run_removes_what_a_killed_one_left(tmp_path):
    out = tmp_path / "out"
    killed = f"""
import os, signal
from pathlib import Path
from lln_fairseq.conversion.directory import new_directory
with new_directory(Path({str(out)!r})) as folder:
    (folder / "old").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", killed], cwd=Path(__file__).parents[2]).returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    with new_directory(out) as folder:
        (folder / "new").touch()
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == ["out", "out/new"]
