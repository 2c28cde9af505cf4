"""Hugging Face directories that cannot be converted: one line of error, and no output."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

from lln_fairseq import load
from lln_fairseq.__main__ import main
from lln_fairseq.conversion import tokenizer_json
from lln_fairseq.conversion.convert import convert
from lln_fairseq.errors import UserError
from lln_fairseq.inference.loading import load_model
from tests.helpers import Payload

DENSE_BIAS = "roberta.encoder.layer.1.intermediate.dense.bias"


def change_directory(folder, change):
    """Call change(config, tensors, folder) and save the configuration and the tensors that it changed."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(config, tensors, folder)
    (folder / "config.json").write_text(json.dumps(config))
    if (folder / "model.safetensors").exists():
        save_file(tensors, folder / "model.safetensors")


def save_pickle_with_code(config, tensors, folder):
    (folder / "model.safetensors").unlink()
    torch.save({"a": Payload()}, folder / "pytorch_model.bin")


def remove_tokenizer(config, tensors, folder):
    (folder / "vocab.json").unlink()
    (folder / "merges.txt").unlink()


def add_token(folder, token, number):
    ids = json.loads((folder / "vocab.json").read_text())
    (folder / "vocab.json").write_text(json.dumps(ids | {token: number}))


def save_tokenizer_without_mask(config, tensors, folder):
    ids = json.loads((folder / "vocab.json").read_text())
    del ids["<mask>"]
    content = tokenizer_json.byte_level_bpe(ids, merges=[])
    (folder / "tokenizer.json").write_bytes(tokenizer_json.as_bytes(content))
    # RobertaTokenizer would add <mask>.
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


# For each case: a change of (config, tensors, folder), and a regular expression for the error.
BAD_DIRECTORIES = {
    "no weights": (
        lambda config, tensors, folder: (folder / "model.safetensors").unlink(),
        "holds no weights: it needs model.safetensors or",
    ),
    "a decoder": (
        lambda config, tensors, folder: config.update(is_decoder=True),
        "is_decoder is True",
    ),
    "positions": (
        lambda config, tensors, folder: config.update(position_embedding_type="relative_key"),
        "position_embedding_type must be absolute, got relative_key",
    ),
    "activation": (
        lambda config, tensors, folder: config.update(hidden_act="silu"),
        "hidden_act must be gelu or gelu_python or gelu_new or gelu_fast or gelu_pytorch_tanh or relu, got silu",
    ),
    "activation of the head": (
        lambda config, tensors, folder: config.update(hidden_act="relu"),
        "hidden_act must be gelu, as in the language-model head of a RoBERTa, got relu",
    ),
    "layers": (
        lambda config, tensors, folder: config.update(num_hidden_layers=10**9),
        "the sizes in config.json make 7168000011104 parameters, more than the files hold",
    ),
    "heads": (
        lambda config, tensors, folder: config.update(num_attention_heads=5),
        r"hidden size \(32\) is not a multiple of the number of attention heads \(5\)",
    ),
    "shape": (
        lambda config, tensors, folder: tensors.update({DENSE_BIAS: torch.zeros(7)}),
        r"encoder.layer.1.intermediate.dense.bias must have the shape \(48,\) according to config.json",
    ),
    "integers": (
        lambda config, tensors, folder: tensors.update({DENSE_BIAS: tensors[DENSE_BIAS].to(torch.uint8)}),
        "encoder.layer.1.intermediate.dense.bias is of dtype uint8",
    ),
    "NaN": (
        lambda config, tensors, folder: tensors[DENSE_BIAS].fill_(torch.nan),
        "layer.1.intermediate.dense.bias has NaN or infinite",
    ),
    "missing": (
        lambda config, tensors, folder: tensors.pop(DENSE_BIAS),
        "lacks encoder.layer.1.intermediate.dense.bias",
    ),
    "unknown": (
        lambda config, tensors, folder: tensors.update({"roberta.encoder.layer.0.adapter": torch.ones(2)}),
        "is not a RoBERTa or BERT: unexpected parameters encoder.layer.0.adapter",
    ),
    "no tokenizer": (remove_tokenizer, "has no tokenizer"),
    "no merges": (
        lambda config, tensors, folder: (folder / "merges.txt").unlink(),
        "has no tokenizer: it needs tokenizer.json or .* or vocab.json with merges.txt",
    ),
    "other merges": (
        lambda config, tensors, folder: (folder / "merges.txt").write_text("#version: 0.2\nq xq\n"),
        "AutoTokenizer cannot load the tokenizer: .*`xq` out of vocabulary",
    ),
    "too many tokens": (
        lambda config, tensors, folder: add_token(folder, "zebra", 9999),
        "the token 'zebra' with id 9999, but the embedding has",
    ),
    "another tokenizer": (
        lambda config, tensors, folder: (folder / "vocab.json").rename(folder / "vocab.txt"),
        "AutoTokenizer cannot load the tokenizer|hold no tokens that a RobertaTokenizer can read",
    ),
    "padding": (
        lambda config, tensors, folder: config.update(pad_token_id=0),
        "pad_token_id in config.json must be 1, the tokenizer's padding, got 0",
    ),
    "no mask": (
        save_tokenizer_without_mask,
        "the tokenizer has no <mask> or",
    ),
    "pickle": (save_pickle_with_code, "it wants to call print"),
}


