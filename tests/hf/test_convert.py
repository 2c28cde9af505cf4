"""Encoders of Hugging Face and fairseq in our checkpoints: the same logits, the same ids, bad input in one line."""

import argparse
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, BertTokenizerFast, RobertaTokenizerFast, XLMRobertaTokenizer

from data_prep.vocabulary import load_vocabulary
from lln_fairseq.convert import convert, main
from lln_fairseq.hf.encoder import EMBEDDING, POSITIONS
from lln_fairseq.host.checkpoints import peek
from lln_fairseq.host.errors import InputError
from lln_fairseq.loading import load_model
from tests.fairseq_runs import CLASSIFICATION, LLN, MASKED_LM, binarize, make_classification, make_corpus, train
from tests.hf.sources import TEXTS, make_model

TOKENIZERS = {"roberta": RobertaTokenizerFast, "bert": BertTokenizerFast, "xlm-roberta": XLMRobertaTokenizer}
KINDS = list(TOKENIZERS)
NEW_HEAD = "no masked LM's head in the source: a new one, untrained"


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """kind -> (model of Hugging Face, its directory)."""
    folder = tmp_path_factory.mktemp("sources")
    return {kind: (make_model(kind, folder / kind), folder / kind) for kind in KINDS}


@pytest.fixture
def copy(sources, tmp_path):
    """A function that copies a source's directory, for a test to damage."""

    def copy_of(kind):
        folder = tmp_path / "copy"
        folder.mkdir()
        for file in sources[kind][1].iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        return folder

    return copy_of


def encoded(folder, texts=TEXTS):
    """(B, N) ids as data_prep and our tasks make them, padded."""
    vocabulary = load_vocabulary(str(folder))
    rows = [torch.tensor([0, *vocabulary.table[ids], 2]) for ids in vocabulary.tokenizer.encode_ids(texts)]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=1)


def logits(folder, tokens):
    model, _ = load_model(str(folder / "model.pt"))
    with torch.no_grad():
        return model(tokens)[0]


@pytest.mark.parametrize("kind", KINDS)
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
    torch.testing.assert_close(ours[real], expected[real][:, order], rtol=1e-5, atol=2e-5)
    assert expected[real].abs().max() > 1


def theirs_of(folder, kind, ours):
    """The id of Hugging Face that the row `ours` has, by what the tokenizers say."""
    tokenizer = TOKENIZERS[kind].from_pretrained(folder)
    special = [tokenizer.cls_token_id, tokenizer.pad_token_id, tokenizer.sep_token_id, tokenizer.unk_token_id]
    others = [number for number in range(len(tokenizer)) if number not in (*special, tokenizer.mask_token_id)]
    return [*special, *others, tokenizer.mask_token_id][ours]


@pytest.mark.parametrize("kind", KINDS)
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
    ours, expected = (peek(str(tmp_path / name / "model.pt"))["model"] for name in ("out", "whole"))
    for name, value in expected.items():
        assert ours[name].dtype == torch.float32
        torch.testing.assert_close(ours[name], value, rtol=0, atol=2e-3 if form == "half" else 0)


def test_the_type_of_tokens_goes_into_the_positions_and_epsilon_is_kept(sources, tmp_path):
    model, folder = sources["bert"]
    convert(folder, tmp_path / "out", "softmax")
    state = peek(str(tmp_path / "out" / "model.pt"))
    embeddings = model.bert.embeddings
    table = embeddings.position_embeddings.weight + embeddings.token_type_embeddings.weight[0]
    assert torch.equal(state["model"][POSITIONS][2:], table)
    ours, _ = load_model(str(tmp_path / "out" / "model.pt"))
    norms = [module.eps for module in ours.modules() if isinstance(module, torch.nn.LayerNorm)]
    assert norms == [1e-12] * (2 * 2 + 2)


