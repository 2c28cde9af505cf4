"""Checkpoints of other models, lengths and attentions."""

import argparse
import logging

import pytest
import torch

from lln_fairseq.checkpoints.reading import load_checkpoint, load_checkpoint_lazily, verify_checksums
from lln_fairseq.errors import InputError
from tests.fairseq_runs import CLASSIFICATION, LLN, MASKED_LM, make_classification, make_corpus, train

ENCODER = "encoder.sentence_encoder."


def as_published(path, out):
    """Writes a checkpoint of ours in the layout of roberta.base: names of 2019, one matrix for q, k, v, a Namespace of
    arguments instead of a configuration, torch's format before 1.6."""
    state = torch.load(path)
    model, old = state["model"], {}
    for key, value in model.items():
        if ".self_attn.k_proj." in key or ".self_attn.v_proj." in key:
            continue
        if ".self_attn.q_proj." in key:
            parts = [model[key.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            key, value = key.replace("q_proj.", "in_proj_"), torch.cat(parts)
        old[key.replace("encoder.", "decoder.", 1).replace(".layernorm_embedding.", ".emb_layer_norm.")] = value
    config = state["cfg"]
    sizes = {key: value for key, value in config["model"].items() if key.startswith("encoder_")}
    args = argparse.Namespace(
        arch="roberta_base", task="masked_lm", criterion="masked_lm", data="", max_positions=64, **sizes
    )
    history = [{"criterion_name": "MaskedLmLoss", "optimizer_name": "FairseqAdam", "num_updates": 3,
                "lr_scheduler_state": {"best": None}}]  # fmt: skip
    extra = {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}, "val_loss": 1.0}
    published = {"args": args, "model": old, "optimizer_history": history, "extra_state": extra}
    torch.save(published, out, _use_new_zipfile_serialization=False)
    return model


@pytest.mark.parametrize("positions", [64, 100])
def test_the_layout_of_the_published_roberta_fine_tunes(positions, tmp_path, monkeypatch, caplog):
    corpus, data = make_corpus(tmp_path / "corpus"), make_classification(tmp_path / "task")
    train(monkeypatch, tmp_path / "p.log", corpus, tmp_path / "p", *MASKED_LM, *LLN, "--attention", "softmax")
    before = as_published(tmp_path / "p" / "checkpoint_last.pt", tmp_path / "model.pt")
    with caplog.at_level(logging.WARNING):
        log = train(monkeypatch, tmp_path / "f.log", data, tmp_path / "f", *CLASSIFICATION, *LLN, "--lr", 0,
                    "--max-positions", positions, "--finetune-from-model", tmp_path / "model.pt",
                    "--max-update", 1)  # fmt: skip
    assert len(log["train"]) == 1
    assert "attention = softmax, here it is lln_diag" in caplog.text
    after = torch.load(tmp_path / "f" / "checkpoint_last.pt")["model"]
    for name in ("layers.1.self_attn.v_proj.weight", "layers.0.self_attn.k_proj.bias", "layernorm_embedding.weight",
                 "layers.0.fc1.weight"):  # fmt: skip
        assert torch.equal(after[ENCODER + name], before[ENCODER + name])
    table = after[ENCODER + "embed_positions.weight"]
    assert table.shape[0] == positions + 2
    assert torch.equal(table[:66], before[ENCODER + "embed_positions.weight"])
    assert positions == 64 or torch.equal(table[66:], table[2:38])


def test_a_learned_mix_starts_and_ends_in_fine_tuning(tmp_path, monkeypatch, caplog):
    corpus = make_corpus(tmp_path / "corpus")
    plain, ratio = (*MASKED_LM, *LLN), (*MASKED_LM, *LLN, "--lln-diag-mix", "ratio")
    train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *plain)
    with caplog.at_level(logging.WARNING):
        train(monkeypatch, tmp_path / "b.log", corpus, tmp_path / "b", *ratio, "--lr", 0,
              "--finetune-from-model", tmp_path / "a" / "checkpoint_last.pt")  # fmt: skip
        assert "layers.1.self_attn.attention.ratio is not in the checkpoint" in caplog.text
        train(monkeypatch, tmp_path / "c.log", corpus, tmp_path / "c", *plain,
              "--finetune-from-model", tmp_path / "b" / "checkpoint_last.pt")  # fmt: skip
    assert "layers.1.self_attn.attention.ratio of the checkpoint is left out" in caplog.text
    mixed = torch.load(tmp_path / "b" / "checkpoint_last.pt")["model"]
    assert (mixed[ENCODER + "layers.1.self_attn.attention.ratio"] == 0.5).all()


class Payload:
    def __reduce__(self):
        return print, ("this must not run",)


def test_code_in_a_checkpoint_does_not_run(tmp_path, capsys):
    for new_format in (True, False):
        torch.save({"model": Payload()}, tmp_path / "evil.pt", _use_new_zipfile_serialization=new_format)
        with pytest.raises(InputError, match=r"cannot load .*evil\.pt"):
            load_checkpoint_lazily(tmp_path / "evil.pt")
    assert "must not run" not in capsys.readouterr().out


def test_a_number_that_changed_on_the_disk_is_noticed(tmp_path, monkeypatch):
    corpus, weight = make_corpus(tmp_path / "corpus"), ENCODER + "layers.0.fc1.weight"
    train(monkeypatch, tmp_path / "log", corpus, tmp_path, *MASKED_LM, *LLN, "--max-update", 1)
    path = tmp_path / "checkpoint_last.pt"
    before, changed = torch.load(path)["model"][weight], bytearray(path.read_bytes())
    numbers = before.numpy().tobytes()
    changed[changed.index(numbers) + 1000] ^= 1
    path.write_bytes(changed)
    assert not torch.equal(torch.load(path)["model"][weight], before)  # without a word from torch
    with pytest.raises(InputError, match=r"is damaged: Bad CRC-32 .*checkpoint_best\.pt is whole: copy it"):
        load_checkpoint(str(path))


@pytest.mark.parametrize(("offset", "value"), [(8, 0x01), (10, 0x63)], ids=["encrypted", "method"])
def test_parts_that_cannot_be_opened_are_damaged(offset, value, tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"model": {"x": torch.arange(9)}}, path)
    changed = bytearray(path.read_bytes())
    changed[changed.index(b"PK\x01\x02") + offset] = value  # in the central directory of the zip archive
    path.write_bytes(changed)
    with pytest.raises(InputError, match=r"a\.pt is damaged: ."):
        verify_checksums(str(path))


def test_path_that_is_not_utf8_loads(tmp_path):
    """Every non-ASCII path looks like this to Python under a POSIX locale."""
    path = tmp_path / "\udcff.pt"
    torch.save({"model": {"weight": torch.ones(2)}}, path)
    assert torch.equal(load_checkpoint_lazily(str(path))["model"]["weight"], torch.ones(2))