@pytest.mark.parametrize("name", BAD_DIRECTORIES)
def test_bad_directory_is_reported_in_one_line(name, copy_source, tmp_path, capfd):
    change, message = BAD_DIRECTORIES[name]
    folder = copy_source("roberta")
    change_directory(folder, change)
    files_before = sorted(tmp_path.iterdir())

    assert main(["convert", str(folder), str(tmp_path / "out")]) == 1

    printed = capfd.readouterr()
    assert re.search(message, printed.err), printed.err
    assert printed.err.count("\n") == 1
    assert "executed" not in printed.out
    assert sorted(tmp_path.iterdir()) == files_before


@pytest.mark.parametrize("damage", ["half", "noise", "nothing"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "vocab.json", "pytorch_model.bin", "index"])
def test_damaged_file_is_rejected(name, damage, sources, copy_source, tmp_path):
    folder = copy_source("roberta")
    model, _ = sources["roberta"]
    if name == "index":
        name = "model.safetensors.index.json"
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder, max_shard_size="20KB")
    elif name == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
        torch.save(model.state_dict(), folder / name)
    data = (folder / name).read_bytes()
    noise = torch.randint(256, (len(data),), generator=torch.Generator().manual_seed(0))
    damaged = {"half": data[: len(data) // 2], "noise": bytes(noise.tolist()), "nothing": b""}
    (folder / name).write_bytes(damaged[damage])

    reasons = f"{name} (is damaged|cannot be read)|cannot load .*{name}, which is damaged"
    if name == "vocab.json":
        reasons = "AutoTokenizer cannot load the tokenizer"
    with pytest.raises(UserError, match=reasons):
        convert(folder, tmp_path / "out", "softmax")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("is_safe", [True, False])
def test_missing_shard_is_named(is_safe, sources, copy_source, tmp_path):
    folder = copy_source("roberta")
    model, _ = sources["roberta"]
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, safe_serialization=is_safe, max_shard_size="20KB")
    shard = sorted(folder.glob("*-00001-of-*"))[0]
    shard.unlink()

    with pytest.raises(UserError, match=f"No such file or directory: .*{shard.name}"):
        convert(folder, tmp_path / "out", "softmax")


# For each case: the parts of a post-processor for single texts and for pairs, and the tokens that are refused.
SINGLE = "[CLS] $A [SEP]"
BAD_POST_PROCESSORS = {
    "none": (None, None, "'A new text.' the tokens a new t"),
    "no [CLS]": (
        "$A [SEP]",
        "$A [SEP] $B:1 [SEP]:1",
        r"'A new text.' the tokens a new .* \[SEP\], but .* \[CLS\] a new",
    ),
    "no [SEP] in pairs": (
        SINGLE,
        "[CLS] $A $B:1 [SEP]:1",
        r"'A new text.' and 'A new text.' .* get .* \. \[SEP\] \[SEP\] a ",
    ),
}


@pytest.mark.parametrize("name", BAD_POST_PROCESSORS)
def test_tokenizer_with_other_special_tokens_is_rejected(name, copy_source, tmp_path, capsys):
    single, pair, message = BAD_POST_PROCESSORS[name]
    folder = copy_source("bert")
    library = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    content = json.loads(library.to_str())
    content["post_processor"] = None
    library = Tokenizer.from_str(json.dumps(content))
    if single is not None:
        special = [(token, library.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
        library.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
    library.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))

    assert main(["convert", str(folder), str(tmp_path / "out")]) == 1

    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error), error
    assert "correct the post_processor in tokenizer.json" in error


@pytest.mark.parametrize("model_type", ["modernbert", "data2vec-text", None])
def test_model_of_another_type_is_rejected_in_a_line_with_those_that_are_read(model_type, tmp_path, capsys):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "config.json").write_text(json.dumps({"model_type": model_type}))

    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out")]) == 1

    error = capsys.readouterr().err
    assert error.count("\n") == 1
    types = "roberta or xlm-roberta or camembert or bert or distilbert or lln_roberta"
    assert f"config.json: model_type must be {types}, got {model_type}\n" in error


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "in is not a Hugging Face directory: it has no config.json\n"),
        (
            {"model.pt": "x"},
            "it has no config.json. To convert a fairseq checkpoint, name the file, such as .*/model.pt\n",
        ),
        ({"adapter_config.json": "{}", "adapter_model.safetensors": ""}, "in holds only an adapter .*: merge it"),
        ({"adapter_config.json": "{}", "model.safetensors": ""}, "in holds weights and an adapter .*: delete the"),
    ],
)
def test_incomplete_directory_is_reported_in_one_line(files, message, tmp_path, capsys):
    (tmp_path / "in").mkdir()
    for name, content in files.items():
        (tmp_path / "in" / name).write_text(content)
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error)


def test_directory_with_a_colon_is_an_error(sources, tmp_path):
    """fairseq would take it for two directories."""
    message = "a:b contains ':', which separates directories in fairseq: rename it"
    with pytest.raises(UserError, match=message):
        convert(sources["bert"][1], tmp_path / "a:b")
    convert(sources["bert"][1], tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "a:b")
    for load_converted in (load, load_model):
        with pytest.raises(UserError, match=message):
            load_converted(str(tmp_path / "a:b/model.pt"))


def test_full_disk_leaves_no_output(sources, tmp_path, monkeypatch, capsys):
    def fail(state, path):
        path.write_bytes(b"half")
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")

    monkeypatch.setattr(torch, "save", fail)

    assert main(["convert", str(sources["bert"][1]), str(tmp_path / "out")]) == 1

    error = capsys.readouterr().err
    assert error.startswith("error: cannot write model.pt: [enforce fail")
    assert "MB free" in error
    assert list(tmp_path.iterdir()) == []
