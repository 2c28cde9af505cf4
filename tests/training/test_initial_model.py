"""A run with a recipe takes the sizes and the attention of its model from the checkpoint that it starts from."""

import argparse
import copy
import functools
import shutil

import pytest
import torch
from fairseq.dataclass.initialize import hydra_init
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from lln_fairseq.errors import UserError
from lln_fairseq.training.hydra_callback import PrepareRun
from lln_fairseq.training.initial_model import START, missing_options
from lln_fairseq.training.recipes import CONFIGS
from tests.fairseq_runs import (
    CLASSIFICATION,
    LLN,
    MASKED_LM,
    USER_DIR,
    hydra_train,
    make_classification,
    split_options,
    train,
)

SIZES = {"encoder_layers": 2, "encoder_embed_dim": 32, "encoder_ffn_embed_dim": 64, "encoder_attention_heads": 2}

LAYOUTS = ("args", "namespace", "roberta_base", "roberta")  # of a stock checkpoint's options, see write_layout


@pytest.fixture(scope="module")
def stock_state(corpus, tmp_path_factory):
    """The content of a checkpoint of fairseq's own RoBERTa, from its own task."""
    folder = tmp_path_factory.mktemp("stock")
    options = split_options("--arch roberta_base --task masked_lm --max-positions 66 --required-batch-size-multiple 1")
    with pytest.MonkeyPatch.context() as monkeypatch:
        train(monkeypatch, folder / "log", corpus, folder, *MASKED_LM, *USER_DIR, *options, "--max-update", 1)
    return torch.load(folder / "checkpoint_last.pt")


def write_layout(path, state, layout):
    """Write a stock checkpoint with its options in one of the LAYOUTS of fairseq's versions, and return its path.

    "args" is a Namespace of all groups, and "namespace" one as the model's group of `cfg`. Otherwise, this group is a
    dictionary, and the layout its `_name`.
    """
    state = copy.deepcopy(state)
    options = state["cfg"]["model"]
    assert isinstance(options, argparse.Namespace)
    if layout == "args":
        state["args"] = options
        state["cfg"] = None
    elif layout != "namespace":
        state["cfg"]["model"] = {**vars(options), "_name": layout}
    torch.save(state, path)
    return path


@pytest.fixture(scope="module")
def recipe_config():
    """A function (recipe, *overrides) that returns the configuration of a recipe, with Hydra's own part."""
    GlobalHydra.instance().clear()
    hydra_init("finetune")
    hydra_init("pretrain")

    def compose_recipe(recipe, *overrides):
        with initialize_config_dir(str(CONFIGS), version_base="1.1"):
            return compose(recipe, list(map(str, overrides)), return_hydra_config=True)

    return compose_recipe


@pytest.fixture(scope="module")
def finetune_config(recipe_config):
    """A function (*overrides) that returns the configuration of the recipe `finetune`, with Hydra's own part."""
    return functools.partial(recipe_config, "finetune")


@pytest.fixture(scope="module")
def joint_checkpoint(started_run, tmp_path_factory):
    """Return a checkpoint with mix=joint_offset and block_size=8, another activation and rotary positions."""
    state = torch.load(started_run.checkpoint)
    state["cfg"]["model"].update(lln_diag_mix="joint_offset", lln_diag_block_size=8, activation_fn="relu", rotary=True)
    path = tmp_path_factory.mktemp("joint") / "model.pt"
    torch.save(state, path)
    return path


def test_sizes_and_attention_come_from_checkpoint(joint_checkpoint, finetune_config):
    options = missing_options(finetune_config(f"{START}={joint_checkpoint}"))

    expected = {
        **SIZES,
        "_name": "lln_roberta_tiny",
        "activation_fn": "relu",
        "rotary": True,
        "attention": "lln_diag",
        "lln_diag_mix": "joint_offset",
        "lln_diag_block_size": 8,
        "max_positions": 512,  # that of the data, because the checkpoint has fewer
    }
    assert expected.items() <= options.items()
    assert "dropout" not in options


def test_options_of_a_head_come_from_checkpoint_only_with_the_head(started_run, tmp_path, finetune_config):
    state = torch.load(started_run.checkpoint)
    head = {"pooler_activation_fn": "relu", "pooling": "mean", "pooler_dim": 8, "pooler_dropout": 0.2}
    state["cfg"]["model"].update(head)
    torch.save(state, tmp_path / "model.pt")
    start = f"{START}={tmp_path}/model.pt"
    assert head.items() <= missing_options(finetune_config(start, "model.load_checkpoint_heads=true")).items()
    assert not head.keys() & missing_options(finetune_config(start)).keys()


def test_sizes_that_are_not_stored_come_from_parameters_and_preset(started_run, tmp_path, finetune_config):
    state = torch.load(started_run.checkpoint)
    for key in SIZES:
        state["cfg"]["model"][key] = None
    torch.save(state, tmp_path / "model.pt")
    assert SIZES.items() <= missing_options(finetune_config(f"{START}={tmp_path}/model.pt")).items()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", ["finetune", "pretrain"])
def test_sizes_and_softmax_come_from_stock_checkpoint(recipe, layout, stock_state, tmp_path, recipe_config):
    path = write_layout(tmp_path / "stock.pt", stock_state, layout)

    options = missing_options(recipe_config(recipe, f"{START}={path}"))

    assert {**SIZES, "attention": "softmax", "max_positions": 512}.items() <= options.items()
    assert "_name" not in options  # the recipe's preset, not fairseq's own model


