"""Checkpoints exported to Hugging Face: the same logits with any padding, the same tokenizers, and the way back."""

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
from safetensors.torch import load_file
from sentencepiece import sentencepiece_model_pb2
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
)

from lln_fairseq import load
from lln_fairseq.__main__ import main
from lln_fairseq.conversion.convert import build_checkpoint, convert
from lln_fairseq.conversion.directory import new_directory
from lln_fairseq.conversion.export import export
from lln_fairseq.conversion.imported_encoder import ImportedEncoder
from lln_fairseq.conversion.to_hugging_face import convert_to_hugging_face
from lln_fairseq.conversion.write_tokenizer import NORMALIZATION, TIES, convert_tokenizer, describe_differences
from lln_fairseq.errors import UserError
from lln_fairseq.inference.loading import load_model
from lln_fairseq.text.pairs import first_segment_lengths
from lln_fairseq.text.samples import SampleEncoder
from lln_fairseq.text.tokenizers import SentencePieceTokenizer, make_tokenizer, train_sentencepiece
from lln_fairseq.text.vocabulary import Vocabulary, load_vocabulary, new_vocabulary
from tests.conversion.sources import (
    TEXTS,
    TOKENIZERS,
    TRANSFORMERS_5,
    add_noise,
    compute_logits,
    make_model,
    make_model_with_settings,
    padded_batch,
)
from tests.fairseq_runs import CLASSIFICATION, LLN, USER_DIR, make_classification, train
from tests.helpers import with_representatives
from tests.text_runs import fairseq_dictionary

CLASSIFICATION_HEAD = "sentence_classification_head"


def hugging_face_logits(model, tokens, **options):
    with torch.no_grad():
        return model.eval()(tokens, attention_mask=(tokens != 1).long(), **options).logits


