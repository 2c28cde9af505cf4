"""Hugging Face encoders as checkpoints of this project: the same logits and the same ids."""

import itertools
import json
import shlex
from pathlib import Path

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    BertTokenizerFast,
    CamembertConfig,
    CamembertForMaskedLM,
    CamembertTokenizerFast,
)

from lln_fairseq import load
from lln_fairseq.__main__ import main
from lln_fairseq.checkpoints.reading import PLUGIN_STATE, load_checkpoint_lazily
from lln_fairseq.conversion.convert import convert, finetuning_command
from lln_fairseq.errors import UserError
from lln_fairseq.inference.loading import load_model
from lln_fairseq.models.adapt import POSITIONS
from lln_fairseq.text.tokenizers import train_sentencepiece
from lln_fairseq.text.vocabulary import load_vocabulary
from lln_fairseq.training.recipes import layout_options
from tests.conversion.sources import (
    PIECES,
    ROBERTA_IDS,
    SIZES,
    TEXTS,
    TOKENIZERS,
    compute_logits,
    encode_texts,
    make_model,
    make_model_with_settings,
    rename_tensor,
)
from tests.fairseq_runs import CLASSIFICATION, LLN, train
from tests.text_runs import make_glue

ADDITIONAL = {"additional_special_tokens": ["<ent>", "</ent>"]}


def load_parameters(folder):
    return load_checkpoint_lazily(str(folder / "model.pt"))["model"]


def hugging_face_ids(folder, kind):
    """Return Hugging Face's id for each of fairseq's ids, according to the tokenizer of transformers."""
    tokenizer = TOKENIZERS[kind].from_pretrained(folder)
    special = [tokenizer.cls_token_id, tokenizer.pad_token_id, tokenizer.sep_token_id, tokenizer.unk_token_id]
    ordinary = [number for number in range(len(tokenizer)) if number not in (*special, tokenizer.mask_token_id)]
    return [*special, *ordinary, tokenizer.mask_token_id]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_converted_model_gives_same_logits_for_text(kind, sources, tmp_path):
    model, folder = sources[kind]

    assert convert(folder, tmp_path / "out", "softmax").notes == []

    batch = TOKENIZERS[kind].from_pretrained(folder)(TEXTS[:3], padding=True, return_tensors="pt")
    tokens = encode_texts(tmp_path / "out", TEXTS[:3])
    assert tokens.shape == batch["input_ids"].shape
    real = batch["attention_mask"].bool()
    assert torch.equal(tokens != 1, real)
    with torch.no_grad():
        expected = model(**batch).logits
    actual = compute_logits(tmp_path / "out" / "model.pt", tokens)
    ids = torch.tensor(hugging_face_ids(folder, kind)[: expected.shape[-1]])
    torch.testing.assert_close(actual[real], expected[real][:, ids], rtol=1e-5, atol=1e-5)
    assert expected[real].abs().max() > 1