def test_run_continues_stock_checkpoint(stock_state, task_data, tmp_path, monkeypatch):
    path = write_layout(tmp_path / "stock.pt", stock_state, "roberta_base")
    monkeypatch.chdir(tmp_path)
    options = ("glue=sst2", "run=cpu", f"task.data={task_data}", f"{START}={path}", "optimization.max_update=1")

    hydra_train(monkeypatch, *options, recipe="finetune")

    model = torch.load("runs/sst2_softmax/checkpoint_last.pt")["cfg"]["model"]
    assert {**SIZES, "attention": "softmax"}.items() <= model.items()


def test_longer_checkpoint_keeps_its_positions(joint_checkpoint, finetune_config):
    config = finetune_config(f"{START}={joint_checkpoint}", "task.max_positions=16")
    assert missing_options(config)["max_positions"] == 64


@pytest.mark.parametrize(
    ("overrides", "kept", "taken"),
    [
        (["attention=lln"], ["attention", "lln_diag_mix"], ["encoder_layers"]),
        (["model.attention=lln"], ["attention", "lln_diag_mix"], ["encoder_layers"]),
        (["attention=lln_diag"], ["attention"], ["lln_diag_mix", "lln_diag_block_size"]),
        (["model.lln_diag_mix=average"], ["lln_diag_mix"], ["attention", "lln_diag_block_size"]),
        (["model=base"], list(SIZES), ["attention", "activation_fn"]),
        (["model=lra"], [*SIZES, "encoder_normalize_before"], ["activation_fn"]),
        (["model.encoder_layers=3"], ["encoder_layers"], ["encoder_embed_dim"]),
        (["model.activation_fn=gelu", "model.max_positions=99"], ["activation_fn", "max_positions"], ["attention"]),
    ],
    ids=str,
)
def test_options_of_the_user_are_kept(overrides, kept, taken, joint_checkpoint, finetune_config):
    options = missing_options(finetune_config(f"{START}={joint_checkpoint}", *overrides))
    assert not set(kept) & options.keys()
    assert set(taken) <= options.keys()


def test_directory_is_named_after_the_attention_of_the_checkpoint(started_run, tmp_path, finetune_config, monkeypatch):
    state = torch.load(started_run.checkpoint)
    state["cfg"]["model"].update(attention="lln")
    torch.save(state, tmp_path / "model.pt")
    monkeypatch.chdir(tmp_path)

    PrepareRun().on_run_start(finetune_config("glue=sst2", f"{START}={tmp_path}/model.pt"))

    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["sst2_lln"]


@pytest.mark.parametrize("overrides", [[], ["model._name=roberta_base", f"{START}=missing.pt"]])
def test_nothing_is_taken_without_checkpoint_or_for_another_model(overrides, finetune_config):
    assert missing_options(finetune_config(*overrides)) == {}


def test_resumed_run_does_not_need_the_checkpoint(joint_checkpoint, tmp_path, finetune_config):
    shutil.copy(joint_checkpoint, tmp_path / "checkpoint_last.pt")
    config = finetune_config(f"{START}=missing.pt", f"checkpoint.save_dir={tmp_path}")
    assert missing_options(config)["lln_diag_mix"] == "joint_offset"


def test_checkpoint_without_configuration_gives_no_options(joint_checkpoint, tmp_path, finetune_config):
    state = torch.load(joint_checkpoint)
    torch.save({"model": state["model"]}, tmp_path / "model.pt")
    assert missing_options(finetune_config(f"{START}={tmp_path}/model.pt")) == {}


def test_finetuning_repeats_no_option_of_the_checkpoint(joint_checkpoint, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    data = make_classification(tmp_path / "data")
    command = ["glue=sst2", "run=cpu", f"task.data={data}", f"{START}={joint_checkpoint}", "optimization.max_update=1"]
    hydra_train(monkeypatch, *command, recipe="finetune")
    model = torch.load("runs/sst2_lln_diag/checkpoint_last.pt")["cfg"]["model"]
    assert {**SIZES, "lln_diag_mix": "joint_offset", "activation_fn": "relu"}.items() <= model.items()

    with pytest.raises(SystemExit):
        hydra_train(monkeypatch, *command, "model=nano", "checkpoint.save_dir=runs/nano", recipe="finetune")
    message = (
        "has encoder_embed_dim=32 encoder_ffn_embed_dim=64 encoder_attention_heads=2, but this run has "
        "encoder_embed_dim=64 encoder_ffn_embed_dim=256 encoder_attention_heads=1: leave out model= and these options"
    )
    assert message in capfd.readouterr().err


def test_fairseq_train_names_the_flags_of_other_sizes(started_run, task_data, tmp_path, monkeypatch):
    sizes = ("--encoder-layers", 1, "--encoder-attention-heads", 4)
    options = (*CLASSIFICATION, *LLN, *sizes, "--finetune-from-model", started_run.checkpoint)
    message = (
        "has encoder_layers=2 encoder_attention_heads=2, but .*: give --encoder-layers 2 --encoder-attention-heads 2"
    )
    with pytest.raises(UserError, match=message):
        train(monkeypatch, tmp_path / "log", task_data, tmp_path / "run", *options)


def test_checkpoint_of_a_language_model_is_named(corpus, task_data, tmp_path, monkeypatch):
    state = {
        "model": {"decoder.layers.0.fc1.weight": torch.ones(64, 32)},
        "cfg": {"model": {"_name": "transformer_lm"}},
    }
    torch.save(state, tmp_path / "lm.pt")
    options = (*CLASSIFICATION, *LLN, "--finetune-from-model", tmp_path / "lm.pt")
    with pytest.raises(UserError, match=r"lm.pt does not hold a RoBERTa \(its model is transformer_lm\)"):
        train(monkeypatch, tmp_path / "log", task_data, tmp_path / "run", *options)
