"""Encoders of Hugging Face in our checkpoints: the same logits, the same ids."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, BertTokenizerFast

from lln_fairseq.__main__ import main
from lln_fairseq.checkpoints.reading import load_checkpoint_lazily
from lln_fairseq.conversion.convert import convert
from lln_fairseq.conversion.encoder import EMBEDDING, POSITIONS
from lln_fairseq.data.vocabulary import load_vocabulary
from lln_fairseq.errors import InputError
from lln_fairseq.inference.loading import load_model
from tests.conversion.sources import TEXTS, TOKENIZERS, encoded, logits, make_model, make_model_with_settings, rename
from tests.fairseq_runs import CLASSIFICATION, LLN, binarize, make_classification, train


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_text_gives_the_same_logits(kind, sources, tmp_path):
    model, folder = sources[kind]
    assert convert(folder, tmp_path / "out", "softmax").notes == []
    theirs = TOKENIZERS[kind].from_pretrained(folder)(TEXTS[:3], padding=True, return_tensors="pt")
    tokens = encoded(tmp_path / "out", TEXTS[:3])
    assert tokens.shape == theirs["input_ids"].shape
    with torch.no_grad():
        expected = model(**theirs).logits
    ours = logits(tmp_path / "out", tokens)
    real = theirs["attention_mask"].bool()
    assert torch.equal(tokens != 1, real)
    order = torch.tensor([theirs_of(folder, kind, row) for row in range(expected.shape[-1])])
    torch.testing.assert_close(ours[real], expected[real][:, order], rtol=1e-5, atol=1e-5)
    assert expected[real].abs().max() > 1


def theirs_of(folder, kind, ours):
    """The id of Hugging Face that the row `ours` has, by what the tokenizers say."""
    tokenizer = TOKENIZERS[kind].from_pretrained(folder)
    special = [tokenizer.cls_token_id, tokenizer.pad_token_id, tokenizer.sep_token_id, tokenizer.unk_token_id]
    others = [number for number in range(len(tokenizer)) if number not in (*special, tokenizer.mask_token_id)]
    return [*special, *others, tokenizer.mask_token_id][ours]


@pytest.mark.parametrize("kind", ["roberta", "bert", "xlm-roberta"])
def test_a_symbol_has_the_text_that_it_stands_for(kind, sources, tmp_path):
    convert(sources[kind][1], tmp_path / "out", "softmax")
    vocabulary, text = load_vocabulary(str(tmp_path / "out")), "we saw films but none isn"
    (ids,) = vocabulary.tokenizer.encode_ids([text])
    symbols = [vocabulary.tokenizer.symbols_by_id[number] for number in ids]
    assert "".join(map(vocabulary.tokenizer.symbol_text, symbols)).strip() == text
    assert len(symbols) > 7  # of parts of words too


def test_special_tokens_that_a_text_spells_are_unknown(sources, tmp_path):
    convert(sources["bert"][1], tmp_path / "out", "softmax")
    assert 3 in encoded(tmp_path / "out", ["the [MASK] plot"])[0]


def test_an_existing_tokenizer_json_without_truncation_or_padding(sources, copy, tmp_path):
    folder = copy("bert")
    tokenizer = BertTokenizerFast.from_pretrained(folder)
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=4)
    (folder / "tokenizer.json").write_text(tokenizer.backend_tokenizer.to_str())
    convert(folder, tmp_path / "out", "softmax")
    convert(sources["bert"][1], tmp_path / "plain", "softmax")
    assert torch.equal(encoded(tmp_path / "out"), encoded(tmp_path / "plain"))
    assert encoded(tmp_path / "out").shape[1] > 10


@pytest.mark.parametrize("form", ["sharded", "bin", "sharded bin", "half"])
def test_forms_of_the_weights(form, sources, copy, tmp_path):
    model, whole = sources["roberta"]
    folder = copy("roberta")
    (folder / "model.safetensors").unlink()
    if form == "half":
        model = make_model("roberta", tmp_path / "half").half()
        model.save_pretrained(folder)
    else:
        size = {"max_shard_size": "20KB"} if "sharded" in form else {}
        model.save_pretrained(folder, safe_serialization="bin" not in form, **size)
    assert (len(list(folder.glob("*.index.json"))) == 1) == ("sharded" in form)
    convert(folder, tmp_path / "out", "softmax")
    convert(whole, tmp_path / "whole", "softmax")
    ours, expected = (load_checkpoint_lazily(str(tmp_path / name / "model.pt"))["model"] for name in ("out", "whole"))
    for name, value in expected.items():
        assert ours[name].dtype == torch.float32
        torch.testing.assert_close(ours[name], value, rtol=0, atol=2e-3 if form == "half" else 0)


def test_the_type_of_tokens_goes_into_the_positions_and_epsilon_is_kept(sources, tmp_path):
    model, folder = sources["bert"]
    convert(folder, tmp_path / "out", "softmax")
    state = load_checkpoint_lazily(str(tmp_path / "out" / "model.pt"))
    embeddings = model.bert.embeddings
    table = embeddings.position_embeddings.weight + embeddings.token_type_embeddings.weight[0]
    assert torch.equal(state["model"][POSITIONS][2:], table)
    ours, _ = load_model(str(tmp_path / "out" / "model.pt"))
    norms = [module.eps for module in ours.modules() if isinstance(module, torch.nn.LayerNorm)]
    assert norms == [1e-12] * (2 * 2 + 2)


def test_a_model_without_a_head_says_so(tmp_path, capsys):
    make_model("roberta", tmp_path / "in", headless=True)
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--attention", "lln"]) == 0
    *said, overrides = capsys.readouterr().out.splitlines()
    assert said[:2] == ["left out: pooler", "no masked LM's head in the source: a new one, untrained"]
    assert f"checkpoint.finetune_from_model={tmp_path}/out/model.pt attention=lln " in overrides
    assert "model.encoder_embed_dim=32 model.encoder_ffn_embed_dim=48 model.encoder_attention_heads=2" in overrides
    model, _ = load_model(str(tmp_path / "out" / "model.pt"))
    assert model.encoder.lm_head.weight is model.encoder.sentence_encoder.embed_tokens.weight


def test_heads_for_other_tasks_are_left_out(copy, tmp_path):
    folder = copy("bert")
    tensors = load_file(folder / "model.safetensors")
    extra = dict.fromkeys(("cls.seq_relationship.bias", "cls.species.weight", "classifier.weight"), torch.zeros(2))
    save_file(tensors | {name: value.clone() for name, value in extra.items()}, folder / "model.safetensors")
    assert convert(folder, tmp_path / "out", "softmax").notes == [
        "left out: classifier, cls.seq_relationship, cls.species"
    ]


def test_an_untied_head(tmp_path):
    model = make_model("roberta", tmp_path / "in", tie_word_embeddings=False)
    convert(tmp_path / "in", tmp_path / "out", "softmax")
    tokens = encoded(tmp_path / "out")
    with torch.no_grad():
        expected = model(tokens, attention_mask=(tokens != 1)).logits
    torch.testing.assert_close(logits(tmp_path / "out", tokens)[tokens != 1], expected[tokens != 1])


def test_old_names_and_another_id_of_padding(sources, copy, tmp_path):
    """TensorFlow's layer norms, a head's bias beside its matrix, and positions that begin after another id."""
    folder = copy("roberta")
    tokens = json.loads((folder / "vocab.json").read_text())
    tokens |= {"<pad>": 3, "<unk>": 1}
    (folder / "vocab.json").write_text(json.dumps(tokens))
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".LayerNorm." in name]:
        rename(tensors, name, name.replace(".weight", ".gamma").replace(".bias", ".beta"))
    rename(tensors, "lm_head.bias", "lm_head.decoder.bias")
    for name in ("roberta.embeddings.word_embeddings.weight", "lm_head.decoder.bias"):
        tensors[name] = tensors[name][[0, 3, 2, 1, *range(4, len(tokens))]]
    name = "roberta.embeddings.position_embeddings.weight"
    tensors[name] = torch.cat([torch.full((2, 32), 9.0), tensors[name]])
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"pad_token_id": 3, "max_position_embeddings": 44}
    (folder / "config.json").write_text(json.dumps(config))
    convert(folder, tmp_path / "out", "softmax")
    convert(sources["roberta"][1], tmp_path / "plain", "softmax")
    tokens = encoded(tmp_path / "plain")
    real = tokens != 1
    a, b = (logits(tmp_path / name, tokens)[real] for name in ("out", "plain"))
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("positions", "how"), [(100, "repeats"), (24, "cut from")])
def test_other_lengths(positions, how, sources, tmp_path):
    folder = sources["roberta"][1]
    convert(folder, tmp_path / "same", "lln_diag")
    said = convert(folder, tmp_path / "out", "lln_diag", positions).notes
    assert said[-1] == f"{positions} positions, {how} the 40 that were learned"
    tokens = encoded(tmp_path / "out", TEXTS[:3])[:, :24]
    ours, expected = logits(tmp_path / "out", tokens), logits(tmp_path / "same", tokens)
    assert torch.equal(ours, expected)
    assert len(load_checkpoint_lazily(str(tmp_path / "out" / "model.pt"))["model"][POSITIONS]) == positions + 2
    if positions == 100:
        assert logits(tmp_path / "out", torch.full((1, 100), 5)).shape[1] == 100


@pytest.mark.parametrize("options", [{"positions": 0}, {"heads": 7}, {"dictionary": Path("dict.txt")}])
def test_options_that_do_not_fit_a_directory_are_refused(options, sources, tmp_path):
    with pytest.raises(InputError, match=f"--{next(iter(options))} is"):
        convert(sources["roberta"][1], tmp_path / "out", "softmax", **options)
    assert list(tmp_path.iterdir()) == []


def test_fine_tuning_goes_on_from_it(sources, tmp_path, monkeypatch):
    convert(sources["roberta"][1], tmp_path / "out", "lln_diag")
    data = make_classification(tmp_path / "data")
    dictionary = tmp_path / "out" / "dict.txt"
    (data / "input0" / "dict.txt").write_bytes(dictionary.read_bytes())
    for split, rows in (("train", 60), ("valid", 11)):
        binarize([f"{10 + row} {30 + row} 7" for row in range(rows)], dictionary, data / "input0" / split)
    options = (*CLASSIFICATION, *LLN, "--attention", "lln_diag", "--lr", 0, "--encoder-ffn-embed-dim", 48,
               "--layer-norm-eps", 1e-12, "--finetune-from-model", tmp_path / "out" / "model.pt")  # fmt: skip
    train(monkeypatch, tmp_path / "log", data, tmp_path / "run", *options)
    after = load_checkpoint_lazily(str(tmp_path / "run" / "checkpoint_last.pt"))["model"]
    before = load_checkpoint_lazily(str(tmp_path / "out" / "model.pt"))["model"]
    assert torch.equal(after[EMBEDDING], before[EMBEDDING])


ADDITIONAL = {"additional_special_tokens": ["<ent>", "</ent>"]}


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
        ("roberta", {}, False, ("<ent>", "</ent>")),
        ("bert", {}, False, ("<ent>", "</ent>")),
    ],
)
def test_tokenizer_is_read_as_transformers_reads_it(kind, settings, as_tokenizer_json, added, tmp_path):
    make_model_with_settings(kind, tmp_path / "in", settings, as_tokenizer_json, added)
    convert(tmp_path / "in", tmp_path / "out", "softmax")
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path / "in"), load_vocabulary(str(tmp_path / "out"))
    for text in [*TEXTS[:3], "<ent>the plot</ent> isn't <ent>", "ÉVA the[unused0]plot"]:
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        (ids,) = ours.tokenizer.encode_ids([text])
        assert ids == expected, text
        assert [row == 3 for row in ours.table[ids]] == [number == theirs.unk_token_id for number in ids]


def test_added_tokens_that_a_sentencepiece_model_lacks_and_unknown_classes_are_refused(tmp_path):
    make_model_with_settings("xlm-roberta", tmp_path / "in", ADDITIONAL, as_tokenizer_json=False)
    with pytest.raises(InputError, match=r"sentencepiece.bpe.model lacks the added token '<ent>': save it with a"):
        convert(tmp_path / "in", tmp_path / "out", "softmax")
    (tmp_path / "in" / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PhobertTokenizer"}))
    with pytest.raises(InputError, match=r"its tokenizer is a PhobertTokenizer, and may be one of BertTokenizer"):
        convert(tmp_path / "in", tmp_path / "out", "softmax")