def test_camembert_gives_same_logits_for_text(tmp_path):
    """Its tokenizer has <s> at 5 and </s> at 6."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "sentencepiece.bpe.model").write_bytes(train_sentencepiece(TEXTS * 3, PIECES, "unigram"))
    tokenizer = CamembertTokenizerFast.from_pretrained(tmp_path / "in")
    assert tokenizer.bos_token_id == 5
    ids = {**ROBERTA_IDS, "bos_token_id": 5, "eos_token_id": 6}
    config = CamembertConfig(vocab_size=len(tokenizer), max_position_embeddings=42, **SIZES, **ids)
    torch.manual_seed(0)
    model = CamembertForMaskedLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "in")

    convert(tmp_path / "in", tmp_path / "out", "softmax")

    batch = tokenizer(TEXTS[:3], padding=True, return_tensors="pt")
    tokens = encode_texts(tmp_path / "out", TEXTS[:3])
    real = batch["attention_mask"].bool()
    assert torch.equal(tokens != 1, real)
    with torch.no_grad():
        expected = model(**batch).logits
    symbols = [5, 1, 6, 3, *(id for id in range(len(tokenizer)) if id not in (5, 1, 6, 3, tokenizer.mask_token_id))]
    actual = compute_logits(tmp_path / "out" / "model.pt", tokens)
    torch.testing.assert_close(actual[real][:, :-1], expected[real][:, symbols], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["roberta", "bert", "xlm-roberta"])
def test_symbol_text_restores_text(kind, sources, tmp_path):
    text = "we saw films but none isn"
    convert(sources[kind][1], tmp_path / "out", "softmax")
    tokenizer = load_vocabulary(str(tmp_path / "out")).tokenizer

    (ids,) = tokenizer.encode_ids([text])
    symbols = [tokenizer.symbols_by_id[number] for number in ids]

    assert "".join(tokenizer.symbol_text(symbol) for symbol in symbols).strip() == text
    assert len(symbols) > 7  # some symbols are parts of words


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_masked_text_gets_ids_of_source(kind, sources, tmp_path):
    """Also white space around <mask> and at the ends of the text, which belongs to tokens of some tokenizers."""
    convert(sources[kind][1], tmp_path / "out", "softmax")
    tokenizer = TOKENIZERS[kind].from_pretrained(sources[kind][1])
    order = hugging_face_ids(sources[kind][1], kind)
    ids = load(tmp_path / "out" / "model.pt").ids

    parts = ["the plot", " the plot ", "", " ", "!", " films", "é", "☃"]
    for left, right in itertools.product(parts, parts):
        expected = tokenizer(left + tokenizer.mask_token + right)["input_ids"]
        assert [order[number] for number in ids.encode_masked(left, right).tolist()] == expected, (left, right)


def test_tokenizer_that_cuts_at_the_left_is_rejected(tmp_path):
    make_model_with_settings("roberta", tmp_path / "in", {"truncation_side": "left"})
    with pytest.raises(UserError, match="the tokenizer cuts long texts at truncation_side left"):
        convert(tmp_path / "in", tmp_path / "out", "softmax")
    assert not (tmp_path / "out").exists()


def test_layout_sets_attention_and_its_options(sources, tmp_path):
    convert(sources["roberta"][1], tmp_path / "out", layout="long_pairs")

    options = load_checkpoint_lazily(str(tmp_path / "out/model.pt"))["cfg"]["model"]
    assert layout_options("long_pairs").items() <= options.items()


def test_layout_that_changes_the_model_is_rejected(sources, tmp_path):
    with pytest.raises(UserError, match="local_global sets rotary and encoder_normalize_before, which trained weights"):
        convert(sources["roberta"][1], tmp_path / "out", layout="local_global")


def test_special_token_in_text_is_unknown(sources, tmp_path):
    convert(sources["bert"][1], tmp_path / "out", "softmax")
    assert 3 in encode_texts(tmp_path / "out", ["the [MASK] plot"])[0]


def test_truncation_and_padding_of_tokenizer_json_are_removed(sources, copy_source, tmp_path):
    folder = copy_source("bert")
    tokenizer = BertTokenizerFast.from_pretrained(folder)
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=4)
    (folder / "tokenizer.json").write_text(tokenizer.backend_tokenizer.to_str())

    convert(folder, tmp_path / "out", "softmax")
    convert(sources["bert"][1], tmp_path / "plain", "softmax")

    assert torch.equal(encode_texts(tmp_path / "out"), encode_texts(tmp_path / "plain"))
    assert encode_texts(tmp_path / "out").shape[1] > 10


@pytest.mark.parametrize("form", ["sharded", "bin", "sharded bin", "half"])
def test_every_form_of_weights_gives_float32_parameters(form, sources, copy_source, tmp_path):
    model, source = sources["roberta"]
    folder = copy_source("roberta")
    (folder / "model.safetensors").unlink()
    tolerance = 0
    if form == "half":
        tolerance = 2e-3
        make_model("roberta", tmp_path / "half").half().save_pretrained(folder)
    elif "sharded" in form:
        model.save_pretrained(folder, safe_serialization="bin" not in form, max_shard_size="20KB")
    else:
        model.save_pretrained(folder, safe_serialization=False)
    has_index = len(list(folder.glob("*.index.json"))) == 1
    assert has_index == ("sharded" in form)

    convert(folder, tmp_path / "out", "softmax")
    convert(source, tmp_path / "whole", "softmax")

    actual = load_parameters(tmp_path / "out")
    for name, expected in load_parameters(tmp_path / "whole").items():
        assert actual[name].dtype == torch.float32
        torch.testing.assert_close(actual[name], expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ["runs/model.pt", "my runs/a=1,b=[2]/{x}/model.pt", "it's $x/model.pt"])
def test_printed_command_is_quoted_for_hydra(name):
    *_, override = shlex.split(finetuning_command(Path(name), 40))
    (parsed,) = OverridesParser.create().parse_overrides([override])
    value = parsed.value()
    assert getattr(value, "text", value) == name


def test_epsilon_of_layer_norms_is_kept(sources, tmp_path):
    convert(sources["bert"][1], tmp_path / "out", "softmax")

    model, _ = load_model(str(tmp_path / "out" / "model.pt"))
    epsilons = [module.eps for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]
    assert epsilons == [1e-12] * (2 * 2 + 2)


def test_model_without_head_gets_new_one(tmp_path, capsys):
    make_model("roberta", tmp_path / "in", headless=True)

    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--attention", "lln"]) == 0

    *notes, command = capsys.readouterr().out.splitlines()
    assert notes[0] == "left out: pooler"
    assert "the pooling of its sentence vectors: mean is used" in notes[1]
    assert "no masked-language-model head" in notes[2]
    assert command.endswith(f"task.max_positions=40 checkpoint.finetune_from_model={tmp_path}/out/model.pt")
    model, _ = load_model(str(tmp_path / "out" / "model.pt"))
    assert model.encoder.lm_head.weight is model.encoder.sentence_encoder.embed_tokens.weight


def test_heads_for_other_tasks_are_left_out(copy_source, tmp_path):
    folder = copy_source("bert")
    tensors = load_file(folder / "model.safetensors")
    for name in ("cls.seq_relationship.bias", "cls.species.weight", "classifier.weight"):
        tensors[name] = torch.zeros(2)
    save_file(tensors, folder / "model.safetensors")

    notes = convert(folder, tmp_path / "out", "softmax").notes
    assert notes == ["left out: classifier, cls.seq_relationship, cls.species"]


def test_untied_head_gives_same_logits(tmp_path):
    model = make_model("roberta", tmp_path / "in", tie_word_embeddings=False)
    convert(tmp_path / "in", tmp_path / "out", "softmax")

    tokens = encode_texts(tmp_path / "out")
    real = tokens != 1
    with torch.no_grad():
        expected = model(tokens, attention_mask=real).logits
    torch.testing.assert_close(compute_logits(tmp_path / "out" / "model.pt", tokens)[real], expected[real])


def test_old_parameter_names_and_other_padding_id(sources, copy_source, tmp_path):
    """Layer norms have TensorFlow's names, the head's bias is stored with its matrix, and <pad> and <unk> swap ids."""
    folder = copy_source("roberta")
    ids = json.loads((folder / "vocab.json").read_text())
    ids |= {"<pad>": 3, "<unk>": 1}
    (folder / "vocab.json").write_text(json.dumps(ids))
    tensors = load_file(folder / "model.safetensors")
    for name in list(tensors):
        if ".LayerNorm." in name:
            rename_tensor(tensors, name, name.replace(".weight", ".gamma").replace(".bias", ".beta"))
    rename_tensor(tensors, "lm_head.bias", "lm_head.decoder.bias")
    for name in ("roberta.embeddings.word_embeddings.weight", "lm_head.decoder.bias"):
        tensors[name] = tensors[name][[0, 3, 2, 1, *range(4, len(ids))]]
    name = "roberta.embeddings.position_embeddings.weight"
    tensors[name] = torch.cat([torch.full((2, 32), 9.0), tensors[name]])  # positions begin after the padding's id
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"pad_token_id": 3, "max_position_embeddings": 44}
    (folder / "config.json").write_text(json.dumps(config))

    convert(folder, tmp_path / "out", "softmax")
    convert(sources["roberta"][1], tmp_path / "plain", "softmax")

    tokens = encode_texts(tmp_path / "plain")
    real = tokens != 1
    actual = compute_logits(tmp_path / "out" / "model.pt", tokens)
    expected = compute_logits(tmp_path / "plain" / "model.pt", tokens)
    torch.testing.assert_close(actual[real], expected[real])


@pytest.mark.parametrize(
    ("positions", "note"),
    [
        (100, "extended to 100 positions by repeating the 40 learned ones"),
        (24, "shortened to 24 positions: the first 24 of 40 learned ones are kept"),
    ],
)
def test_positions_are_changed(positions, note, sources, tmp_path):
    folder = sources["roberta"][1]
    convert(folder, tmp_path / "same", "lln_diag")

    assert convert(folder, tmp_path / "out", "lln_diag", positions).notes[-1] == note

    checkpoint = tmp_path / "out" / "model.pt"
    tokens = encode_texts(tmp_path / "out", TEXTS[:3])[:, :24]
    expected = compute_logits(tmp_path / "same" / "model.pt", tokens)
    assert torch.equal(compute_logits(checkpoint, tokens), expected)
    assert len(load_parameters(tmp_path / "out")[POSITIONS]) == positions + 2
    if positions == 100:
        assert compute_logits(checkpoint, torch.full((1, 100), 5)).shape[1] == 100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"positions": 0}, "--positions must be"),
        ({"heads": 7}, "--heads is for a fairseq checkpoint"),
        ({"dictionary": Path("dict.txt")}, "--dictionary is for a fairseq checkpoint"),
    ],
)
def test_unsuitable_option_is_rejected(options, message, sources, tmp_path):
    with pytest.raises(UserError, match=message):
        convert(sources["roberta"][1], tmp_path / "out", "softmax", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "settings", "as_tokenizer_json", "added"),
    [
        ("bert", {"do_lower_case": False}, True, ()),
        ("bert", {"strip_accents": False}, False, ()),
        ("bert", ADDITIONAL, True, ()),
        ("bert", {"additional_special_tokens": ["[unused0]"]}, False, ()),
        ("roberta", {"add_prefix_space": True}, True, ()),
        ("roberta", {"add_prefix_space": True}, False, ()),
        ("roberta", ADDITIONAL, False, ()),
        ("bert", {"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": False}, True, ()),
        ("xlm-roberta", ADDITIONAL, True, ()),
        ("xlm-roberta", ADDITIONAL, False, ()),
        ("roberta", {}, False, ("<ent>", "</ent>")),
        ("bert", {}, False, ("<ent>", "</ent>")),
    ],
)
def test_tokenizer_gives_same_ids_as_transformers(kind, settings, as_tokenizer_json, added, tmp_path):
    make_model_with_settings(kind, tmp_path / "in", settings, as_tokenizer_json, added)

    convert(tmp_path / "in", tmp_path / "out", "softmax")

    expected_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "in")
    vocabulary = load_vocabulary(str(tmp_path / "out"))
    for text in [*TEXTS[:3], "<ent>the plot</ent> isn't <ent>", "ÉVA the[unused0]plot"]:
        expected = expected_tokenizer(text, add_special_tokens=False)["input_ids"]
        (ids,) = vocabulary.tokenizer.encode_ids([text])
        assert ids == expected, text
        is_unknown = [number == expected_tokenizer.unk_token_id for number in ids]
        assert [row == 3 for row in vocabulary.table[ids]] == is_unknown


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ByT5Tokenizer", "only fast tokenizers can be converted, but transformers has none for ByT5Tokenizer"),
        ("NoTokenizer", "AutoTokenizer cannot load the tokenizer: "),
    ],
)
def test_tokenizer_class_without_fast_tokenizer_is_rejected(name, message, copy_source, tmp_path):
    folder = copy_source("xlm-roberta")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    with pytest.raises(UserError, match=message):
        convert(folder, tmp_path / "out", "softmax")


def test_code_of_tokenizer_is_not_executed(copy_source, tmp_path):
    folder = copy_source("roberta")
    settings = {"tokenizer_class": "Custom", "auto_map": {"AutoTokenizer": ["code.Custom", "code.Custom"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "code.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\n")
    with pytest.raises(UserError, match="AutoTokenizer cannot load the tokenizer: "):
        convert(folder, tmp_path / "out", "softmax")
    assert not (tmp_path / "mark").exists()


@pytest.fixture
def two_tokenizers(sources, copy_source, tmp_path):
    """Convert two BERTs whose tokenizers have the same number of tokens, and prepare a task with the first tokenizer.

    Returns the two converted directories and the data.
    """
    other = copy_source("bert")
    vocabulary = (other / "vocab.txt").read_text(encoding="utf-8")
    (other / "vocab.txt").write_text(vocabulary.replace("\nplot\n", "\nfilm\n"), encoding="utf-8")
    convert(sources["bert"][1], tmp_path / "a", "lln_diag")
    convert(other, tmp_path / "b", "lln_diag")
    assert (tmp_path / "a" / "dict.txt").read_bytes() == (tmp_path / "b" / "dict.txt").read_bytes()
    data = make_glue(tmp_path / "data", "SST-2", tokenizer=tmp_path / "a")
    return tmp_path / "a", tmp_path / "b", data / "SST-2"


def test_other_tokenizer_of_same_size_is_rejected(two_tokenizers, tmp_path, monkeypatch):
    a, b, data = two_tokenizers
    sizes = ("--encoder-ffn-embed-dim", 48, "--layer-norm-eps", 1e-12, "--max-positions", 40, "--max-update", 1)
    options = (*CLASSIFICATION, *LLN, *sizes, "--shorten-method", "truncate", "--num-classes", 2)
    message = "is not the one that .*model.pt was made with, although both have the same symbols"

    with pytest.raises(UserError, match=message):
        train(
            monkeypatch, tmp_path / "log", data, tmp_path / "b-run", *options, "--finetune-from-model", b / "model.pt"
        )
    with pytest.raises(UserError, match=message):
        load(b / "model.pt", tokenizer=a)
    train(monkeypatch, tmp_path / "log", data, tmp_path / "run", *options, "--finetune-from-model", a / "model.pt")
    trained = tmp_path / "run" / "checkpoint_last.pt"
    load(trained).predict(["the plot"])
    with pytest.raises(UserError, match=message.replace("model", "checkpoint_last")):
        load(trained, tokenizer=b)


def test_converted_model_without_fingerprint_is_loaded(two_tokenizers):
    a, b, _ = two_tokenizers
    state = torch.load(b / "model.pt")
    assert len(state["extra_state"][PLUGIN_STATE].pop("tokenizer")) == 64
    torch.save(state, b / "model.pt")
    load(b / "model.pt", tokenizer=a).encode(["the plot"])