def test_a_model_without_a_head_says_so(tmp_path, capsys):
    make_model("roberta", tmp_path / "in", headless=True)
    assert main([str(tmp_path / "in"), str(tmp_path / "out"), "--attention", "lln"]) == 0
    *said, last = capsys.readouterr().out.splitlines()
    assert said == ["left out: pooler", NEW_HEAD, f"{tmp_path}/out/model.pt is written; to fine-tune it:"]
    assert last == (f"checkpoint.finetune_from_model={tmp_path}/out/model.pt attention=lln model.encoder_layers=2 "
                    "model.encoder_embed_dim=32 model.encoder_ffn_embed_dim=48 model.encoder_attention_heads=2 "
                    "model.layer_norm_eps=1e-12")  # fmt: skip
    model, _ = load_model(str(tmp_path / "out" / "model.pt"))
    assert model.encoder.lm_head.weight is model.encoder.sentence_encoder.embed_tokens.weight


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


@pytest.mark.parametrize("attention", ["softmax", "lln_diag"])
@pytest.mark.parametrize(("positions", "how"), [(100, "repeats"), (24, "cut from")])
def test_other_lengths(positions, how, attention, sources, tmp_path):
    folder = sources["roberta"][1]
    convert(folder, tmp_path / "same", attention)
    said = convert(folder, tmp_path / "out", attention, positions).notes
    assert said[-1] == f"{positions} positions, {how} the 40 that were learned"
    tokens = encoded(tmp_path / "out", TEXTS[:3])[:, :24]
    ours, expected = logits(tmp_path / "out", tokens), logits(tmp_path / "same", tokens)
    assert torch.equal(ours, expected)
    assert len(peek(str(tmp_path / "out" / "model.pt"))["model"][POSITIONS]) == positions + 2
    if positions == 100:
        assert logits(tmp_path / "out", torch.full((1, 100), 5)).shape[1] == 100


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
    after = peek(str(tmp_path / "run" / "checkpoint_last.pt"))["model"]
    before = peek(str(tmp_path / "out" / "model.pt"))["model"]
    assert torch.equal(after[EMBEDDING], before[EMBEDDING])


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
    options = peek(str(tmp_path / "out" / "model.pt"))["cfg"]["model"]
    assert options["attention"] == "lln_diag"
    assert options["encoder_layers"] == 2


def damaged(change):
    def write(folder):
        config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        change(config, tensors, folder)
        (folder / "config.json").write_text(json.dumps(config))
        if (folder / "model.safetensors").exists():
            save_file(tensors, folder / "model.safetensors")

    return write


def rename(tensors, name, new):
    tensors[new] = tensors.pop(name)


KEY = "roberta.encoder.layer.1.intermediate.dense"


class Payload:
    def __reduce__(self):
        return (print, ("executed",))


def pickled(config, tensors, folder):
    (folder / "model.safetensors").unlink()
    torch.save({"a": Payload()}, folder / "pytorch_model.bin")


BAD = {
    "no weights": (lambda c, t, f: (f / "model.safetensors").unlink(), "holds no weights: neither model.safetensors"),
    "no config": (lambda c, t, f: c.clear(), "this is a model of no known type, and may be roberta"),
    "another type": (lambda c, t, f: c.update(model_type="gpt2"), "this is a gpt2, and may be roberta, xlm-roberta"),
    "a decoder": (lambda c, t, f: c.update(is_decoder=True), "is_decoder is True"),
    "positions": (lambda c, t, f: c.update(position_embedding_type="relative_key"), "its positions are relative_key"),
    "activation": (lambda c, t, f: c.update(hidden_act="silu"), "its activation is silu"),
    "layers": (lambda c, t, f: c.update(num_hidden_layers=10**9), "num_hidden_layers is 1000000000, but it holds"),
    "no number": (lambda c, t, f: c.update(hidden_size="x"), "hidden_size is 'x', not a positive number"),
    "heads": (lambda c, t, f: c.update(num_attention_heads=5), "32 is not divisible by 5"),
    "dropout": (lambda c, t, f: c.update(hidden_dropout_prob="x"), "hidden_dropout_prob is 'x', not a number from 0"),
    "epsilon": (lambda c, t, f: c.update(layer_norm_eps=None), "layer_norm_eps is None, not a number from 0 to 1"),
    "shape": (lambda c, t, f: t.update({f"{KEY}.bias": torch.zeros(7)}),
              "encoder.layer.1.intermediate.dense.bias is 7, and config.json says 48"),
    "missing": (lambda c, t, f: t.pop(f"{KEY}.bias"), "lacks encoder.layer.1.intermediate.dense.bias"),
    "unknown": (lambda c, t, f: rename(t, f"{KEY}.bias", "adapter.x") or t.update({f"{KEY}.bias": torch.zeros(48)}),
                "has what no RoBERTa or BERT has: adapter.x"),
    "no tokenizer": (lambda c, t, f: [(f / name).unlink() for name in ("vocab.json", "merges.txt")],
                     "has no tokenizer"),
    "no merges": (lambda c, t, f: (f / "merges.txt").unlink(), "vocab.json without merges.txt"),
    "damaged tokenizer": (lambda c, t, f: (f / "vocab.json").write_text("[]"), "vocab.json cannot be read"),
    "too many tokens": (lambda c, t, f: add_token(f, "zebra", 9999), "the token 'zebra' with id 9999, but the embedd"),
    "negative token": (lambda c, t, f: add_token(f, "zebra", -1), "the token 'zebra' with id -1, but the embedding"),
    "one id twice": (lambda c, t, f: add_token(f, "<s>", 2), r"special tokens with the same id: \[2, 1, 2"),
    "two tokenizers": (lambda c, t, f: (f / "vocab.txt").write_text("<pad>\n"), "'<pad>' is 1 in vocab.json and 0 in"),
    "padding": (lambda c, t, f: c.update(pad_token_id=0), "padding is 1 to the tokenizer, and 0 in config.json"),
    "no mask": (lambda c, t, f: remove_token(f, "<mask>"), "the tokenizer has no <mask> or"),
    "pickle": (pickled, "it wants to call print, which no checkpoint may"),
}  # fmt: skip