def test_roberta_is_restored_exactly(tmp_path):
    model = make_model("roberta", tmp_path / "in")
    with torch.no_grad():
        model.roberta.embeddings.token_type_embeddings.weight.zero_()
    model.save_pretrained(tmp_path / "in")

    convert(tmp_path / "in", tmp_path / "converted", "softmax")
    export(tmp_path / "converted" / "model.pt", tmp_path / "out")

    restored = RobertaForMaskedLM.from_pretrained(tmp_path / "out")
    expected = model.state_dict()
    actual = restored.state_dict()
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    tokens = padded_batch(model.config.vocab_size)
    real = tokens != 1
    logits = hugging_face_logits(restored, tokens)
    torch.testing.assert_close(logits, hugging_face_logits(model, tokens), rtol=0, atol=1e-5)
    converted_logits = compute_logits(tmp_path / "converted/model.pt", tokens)
    torch.testing.assert_close(logits[real], converted_logits[real], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", ["softmax", "lln_diag"])
def test_rotary_pre_norm_model_is_restored_exactly(attention, sources, tmp_path):
    convert(sources["roberta"][1], tmp_path / "source", attention)
    checkpoint = tmp_path / "source" / "model.pt"
    state = torch.load(checkpoint)
    options = {"rotary": True, "rotary_base": 700.0, "encoder_normalize_before": True, "layernorm_embedding": False}
    if attention == "lln_diag":
        options |= {"lln_diag_gain": "learned", "lln_diag_block_size": 8, "lln_diag_mix": "joint_offset"}
        options["softmax_layers"] = "1"
        attention_name = "encoder.sentence_encoder.layers.0.self_attn.attention."
        state["model"] |= {f"{attention_name}log_gain": torch.randn(2, 2), f"{attention_name}offset": torch.randn(2)}
    state["cfg"]["model"] |= options
    for kind in ("weight", "bias"):
        norm = state["model"].pop(f"encoder.sentence_encoder.layernorm_embedding.{kind}")
        state["model"][f"encoder.sentence_encoder.layer_norm.{kind}"] = norm
    torch.save(state, checkpoint)

    export(checkpoint, tmp_path / "exported")
    convert(tmp_path / "exported", tmp_path / "restored")
    export(tmp_path / "restored" / "model.pt", tmp_path / "again")

    tokens = padded_batch(len(state["model"]["encoder.sentence_encoder.embed_tokens.weight"]))
    real = tokens != 1
    expected = compute_logits(checkpoint, tokens)[real]
    torch.testing.assert_close(compute_logits(tmp_path / "restored" / "model.pt", tokens)[real], expected)
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "again", trust_remote_code=True)
    torch.testing.assert_close(hugging_face_logits(model, tokens)[real], expected, rtol=1e-4, atol=1e-5)
    assert (tmp_path / "again/config.json").read_text() == (tmp_path / "exported/config.json").read_text()
    before = load_file(tmp_path / "exported" / "model.safetensors")
    after = load_file(tmp_path / "again" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_exported_model_gets_another_attention(sources, tmp_path):
    convert(sources["roberta"][1], tmp_path / "source", "lln_diag")
    export(tmp_path / "source" / "model.pt", tmp_path / "exported")
    notes = convert(tmp_path / "exported", tmp_path / "restored", "softmax").notes
    assert notes == ["softmax replaces lln_diag in all layers"]
    model, _ = load_model(str(tmp_path / "restored" / "model.pt"))
    assert model.args.attention == "softmax"


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_text_gives_same_logits_after_conversion_and_export(kind, tmp_path):
    model = make_model(kind, tmp_path / "in")
    tokenizer = TOKENIZERS[kind].from_pretrained(tmp_path / "in")

    convert(tmp_path / "in", tmp_path / "converted", "softmax")
    assert main(["export", str(tmp_path / "converted" / "model.pt"), str(tmp_path / "out")]) == 0

    exported = AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    exported_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    texts = TEXTS
    if TRANSFORMERS_5 and kind == "roberta":
        texts = TEXTS[:3]  # without a tokenizer.json, it reads the space before <mask> as a token
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    exported_batch = exported_tokenizer(texts, padding=True, return_tensors="pt")
    assert torch.equal(exported_batch["attention_mask"], batch["attention_mask"])
    new_ids = [
        exported_tokenizer.convert_tokens_to_ids(tokenizer.convert_ids_to_tokens(number))
        for number in range(len(tokenizer))
    ]
    assert sorted(new_ids) == list(range(len(tokenizer)))
    assert torch.equal(exported_batch["input_ids"], torch.tensor(new_ids)[batch["input_ids"]])
    with torch.no_grad():
        expected = model(**batch).logits
        actual = exported(**exported_batch).logits
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(actual[real][:, new_ids], expected[real], rtol=1e-5, atol=1e-5)
    assert exported_tokenizer.decode(exported_batch["input_ids"][2], skip_special_tokens=True).strip() == "a"
    assert exported_tokenizer.model_max_length == 40


GLOBAL = ("--lln-diag-mix", "joint_offset", "--lln-diag-block-size", 8)
PRE_NORM = ("--encoder-normalize-before",)
DIAG = ("--block-diag-block-size", 8)
LLN_MODELS = {
    "lln": (),
    "lln fixed": ("--lln-alpha", 1.5, "--lln-beta", 2.0),
    "lln paper": ("--lln-constants", "paper"),
    "lln_diag": (),
    "lln_diag batch": ("--lln-diag-scope", "batch"),
    "lln_diag joint_offset": ("--lln-diag-mix", "joint_offset", "--lln-diag-block-size", 8),
    "lln_diag gain": ("--lln-diag-gain", "learned"),
    "lln_diag global": (*GLOBAL, "--lln-diag-global-tokens", "11"),
    "lln_diag long global": (*GLOBAL, "--lln-diag-global-tokens", "200"),
    "block_diag": DIAG,
    "block_diag global": (*DIAG, "--block-diag-global-tokens", "11"),
    "window global": ("--window-block-size", 8, "--window-global-tokens", "11"),
    "window band": ("--window-block-size", 8, "--window-band", 11),
    "window rotary pre-norm": (
        *("--window-block-size", 8, "--window-neighbors", 2),
        *("--rotary", *PRE_NORM, "--softmax-layers", "every:2"),
    ),
    "lln rotary": ("--rotary", "--rotary-base", 500),
    "softmax rotary": ("--rotary", "--rotary-base", 500),
    "softmax pre-norm": PRE_NORM,
    "softmax tanh-gelu": ("--activation-fn", "gelu_accurate"),
    "lln_diag rotary pre-norm": ("--rotary", *PRE_NORM, "--layernorm-embedding", "--softmax-layers", "1"),
    "lln_diag softmax": ("--lln-diag-mix", "joint_offset", "--lln-diag-gain", "learned", "--softmax-layers", "1"),
}


@pytest.mark.parametrize(
    "name",
    with_representatives(
        LLN_MODELS,
        "lln paper",
        "lln_diag batch",
        "lln_diag joint_offset",
        "lln_diag softmax",
        "lln_diag global",
        "block_diag global",
        "softmax rotary",
        "softmax pre-norm",
        "softmax tanh-gelu",
        "lln_diag rotary pre-norm",
        "window band",
        "window rotary pre-norm",
    ),
)
def test_model_with_code_gives_same_logits_with_and_without_kernels(name, pretrain, tmp_path, monkeypatch):
    checkpoint = pretrain("--attention", name.split()[0], *LLN_MODELS[name])

    export(checkpoint, tmp_path / "out")

    model, report = AutoModelForMaskedLM.from_pretrained(
        tmp_path / "out", trust_remote_code=True, output_loading_info=True
    )
    assert not any(report.values())
    assert model.config.model_type == "lln_roberta"
    tokens = padded_batch()
    real = tokens != 1
    expected = compute_logits(checkpoint, tokens)
    assert expected.abs().max() > 0.5
    for has_kernels in (True, False):
        monkeypatch.setattr(sys.modules[type(model).__module__], "HAS_KERNELS", has_kernels)
        actual = hugging_face_logits(model, tokens)
        torch.testing.assert_close(actual[real], expected[real], rtol=1e-4, atol=1e-5)
        if "batch" not in name:  # with this scope, a sequence depends on the others
            without_padding = hugging_face_logits(model, tokens[2:3, :9])[0]
            torch.testing.assert_close(without_padding, actual[2, :9], rtol=1e-4, atol=1e-5)


def test_band_is_computed_without_kernels_beside_an_old_package(pretrain, tmp_path, monkeypatch):
    """The operation of a package before 0.4 has no argument for the band."""
    checkpoint = pretrain("--attention", "window", *LLN_MODELS["window band"])
    export(checkpoint, tmp_path / "out")
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    monkeypatch.setattr(sys.modules[type(model).__module__], "HAS_BAND", False)
    monkeypatch.delattr(sys.modules[type(model).__module__], "block_diag_attention")
    tokens = padded_batch()
    actual = hugging_face_logits(model, tokens)
    torch.testing.assert_close(
        actual[tokens != 1], compute_logits(checkpoint, tokens)[tokens != 1], rtol=1e-4, atol=1e-5
    )


@pytest.fixture
def pair_model(pretrain, tmp_path):
    """Return a checkpoint whose first segments are global, its exported model, and pairs and single texts (4, 37)."""
    checkpoint = pretrain("--attention", "lln_diag", *GLOBAL, "--lln-diag-global-tokens", "first_segment")
    export(checkpoint, tmp_path / "out")
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    tokens = padded_batch()
    tokens[0, 20:22] = 2
    tokens[1, 3:5] = 2
    tokens[2, 5] = 2  # a single text
    return checkpoint, model, tokens


def test_first_segments_give_same_logits_with_and_without_kernels(pair_model, monkeypatch):
    checkpoint, model, tokens = pair_model
    real = tokens != 1
    expected = compute_logits(checkpoint, tokens)
    for has_kernels in (True, False):
        monkeypatch.setattr(sys.modules[type(model).__module__], "HAS_KERNELS", has_kernels)
        actual = hugging_face_logits(model, tokens)
        torch.testing.assert_close(actual[real], expected[real], rtol=1e-5, atol=1e-5)
        alone = hugging_face_logits(model, tokens[1:2, :36])[0]
        torch.testing.assert_close(alone, actual[1, :36], rtol=1e-5, atol=1e-5)
        without_mask = model(tokens[:1]).logits
        torch.testing.assert_close(without_mask, actual[:1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_first_segments_are_those_of_the_forward_pass_that_is_repeated(
    has_kernels, use_reentrant, pair_model, monkeypatch
):
    _, model, tokens = pair_model
    monkeypatch.setattr(sys.modules[type(model).__module__], "HAS_KERNELS", has_kernels)
    model.eval()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0

    def gradients():
        model.zero_grad()
        outputs = [model(batch, attention_mask=batch != 1).logits for batch in (tokens, tokens.flip(0))]
        sum(output.square().mean() for output in outputs).backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients()
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    torch.testing.assert_close(gradients(), expected, rtol=1e-4, atol=1e-6)


def test_first_segments_need_ids(pair_model):
    _, model, tokens = pair_model
    embeddings = model.get_input_embeddings()(tokens)
    with pytest.raises(ValueError, match="global_tokens=first_segment needs input_ids"):
        model(inputs_embeds=embeddings)
    with pytest.raises(ValueError, match=r"this attention supports only padding masks \(B, N\), got a mask of shape"):
        model(tokens, attention_mask=torch.ones(4, 37, 37))


def test_cut_pair_keeps_its_global_tokens(pair_model, sources, tmp_path):
    """The exported tokenizer cuts the texts of a pair, and not the </s> that separate them."""
    convert(sources["bert"][1], tmp_path / "converted", "softmax")
    export(tmp_path / "converted" / "model.pt", tmp_path / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    ids = tokenizer("plot " * 100, "it holds", truncation=True, return_tensors="pt")["input_ids"]
    assert ids.shape == (1, 40)
    assert first_segment_lengths(ids, 2).tolist() == [
        36
    ]  # <s>, the rest of the first text and </s>; then come </s> it holds </s>
    assert "(`truncation=True`), which keeps it." in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("attention", ["lln", "lln_diag", "block_diag", "window"])
def test_padding_at_the_left_is_rejected_or_has_no_effect(attention, sources, tmp_path):
    convert(sources["bert"][1], tmp_path / "converted", attention)
    export(tmp_path / "converted" / "model.pt", tmp_path / "out")
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    tokens = padded_batch(71)[:1, :20]
    padded = torch.nn.functional.pad(tokens, (3, 0), value=1)
    card = (tmp_path / "out" / "README.md").read_text()
    assert 'AutoModelForMaskedLM.from_pretrained("DIRECTORY", trust_remote_code=True)' in card
    assert "code: for `torch` 2.7 or later" in card
    if attention != "lln":
        with pytest.raises(ValueError, match="needs padding at the right: set"):
            hugging_face_logits(model, padded)
        assert "padding: at the right only" in card
    else:
        actual = hugging_face_logits(model, padded)[:, 3:]
        torch.testing.assert_close(actual, hugging_face_logits(model, tokens), rtol=1e-5, atol=1e-5)
        assert "padding" not in card


@pytest.mark.parametrize("has_kernels", [True, False])
def test_content_of_padding_has_no_influence(has_kernels, pretrain, tmp_path, monkeypatch):
    export(pretrain("--attention", "lln_diag"), tmp_path / "out")
    model = AutoModel.from_pretrained(tmp_path / "out", trust_remote_code=True).eval()
    monkeypatch.setattr(sys.modules[type(model).__module__], "HAS_KERNELS", has_kernels)
    tokens = padded_batch()
    real = tokens != 1
    changed_padding = torch.where(real, tokens, 9)
    positions = real.cumsum(1) * real + 1

    with torch.no_grad():
        expected = model(tokens, attention_mask=real, position_ids=positions)[0]
        actual = model(changed_padding, attention_mask=real, position_ids=positions)[0]

    assert torch.equal(actual[real], expected[real])
    assert torch.isfinite(expected).all()


@pytest.mark.parametrize("attention", ["lln_diag", "window"])
def test_attentions_and_head_mask_are_rejected(attention, pretrain, tmp_path):
    export(pretrain("--attention", attention), tmp_path / "out")
    tokens = torch.full((1, 5), 7)
    for model_class in (AutoModel, AutoModelForMaskedLM):
        model = model_class.from_pretrained(tmp_path / "out", trust_remote_code=True).eval()
        with pytest.raises(ValueError, match="output_attentions is not supported"):
            model(tokens, output_attentions=True)
        with pytest.raises(ValueError, match="does not support head_mask"):
            model(tokens, head_mask=torch.ones(2, 2))
        model(tokens, output_attentions=False, head_mask=None)
        model.config.output_attentions = True
        with pytest.raises(ValueError, match="output_attentions is not supported"):
            model(tokens)


def test_every_parameter_gets_gradient(pretrain, tmp_path):
    export(pretrain("--attention", "lln_diag", *GLOBAL), tmp_path / "out")
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "out", trust_remote_code=True).train()
    model.gradient_checkpointing_enable()
    tokens = padded_batch()

    model(tokens, attention_mask=tokens != 1, labels=tokens.masked_fill(tokens == 1, -100)).loss.backward()

    assert all(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in model.parameters())


def test_exported_model_can_be_saved_again(pretrain, tmp_path):
    export(pretrain("--attention", "lln_diag", *GLOBAL), tmp_path / "out")
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForMaskedLM.from_pretrained(tmp_path / "again", trust_remote_code=True)
    tokens = padded_batch()
    torch.testing.assert_close(hugging_face_logits(again, tokens), hugging_face_logits(model, tokens))


def test_option_unknown_to_modeling_file_is_rejected(pretrain):
    model, _ = load_model(str(pretrain("--attention", "lln_diag")))
    options = {"mix": "new", "constants": "calibrated"}
    with pytest.raises(UserError, match="mix=new of lln_diag cannot be exported: choose from average, joint_offset"):
        convert_to_hugging_face(model.state_dict(), model.args, options)


def test_exported_model_runs_without_lln_fairseq(pretrain, tmp_path):
    checkpoint = pretrain("--attention", "lln_diag", "--rotary")
    export(checkpoint, tmp_path / "out")
    tokens = padded_batch()
    torch.save(tokens, tmp_path / "tokens.pt")
    code = f"""
import sys, torch
sys.modules["lln_fairseq"] = None  # as if it were not installed
from transformers import AutoModelForMaskedLM
model = AutoModelForMaskedLM.from_pretrained({str(tmp_path / "out")!r}, trust_remote_code=True).eval()
tokens = torch.load("tokens.pt")
torch.save(model(tokens, attention_mask=tokens != 1).logits, "logits.pt")
"""
    environment = {"PATH": "", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}

    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, timeout=120)

    real = tokens != 1
    actual = torch.load(tmp_path / "logits.pt")
    expected = compute_logits(checkpoint, tokens)
    torch.testing.assert_close(actual[real], expected[real], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", ["softmax", "lln_diag"])
def test_fine_tuned_model_keeps_labels(attention, tmp_path, monkeypatch):
    data = make_classification(tmp_path / "data", names=("bad", "good"))
    train(monkeypatch, tmp_path / "log", data, tmp_path / "run", *CLASSIFICATION, *LLN, "--attention", attention)
    checkpoint = add_noise(tmp_path / "run" / "checkpoint_last.pt")

    lines = export(checkpoint, tmp_path / "out")

    assert lines[0] == "without a tokenizer: give --tokenizer DIRECTORY"
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert model.config.id2label == {0: "bad", 1: "good"}
    assert isinstance(model, RobertaForSequenceClassification)
    tokens = padded_batch()
    expected = compute_logits(checkpoint, tokens, CLASSIFICATION_HEAD)
    torch.testing.assert_close(hugging_face_logits(model, tokens), expected, rtol=1e-4, atol=1e-5)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "labels: bad, good" in card
    assert "To be stated by" in card


@pytest.mark.parametrize(
    ("options", "message"), [(("--strip-eos",), "strip_eos=True"), (("--init-token", 2), "init_token=2")]
)
def test_other_special_tokens_are_rejected(options, message, tmp_path, monkeypatch):
    data = make_classification(tmp_path / "data")
    train(monkeypatch, tmp_path / "log", data, tmp_path / "run", *CLASSIFICATION, *LLN, *options)

    with pytest.raises(UserError, match=f"{message} cannot be exported"):
        export(tmp_path / "run" / "checkpoint_last.pt", tmp_path / "out")


def test_stock_fairseq_model_is_exported(tmp_path, monkeypatch):
    data = make_classification(tmp_path / "data")
    stock = ("--arch", "roberta", "--task", "sentence_prediction", "--max-update", 1)
    train(monkeypatch, tmp_path / "log", data, tmp_path / "run", *CLASSIFICATION, *USER_DIR, *stock)
    checkpoint = add_noise(tmp_path / "run" / "checkpoint_last.pt")

    export(checkpoint, tmp_path / "out")

    model = RobertaForSequenceClassification.from_pretrained(tmp_path / "out")
    tokens = padded_batch()
    expected = compute_logits(checkpoint, tokens, CLASSIFICATION_HEAD)
    torch.testing.assert_close(hugging_face_logits(model, tokens), expected, rtol=1e-4, atol=1e-5)


def test_wrong_number_of_labels_is_rejected(pretrain):
    model, _ = load_model(str(pretrain("--attention", "softmax")))
    model.register_classification_head("classes", num_classes=3)
    for labels in ((), ("bad", "good")):
        with pytest.raises(UserError, match=f"has 3 classes, but there are {len(labels)} labels"):
            convert_to_hugging_face(model.state_dict(), model.args, {}, "classes", labels)


PLAIN = ["a", "the", "plot", "film", "A", "É", "ж", "☃", "🙃", ".", "ﬁ", "²", "ß", "<0x41>", "é", "e\u0301", "E\u0301"]
BLANK = [character for character in map(chr, range(0x3001)) if character.isspace()]
NASTY = [*PLAIN, *BLANK, "\u200b", "\ufeff", "  ", "\r\n", "▁", "▁▁", " ▁", "▁ "]


def with_mask(vocabulary):
    """Return a vocabulary whose dictionary ends with <mask>, as that of a task."""
    return Vocabulary(vocabulary.tokenizer, f"{vocabulary.dictionary}<mask> 0\n")


def make_encoder(vocabulary):
    """Return the SampleEncoder with which `predict` encodes texts, for the vocabulary and <mask>."""
    dictionary = Dictionary()
    for symbol in [*vocabulary.symbols, "<mask>"]:
        dictionary.add_symbol(symbol)
    task = SimpleNamespace(cfg=SimpleNamespace(), source_dictionary=dictionary)
    return SampleEncoder(task, vocabulary)


@pytest.mark.parametrize(
    ("model_type", "byte_fallback", "fold"),
    [
        ("bpe", True, False),
        ("bpe", False, True),
        ("unigram", False, False),
        ("unigram", True, True),
        ("char", True, True),
        ("char", False, False),
    ],
)
def test_sentencepiece_gives_same_ids_for_nasty_texts(model_type, byte_fallback, fold, tmp_path):
    lines = list(TEXTS)
    for first in "abcd":
        lines += [f"the film {first}{second} held" for second in "xyz"]
    size = 302 if byte_fallback else 45
    tokenizer = SentencePieceTokenizer(train_sentencepiece(lines * 3, size, model_type, byte_fallback, fold))
    vocabulary = new_vocabulary(tokenizer)
    generator = random.Random(0)
    texts = ["".join(generator.choices(NASTY, k=generator.randrange(10))) for _ in range(1000)]
    expected = make_encoder(vocabulary).encode_lines(texts)

    for name, content in convert_tokenizer(with_mask(vocabulary), 64).items():
        (tmp_path / name).write_bytes(content)

    exported = AutoTokenizer.from_pretrained(tmp_path)
    for text, ids in zip(texts, expected, strict=True):
        assert exported(text)["input_ids"] == [0, *ids.tolist()], repr(text)
    lines = describe_differences(tokenizer.files)
    assert lines == [NORMALIZATION] * fold + [TIES] * (model_type == "unigram")


def change_sentencepiece(model, change):
    """Return the vocabulary of a SentencePiece model whose protobuf `change` has modified in place, with <mask>."""
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model)
    change(proto)
    return with_mask(new_vocabulary(SentencePieceTokenizer(proto.SerializeToString())))


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_tokenizer_of_any_size_is_exported(model_type):
    """Pieces of control characters, such as the line feed, are compared wherever they are among the pieces."""
    model = train_sentencepiece(TEXTS * 3, 290, model_type, byte_fallback=True)
    for size in (500, 1500, 4500):

        def add_pieces(proto, size=size):
            for number in range(len(proto.pieces), size):
                word = f"{number:013b}".replace("0", "e").replace("1", "t")
                proto.pieces.add(piece=word, score=-20 - number)

        vocabulary = change_sentencepiece(model, add_pieces)
        assert len(vocabulary.tokenizer.symbols()) == size - 3
        convert_tokenizer(vocabulary, 64)


def test_unigram_splits_with_equal_scores_are_accepted(tmp_path):
    """The sum of these scores in float32 depends on their order."""
    scores = {"▁": -7.5, "0": -6.19, "00": -8.3}

    def set_pieces(proto):
        del proto.pieces[3:]
        for piece, score in scores.items():
            proto.pieces.add(piece=piece, score=score)

    vocabulary = change_sentencepiece(train_sentencepiece(TEXTS * 3, 36, "unigram"), set_pieces)
    for name, content in convert_tokenizer(vocabulary, 64).items():
        (tmp_path / name).write_bytes(content)
    assert vocabulary.encode(["000"])[0].tolist() == [4, 6, 5]
    assert AutoTokenizer.from_pretrained(tmp_path)("000")["input_ids"] == [0, 4, 5, 6, 2]


def test_sentencepiece_of_whole_words_is_rejected():
    def set_type(proto):
        proto.trainer_spec.model_type = 3

    vocabulary = change_sentencepiece(train_sentencepiece(TEXTS * 3, 36), set_type)
    with pytest.raises(
        UserError, match=r"^spm\.model is neither a BPE, a unigram nor a character model: the tokenizer"
    ):
        convert_tokenizer(vocabulary, 64)


def assert_exported_tokenizer_gives_same_ids(vocabulary, texts, folder):
    for name, content in convert_tokenizer(with_mask(vocabulary), 64).items():
        (folder / name).write_bytes(content)
    exported = AutoTokenizer.from_pretrained(folder)
    texts = [*texts, "the\nfilm\n\n the plot\r\n\nthe\rend"]
    assert exported("the\r\n\nfilm")["input_ids"] == exported("the film")["input_ids"]
    for text, ids in zip(texts, make_encoder(vocabulary).encode_lines(texts), strict=True):
        assert exported(text)["input_ids"] == [0, *ids.tolist()], text
    assert exported.mask_token_id == vocabulary.size
    assert exported.pad_token_id == 1
    assert exported("a", "b")["input_ids"].count(2) == 3


def test_gpt2_tokenizer_gives_same_ids(tmp_path):
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = [chr(code) for code in printable] + [chr(256 + code) for code in range(256 - len(printable))]
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ġ", "p"), ("l", "o")]
    tokens = [*alphabet, *map("".join, merges), "<|endoftext|>"]
    files = {
        "encoder.json": json.dumps({token: number for number, token in enumerate(tokens)}).encode(),
        "vocab.bpe": ("#version\n" + "".join(f"{left} {right}\n" for left, right in merges)).encode(),
    }
    vocabulary = new_vocabulary(make_tokenizer("gpt2", files))
    assert_exported_tokenizer_gives_same_ids(vocabulary, TEXTS[:3], tmp_path)


def test_bpe_dropout_is_switched_off(sources, copy_source, tmp_path):
    tokenizer = TOKENIZERS["roberta"].from_pretrained(sources["roberta"][1])
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content["model"]["dropout"] = 0.5
    folder = copy_source("roberta")
    (folder / "tokenizer.json").write_text(json.dumps(content))

    convert(folder, tmp_path / "converted", "softmax")

    vocabulary = load_vocabulary(str(tmp_path / "converted"))
    expected = tokenizer(TEXTS[:3], add_special_tokens=False)["input_ids"]
    for _ in range(5):
        assert vocabulary.tokenizer.encode_ids(TEXTS[:3]) == expected
    assert_exported_tokenizer_gives_same_ids(vocabulary, TEXTS[:3] * 5, tmp_path)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_added_tokens_and_prefix_space_are_exported(kind, tmp_path):
    settings = {"add_prefix_space": True, "additional_special_tokens": ["<ent>", "</ent>"]}
    make_model_with_settings(kind, tmp_path / "in", settings)
    convert(tmp_path / "in", tmp_path / "converted", "softmax")
    vocabulary = load_vocabulary(str(tmp_path / "converted"))
    assert_exported_tokenizer_gives_same_ids(vocabulary, [*TEXTS[:3], "the <ent>plot</ent>"], tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--attention", "performer"), "performer cannot be exported: choose from softmax, lln, lln_diag, block_diag"),
        (
            ("--attention", "softmax", "--activation-fn", "tanh"),
            "activation_fn=tanh cannot be exported: choose from gelu, gelu_accurate, gelu_fast, relu",
        ),
        (("--attention", "lln", "--pooling", "mean"), "pooling=mean cannot be exported"),
    ],
)
def test_unsupported_model_is_rejected(options, message, pretrain, tmp_path, capsys):
    checkpoint = pretrain(*options)
    capsys.readouterr()
    assert main(["export", str(checkpoint), str(tmp_path / "out")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_existing_output_is_rejected(pretrain, tmp_path):
    checkpoint = pretrain("--attention", "lln")
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="out already exists"):
        export(checkpoint, tmp_path / "out")


def test_directory_without_usable_tokenizer_is_rejected(pretrain, tmp_path):
    checkpoint = pretrain("--attention", "lln")
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    with pytest.raises(UserError, match="tokenizer has no tokenizer"):
        export(checkpoint, tmp_path / "out", tokenizer=folder)
    (folder / "spm.model").write_bytes(train_sentencepiece(TEXTS * 3, 36))
    with pytest.raises(UserError, match=r"dict\.txt does not fit the sentencepiece tokenizer: it lacks"):
        export(checkpoint, tmp_path / "out", tokenizer=folder)
    assert not (tmp_path / "out").exists()


def test_other_tokenizer_with_the_same_tokens_is_rejected(sources, tmp_path):
    encoder = tmp_path / "encoder"
    convert(sources["bert"][1], encoder, "softmax")
    cased = tmp_path / "cased"
    cased.mkdir()
    content = json.loads((encoder / "tokenizer.json").read_text())
    (cased / "tokenizer.json").write_text(json.dumps(content | {"normalizer": None}))

    with pytest.raises(UserError, match=r"the tokenizer of .*cased is not the one that .*model\.pt was made with"):
        export(encoder / "model.pt", tmp_path / "out", tokenizer=cased)

    export(encoder / "model.pt", tmp_path / "out", tokenizer=encoder)


def test_files_of_killed_run_are_removed(tmp_path):
    out = tmp_path / "out"
    code = f"""
import os, signal
from pathlib import Path
from lln_fairseq.conversion.directory import new_directory
with new_directory(Path({str(out)!r})) as folder:
    (folder / "old").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
    assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1

    with new_directory(out) as folder:
        (folder / "new").touch()

    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == ["out", "out/new"]


def test_second_program_leaves_a_finished_directory_alone(tmp_path, monkeypatch):
    """The second program starts at the worst moment: just before the first one renames its directory."""
    out = tmp_path / "out"
    code = f"""
from pathlib import Path
from lln_fairseq.conversion.directory import new_directory
with new_directory(Path({str(out)!r})):
    pass
"""
    rename = Path.rename
    results = []

    def start_second_program(path, target):
        command = [sys.executable, "-c", code]
        results.append(subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", start_second_program)

    with new_directory(out) as folder:
        (folder / "new").touch()

    assert "belongs to a conversion that is running" in results[0].stderr
    assert [path.name for path in out.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [out]


def make_checkpoint(folder, dictionary, files):
    """Save a small masked language model with this content of dict.txt and these files of a tokenizer."""
    folder.mkdir()
    (folder / "dict.txt").write_text(dictionary, encoding="utf-8")
    for name, content in files.items():
        (folder / name).write_bytes(content)
    sizes = {"encoder_layers": 1, "encoder_embed_dim": 16, "encoder_ffn_embed_dim": 16, "encoder_attention_heads": 2}
    encoder = ImportedEncoder({}, {**sizes, "max_positions": 64, "attention": "softmax"}, [], files)
    torch.save(build_checkpoint(encoder, folder), folder / "model.pt")
    return folder / "model.pt"


UNKNOWN_TEXTS = ["film É is and É", "Éva saw 東京 and 京都", "東 京 東京", "the\u00a0É film", "É\u00a0東京"]


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_exported_tokenizer_gives_ids_of_fairseq_preprocess(model_type, tmp_path):
    """Text without a piece has a symbol of its own in dict.txt, and a piece that dict.txt lacks is <unk>."""
    known_texts = ["the film holds", "a film is a story"]
    size = 30 if model_type == "bpe" else 20
    tokenizer = SentencePieceTokenizer(train_sentencepiece([*known_texts, "qx qx"] * 3, size, model_type))
    lines = [*known_texts, *UNKNOWN_TEXTS]
    fairseq_dictionary(tokenizer, lines, tmp_path / "dict.txt")
    checkpoint = make_checkpoint(tmp_path / "in", (tmp_path / "dict.txt").read_text(encoding="utf-8"), tokenizer.files)

    messages = export(checkpoint, tmp_path / "out")

    assert "symbols, such as" in messages[0]
    assert messages[0].endswith("they become <unk>, as in fairseq")
    model = load(checkpoint)
    exported = AutoTokenizer.from_pretrained(tmp_path / "out")
    exported_model = AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    size = len(model.task.source_dictionary)
    texts = [*lines, "京東 É東 東京東", "a qx film", "x q"]
    for text, expected in zip(texts, model.ids.encode_rows([(text,) for text in texts]), strict=True):
        tokens = torch.tensor(exported(text)["input_ids"])
        assert torch.where(tokens < size, tokens, 3).tolist() == expected.tolist(), text
        assert (tokens < size).all() or "q" in text
        logits = hugging_face_logits(exported_model, tokens[None])
        torch.testing.assert_close(logits[..., :size], model.model(expected[None])[0], rtol=1e-4, atol=1e-5)
        assert (logits[..., size:] < -50).all()


def test_special_symbols_in_dictionary_keep_their_ids(tmp_path):
    """As CamemBERT's dict.txt, which lists <unk>, <s> and </s> again."""
    tokenizer = SentencePieceTokenizer(train_sentencepiece(TEXTS * 3, 36))
    overwritten = "".join(f"{symbol} 999 #fairseq:overwrite\n" for symbol in ("<unk>", "<s>", "</s>"))
    checkpoint = make_checkpoint(tmp_path / "in", overwritten + new_vocabulary(tokenizer).dictionary, tokenizer.files)

    export(checkpoint, tmp_path / "out")

    exported = AutoTokenizer.from_pretrained(tmp_path / "out")
    texts = [*TEXTS[:3], "É東"]
    for text, expected in zip(texts, load(checkpoint).ids.encode_rows([(text,) for text in texts]), strict=True):
        assert exported(text)["input_ids"] == expected.tolist()
        assert (expected[0], expected[-1]) == (0, 2)
    assert exported(TEXTS[0], TEXTS[2])["input_ids"].count(2) == 3
    assert (exported.unk_token_id, exported.pad_token_id) == (3, 1)


def test_tokenizer_that_would_give_other_ids_is_rejected(tmp_path, capsys):
    """tiktoken merges "ab" and "c", since "abc" is a token, but the pair is none of vocab.bpe."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = [chr(code) for code in printable] + [chr(256 + code) for code in range(256 - len(printable))]
    merges = [("a", "b"), ("b", "c"), ("a", "bc")]
    tokens = [*alphabet, *map("".join, merges)]
    files = {
        "encoder.json": json.dumps({token: number for number, token in enumerate(tokens)}).encode(),
        "vocab.bpe": ("#version\n" + "".join(f"{left} {right}\n" for left, right in merges)).encode(),
    }
    dictionary = new_vocabulary(make_tokenizer("gpt2", files)).dictionary
    checkpoint = make_checkpoint(tmp_path / "in", dictionary, files)

    assert main(["export", str(checkpoint), str(tmp_path / "out")]) == 1

    assert "the tokenizer cannot be exported: AutoTokenizer would give" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
