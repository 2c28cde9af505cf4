"""Tests that only known options of known models reach fairseq from a checkpoint's configuration."""

import argparse
import re
import sys
from collections.abc import Mapping

import fairseq_cli.validate
import pytest
import torch
from fairseq import checkpoint_utils

from lln_fairseq.__main__ import main
from lln_fairseq.checkpoints.reading import load_checkpoint_lazily
from lln_fairseq.errors import UserError
from lln_fairseq.inference.loading import load_model
from tests.fairseq_runs import CLASSIFICATION, LLN, MASKED_LM, USER_DIR, make_classification, train

ONE_UPDATE = ("--max-update", 1, "--attention", "softmax")


@pytest.fixture(scope="module")
def state(corpus, tmp_path_factory):
    """Return the checkpoint of a pre-training. Tests change copies of it."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as monkeypatch:
        train(monkeypatch, folder / "log", corpus, folder, *MASKED_LM, *LLN, *ONE_UPDATE)
    return torch.load(folder / "checkpoint_last.pt")


def copy_mappings(tree):
    """Copy nested mappings as dictionaries, and share their values."""
    if not isinstance(tree, Mapping):
        return tree
    return {key: copy_mappings(value) for key, value in tree.items()}


def forge(state, path, changes):
    """Save a checkpoint with changed values, for example {"cfg.model._name": "x"}, and return its path."""
    state = copy_mappings(state)
    for keys, value in changes.items():
        *groups, last = keys.split(".")
        group = state
        for key in groups:
            group = group[key]
        group[last] = value
    torch.save(state, path)
    return str(path)


def touch_code(path):
    """Return Python code that creates a file when it is evaluated."""
    return f"__import__('pathlib').Path({str(path)!r}).touch() or (0.9, 0.98)"


def forgeries(mark):
    """Return pairs of changes for `forge` and the message that each must cause; executed code would create `mark`."""
    return [
        ({"cfg.model": {"_name": "wav2vec2", "conv_feature_layers": touch_code(mark)}}, "holds the model 'wav2vec2'"),
        ({"cfg.model": argparse.Namespace(arch="fconv", encoder_layers=touch_code(mark))}, "holds the model 'fconv'"),
        ({"cfg.model._name": ["lln_roberta"]}, "holds the model"),
        ({"cfg.task._name": "audio_pretraining", "cfg.task.post_save_script": "touch x"}, "holds the task"),
        ({"cfg.model.activation_fn": touch_code(mark)}, "the model's option activation_fn: Invalid value"),
        ({"cfg.model.dropout": touch_code(mark)}, "the model's option dropout: Value .* could not be converted"),
        ({"cfg.model.softmax_layers": "${oc.env:HOME}"}, "softmax_layers is not a plain value"),
        ({"cfg.task.data": {"a": 1}}, "the task's option data is not a plain value"),
        ({"cfg.model.encoder_embed_dim": 1 << 40}, r"encoder_embed_dim is \d+, but its parameters have 32"),
        ({"cfg.model.encoder_layers": 9}, "encoder_layers is 9, but its parameters have 2"),
        ({"cfg.model.max_positions": 1 << 40}, r"max_positions is \d+, but its positional table has 66 rows"),
        ({"cfg.model.encoder_attention_heads": 0}, "cannot build the model of .*integer modulo by zero"),
        ({"cfg.model.lln_diag_mix": "joint"}, "Invalid value 'joint', expected .*joint_offset"),
        ({"cfg": None}, "it has no configuration"),
        ({"model": [1, 2]}, "it holds no model"),
        ({"model": {"encoder.x": "text"}}, "its model is not made of named tensors"),
        ({"optimizer_history": []}, "the state of its training is incomplete"),
    ]


@pytest.mark.parametrize("number", range(len(forgeries("x"))))
def test_forged_checkpoint_is_rejected_before_anything_is_built(number, state, corpus, tmp_path):
    changes, message = forgeries(tmp_path / "mark")[number]
    path = forge(state, tmp_path / "forged.pt", changes)

    with pytest.raises(UserError, match=message):
        load_model(path, str(corpus))

    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("content", [[1, 2], torch.ones(2)], ids=lambda value: type(value).__name__)
def test_file_without_a_model_is_not_a_checkpoint(content, tmp_path):
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(UserError, match=r"a\.pt is not a checkpoint of fairseq: it holds no model"):
        load_checkpoint_lazily(str(tmp_path / "a.pt"))


def test_options_that_fairseq_evaluates_are_left_out(state, corpus, tmp_path):
    mark = tmp_path / "mark"
    code = touch_code(mark)
    changes = {
        "cfg.optimizer.adam_betas": code,
        "cfg.criterion._name": "ctc",
        "cfg.bpe": {"_name": "gpt2"},
        "cfg.model.xformers_att_config": code,
        "cfg.model.adaptive_input_cutoff": code,
        "cfg.task.unknown": code,
    }
    path = forge(state, tmp_path / "forged.pt", changes)

    load_model(path, str(corpus))
    config = checkpoint_utils.load_checkpoint_to_cpu(path)["cfg"]

    assert "optimizer" not in config
    assert config.criterion is None
    assert config.bpe is None
    assert not {"xformers_att_config", "adaptive_input_cutoff", "unknown"} & {*config.model, *config.task}
    assert not mark.exists()


def test_every_program_rejects_a_forged_checkpoint(state, corpus, tmp_path, monkeypatch, capsys):
    mark = tmp_path / "mark"
    changes = {"cfg.model": {"_name": "wav2vec2", "conv_feature_layers": touch_code(mark)}}
    path = forge(state, tmp_path / "forged.pt", changes)
    assert main(["analyze", path, str(corpus)]) == 1
    assert re.search(
        r"error: .* holds the model 'wav2vec2', but only these are supported: .*lln_roberta", capsys.readouterr().err
    )

    finetuned = forge(state, tmp_path / "tuned.pt", changes | {"cfg.task._name": "sentence_prediction"})
    assert main(["evaluate", finetuned, str(make_classification(tmp_path / "data"))]) == 1
    assert "wav2vec2" in capsys.readouterr().err

    arguments = ["fairseq-validate", corpus, *USER_DIR, "--path", path, "--batch-size", 4, "--task", "lln_masked_lm"]
    monkeypatch.setattr(sys, "argv", list(map(str, arguments)))
    with pytest.raises((UserError, SystemExit), match=r"wav2vec2|1"):
        fairseq_cli.validate.cli_main()
    assert not mark.exists()


def test_training_loads_parameters_but_no_configuration(state, tmp_path, monkeypatch):
    mark = tmp_path / "mark"
    changes = {"cfg": {"model": {"_name": "wav2vec2", "conv_feature_layers": touch_code(mark)}, "task": "x"}}
    path = forge(state, tmp_path / "forged.pt", changes)
    data = make_classification(tmp_path / "data")
    options = (*CLASSIFICATION, *LLN, "--attention", "softmax", "--lr", 0, "--finetune-from-model", path)

    train(monkeypatch, tmp_path / "log", data, tmp_path / "run", *options)

    after = torch.load(tmp_path / "run" / "checkpoint_last.pt")["model"]
    key = "encoder.sentence_encoder.layers.0.fc1.weight"
    assert torch.equal(after[key], state["model"][key])
    assert not mark.exists()