def add_token(folder, token, number):
    ids = json.loads((folder / "vocab.json").read_text())
    (folder / "vocab.json").write_text(json.dumps(ids | {token: number}))


def remove_token(folder, token):
    ids = json.loads((folder / "vocab.json").read_text())
    del ids[token]
    (folder / "vocab.json").write_text(json.dumps(ids))


@pytest.mark.parametrize("name", BAD)
def test_bad_directories_end_in_one_line_and_leave_nothing(name, copy, tmp_path, capfd):
    change, message = BAD[name]
    folder = copy("roberta")
    damaged(change)(folder)
    before = sorted(tmp_path.iterdir())
    assert main([str(folder), str(tmp_path / "out")]) == 1
    said = capfd.readouterr()
    assert said.err.count("\n") == 1
    assert "executed" not in said.out
    with pytest.raises(InputError, match=message):
        convert(folder, tmp_path / "out", "lln_diag")
    assert sorted(tmp_path.iterdir()) == before


def test_damaged_safetensors(copy, tmp_path):
    folder = copy("roberta")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match=r"model\.safetensors is damaged"):
        convert(folder, tmp_path / "out", "softmax")


def test_an_output_that_is_there_is_left_alone(sources, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match="out is there already"):
        convert(sources["bert"][1], tmp_path / "out", "softmax")
    assert list((tmp_path / "out").iterdir()) == []


BAD_CHECKPOINTS = {
    "nothing": (None, "no such checkpoint"),
    "other": (lambda s: {**s, "model": {"x": torch.zeros(1)}}, r"is no RoBERTa, it is a lln_roberta_tiny: it has no"),
    "shape": (lambda s: change(s, "layers.1.fc1.bias", torch.zeros(3)), r"layers.1.fc1.bias is 3, and the others need"),
    "missing": (lambda s: change(s, "layers.1.fc1.bias", None), r"lacks encoder.sentence_encoder.layers.1.fc1.bias"),
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
    (tmp_path / "encoder.json").write_text(json.dumps({"a": 0}))
    with pytest.raises(InputError, match="does not fit the tokenizer beside it: it lacks '0'"):
        convert(source, tmp_path / "out", "softmax")


def test_older_files_of_a_tokenizer_encode_as_transformers_does_from_them(sources, tmp_path):
    convert(sources["roberta"][1], tmp_path / "out", "softmax")
    theirs = AutoTokenizer.from_pretrained(sources["roberta"][1])
    ours = load_vocabulary(str(tmp_path / "out")).tokenizer
    assert ours.encode_ids(TEXTS[:3]) == [theirs(text, add_special_tokens=False)["input_ids"] for text in TEXTS[:3]]
