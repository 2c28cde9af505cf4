"""Tests of loading checkpoints: published layouts, other attentions, code, and damage."""

import argparse
import logging

import pytest
import torch

from lln_fairseq.checkpoints.reading import load_checkpoint, load_checkpoint_lazily, verify_checksums
from lln_fairseq.errors import UserError
from tests.fairseq_runs import (
    CLASSIFICATION,
    LLN,
    MASKED_LM,
    make_classification,
    make_corpus,
    parameters_of_2019,
    train,
)
from tests.helpers import Payload

ENCODER = "encoder.sentence_encoder."
OFFSET = "layers.1.self_attn.attention.offset"


def write_as_published(path, out):
    """Write a checkpoint of ours in the layout of roberta.base, and return its parameters.

    That layout has the parameter names of 2019, one matrix for q, k and v, a Namespace of arguments instead of a
    configuration, and torch's format before 1.6.
    """
    state = torch.load(path)
    sizes = {key: value for key, value in state["cfg"]["model"].items() if key.startswith("encoder_")}
    args = argparse.Namespace(
        arch="roberta_base", task="masked_lm", criterion="masked_lm", data="", max_positions=64, **sizes
    )
    history = {
        "criterion_name": "MaskedLmLoss",
        "optimizer_name": "FairseqAdam",
        "num_updates": 3,
        "lr_scheduler_state": {"best": None},
    }
    extra_state = {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}, "val_loss": 1.0}
    checkpoint = {"args": args, "model": parameters_of_2019(state["model"]), "extra_state": extra_state}
    checkpoint["optimizer_history"] = [history]
    torch.save(checkpoint, out, _use_new_zipfile_serialization=False)
    return state["model"]


@pytest.mark.parametrize("positions", [64, 100])
def test_published_layout_can_be_finetuned(positions, tmp_path, monkeypatch, caplog):
    corpus = make_corpus(tmp_path / "corpus")
    data = make_classification(tmp_path / "task")
    published = tmp_path / "model.pt"
    train(monkeypatch, tmp_path / "p.log", corpus, tmp_path / "p", *MASKED_LM, *LLN, "--attention", "softmax")
    before = write_as_published(tmp_path / "p" / "checkpoint_last.pt", published)
    options = (*CLASSIFICATION, *LLN, "--lr", 0, "--max-positions", positions, "--max-update", 1)

    with caplog.at_level(logging.WARNING):
        log = train(monkeypatch, tmp_path / "f.log", data, tmp_path / "f", *options, "--finetune-from-model", published)

    assert len(log["train"]) == 1
    assert "attention = softmax, here it is lln_diag" in caplog.text
    after = torch.load(tmp_path / "f" / "checkpoint_last.pt")["model"]
    for name in (
        "layers.1.self_attn.v_proj.weight",
        "layers.0.self_attn.k_proj.bias",
        "layernorm_embedding.weight",
        "layers.0.fc1.weight",
    ):
        assert torch.equal(after[ENCODER + name], before[ENCODER + name])
    table = after[ENCODER + "embed_positions.weight"]
    assert table.shape[0] == positions + 2
    assert torch.equal(table[:66], before[ENCODER + "embed_positions.weight"])
    assert positions == 64 or torch.equal(table[66:], table[2:38])  # further positions begin as copies


def test_finetuning_can_add_and_drop_a_learned_offset(tmp_path, monkeypatch, caplog):
    corpus = make_corpus(tmp_path / "corpus")
    average = (*MASKED_LM, *LLN)
    joint = (*average, "--lln-diag-mix", "joint_offset", "--lr", 0)
    train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *average)

    with caplog.at_level(logging.WARNING):
        pretrained = ("--finetune-from-model", tmp_path / "a" / "checkpoint_last.pt")
        train(monkeypatch, tmp_path / "b.log", corpus, tmp_path / "b", *joint, *pretrained)
        assert f"{OFFSET} is not in the checkpoint" in caplog.text
        pretrained = ("--finetune-from-model", tmp_path / "b" / "checkpoint_last.pt")
        train(monkeypatch, tmp_path / "c.log", corpus, tmp_path / "c", *average, *pretrained)

    assert f"{OFFSET} of the checkpoint is left out" in caplog.text
    with_offset = torch.load(tmp_path / "b" / "checkpoint_last.pt")["model"]
    assert (with_offset[ENCODER + OFFSET] == 0).all()


def test_code_in_a_checkpoint_does_not_run(tmp_path, capsys):
    for new_format in (True, False):
        torch.save({"model": Payload()}, tmp_path / "evil.pt", _use_new_zipfile_serialization=new_format)
        with pytest.raises(UserError, match=r"cannot load .*evil\.pt.*print"):
            load_checkpoint_lazily(tmp_path / "evil.pt")

    assert "executed" not in capsys.readouterr().out


def test_changed_number_is_detected(tmp_path, monkeypatch):
    corpus = make_corpus(tmp_path / "corpus")
    weight = ENCODER + "layers.0.fc1.weight"
    train(monkeypatch, tmp_path / "log", corpus, tmp_path, *MASKED_LM, *LLN, "--max-update", 1)
    path = tmp_path / "checkpoint_last.pt"
    before = torch.load(path)["model"][weight]
    content = bytearray(path.read_bytes())
    content[content.index(before.numpy().tobytes()) + 1000] ^= 1
    path.write_bytes(content)
    assert not torch.equal(torch.load(path)["model"][weight], before)  # torch does not notice it

    with pytest.raises(UserError, match=r"is damaged: Bad CRC-32 .*checkpoint_best\.pt is whole: copy it"):
        load_checkpoint(str(path))


@pytest.mark.parametrize(("offset", "value"), [(8, 0x01), (10, 0x63)], ids=["encrypted", "method"])
def test_unreadable_part_is_reported_as_damage(offset, value, tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"model": {"x": torch.arange(9)}}, path)
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + offset] = value  # in the central directory of the zip archive
    path.write_bytes(content)

    with pytest.raises(UserError, match=r"a\.pt is damaged: ."):
        verify_checksums(str(path))


def test_views_and_shared_tensors_load(tmp_path):
    shared = torch.randn(6, 4)
    model = {"a": shared, "b": shared, "row": shared[1], "transposed": shared.T, "empty": torch.empty(0, 3)}
    model["positions"] = torch.arange(5).expand(1, -1)  # a buffer of Hugging Face's models
    torch.save({"model": model}, tmp_path / "a.pt")

    loaded = load_checkpoint_lazily(str(tmp_path / "a.pt"))["model"]

    for name, value in model.items():
        assert torch.equal(loaded[name], value), name
