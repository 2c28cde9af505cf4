"""Directories of Hugging Face that cannot be used: one line, and nothing is left."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from lln_fairseq.__main__ import main
from lln_fairseq.conversion.convert import convert
from lln_fairseq.errors import InputError


def damaged(change):
    def write(folder):
        config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        change(config, tensors, folder)
        (folder / "config.json").write_text(json.dumps(config))
        if (folder / "model.safetensors").exists():
            save_file(tensors, folder / "model.safetensors")

    return write


KEY = "roberta.encoder.layer.1.intermediate.dense"


class Payload:
    def __reduce__(self):
        return (print, ("executed",))


def pickled(config, tensors, folder):
    (folder / "model.safetensors").unlink()
    torch.save({"a": Payload()}, folder / "pytorch_model.bin")


BAD = {
    "no weights": (lambda c, t, f: (f / "model.safetensors").unlink(), "holds no weights: neither model.safetensors"),
    "another type": (lambda c, t, f: c.update(model_type="gpt2"), "this is a gpt2, and may be roberta, xlm-roberta"),
    "a decoder": (lambda c, t, f: c.update(is_decoder=True), "is_decoder is True"),
    "positions": (lambda c, t, f: c.update(position_embedding_type="relative_key"), "its positions are relative_key"),
    "activation": (lambda c, t, f: c.update(hidden_act="silu"), "its activation is silu"),
    "layers": (lambda c, t, f: c.update(num_hidden_layers=10**9), "num_hidden_layers is 1000000000, but it holds"),
    "heads": (lambda c, t, f: c.update(num_attention_heads=5), "32 is not divisible by 5"),
    "shape": (lambda c, t, f: t.update({f"{KEY}.bias": torch.zeros(7)}),
              "encoder.layer.1.intermediate.dense.bias is 7, and config.json says 48"),
    "integers": (lambda c, t, f: t.update({f"{KEY}.bias": t[f"{KEY}.bias"].to(torch.uint8)}),
                 "encoder.layer.1.intermediate.dense.bias is of dtype uint8, and weights must be floating-point"),
    "NaN": (lambda c, t, f: t[f"{KEY}.bias"].fill_(torch.nan), "layer.1.intermediate.dense.bias has NaN or infinite"),
    "missing": (lambda c, t, f: t.pop(f"{KEY}.bias"), "lacks encoder.layer.1.intermediate.dense.bias"),
    "unknown": (lambda c, t, f: t.update({"roberta.encoder.layer.0.adapter": torch.ones(2)}),
                "has what no RoBERTa or BERT has: encoder.layer.0.adapter"),
    "no tokenizer": (lambda c, t, f: [(f / name).unlink() for name in ("vocab.json", "merges.txt")],
                     "has no tokenizer"),
    "no merges": (lambda c, t, f: (f / "merges.txt").unlink(), "vocab.json without merges.txt"),
    "other merges": (lambda c, t, f: (f / "merges.txt").write_text("#version: 0.2\nq xq\n"),
                     "merges.txt does not fit vocab.json, first at 'q xq'"),
    "too many tokens": (lambda c, t, f: add_token(f, "zebra", 9999), "the token 'zebra' with id 9999, but the embedd"),
    "two tokenizers": (lambda c, t, f: (f / "vocab.txt").write_text("<pad>\n"), "'<pad>' is 1 in vocab.json and 0 in"),
    "padding": (lambda c, t, f: c.update(pad_token_id=0), "padding is 1 to the tokenizer, and 0 in config.json"),
    "no mask": (lambda c, t, f: remove_token(f, "<mask>"), "the tokenizer has no <mask> or"),
    "another id": (lambda c, t, f: (f / "added_tokens.json").write_text('{"zebra": 7000}'),
                   "the added token 'zebra' has id 7000, but transformers gives it"),
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
    assert main(["convert", str(folder), str(tmp_path / "out")]) == 1
    said = capfd.readouterr()
    assert re.search(message, said.err), said.err
    assert said.err.count("\n") == 1
    assert "executed" not in said.out
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("damage", ["half", "noise", "nothing"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "vocab.json", "pytorch_model.bin", "index"])
def test_damaged_files(name, damage, sources, copy, tmp_path):
    folder = copy("roberta")
    if name == "index":
        name = "model.safetensors.index.json"
        (folder / "model.safetensors").unlink()
        sources["roberta"][0].save_pretrained(folder, max_shard_size="20KB")
    elif name == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
        torch.save(sources["roberta"][0].state_dict(), folder / name)
    data = (folder / name).read_bytes()
    noise = bytes(torch.randint(256, (len(data),), generator=torch.Generator().manual_seed(0)).tolist())
    (folder / name).write_bytes({"half": data[: len(data) // 2], "noise": noise, "nothing": b""}[damage])
    with pytest.raises(InputError, match=f"{name} (is damaged|cannot be read)|cannot load .*{name}, which is damaged"):
        convert(folder, tmp_path / "out", "softmax")
    assert not (tmp_path / "out").exists()


def test_a_part_that_an_index_lists_and_a_path_out_of_the_directory(sources, copy, tmp_path):
    folder = copy("roberta")
    (folder / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    for part in ("missing.safetensors", "../elsewhere.safetensors"):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": part}}))
        with pytest.raises(InputError, match=r"lists (missing|elsewhere)\.safetensors, which is not beside it"):
            convert(folder, tmp_path / "out", "softmax")


def test_a_full_disk_leaves_nothing(sources, tmp_path, monkeypatch, capsys):
    def full(state, path):
        path.write_bytes(b"half")
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")

    monkeypatch.setattr(torch, "save", full)
    assert main(["convert", str(sources["bert"][1]), str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: cannot write model.pt: [enforce fail")
    assert "MB free" in said
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_is_there_is_left_alone(sources, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match="out is there already"):
        convert(sources["bert"][1], tmp_path / "out", "softmax")
    assert list((tmp_path / "out").iterdir()) == []
