"""A run with a recipe takes the sizes and the attention of its model from the checkpoint that it starts from."""

import shutil

import pytest
import torch
from fairseq.dataclass.initialize import hydra_init
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from lln_fairseq.errors import UserError
from lln_fairseq.training.initial_model import START, InitialModel, missing_options
from lln_fairseq.training.recipes import CONFIGS
from tests.fairseq_runs import CLASSIFICATION, LLN, hydra_train, make_classification, train

SIZES = {"encoder_layers": 2, "encoder_embed_dim": 32, "encoder_ffn_embed_dim": 64, "encoder_attention_heads": 2}


@pytest.fixture(scope="module")
def finetune_config():
    """A function (*overrides) that returns the configuration of the recipe `finetune`, with Hydra's own part."""
    GlobalHydra.instance().clear()
    hydra_init("finetune")
    with initialize_config_dir(str(CONFIGS), version_base="1.1"):
        yield lambda *overrides: compose("finetune", list(map(str, overrides)), return_hydra_config=True)


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


def test_sizes_that_are_not_stored_come_from_parameters_and_preset(started_run, tmp_path, finetune_config):
    state = torch.load(started_run.checkpoint)
    for key in SIZES:
        state["cfg"]["model"][key] = None
    torch.save(state, tmp_path / "model.pt")
    assert SIZES.items() <= missing_options(finetune_config(f"{START}={tmp_path}/model.pt")).items()


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

    InitialModel().on_run_start(finetune_config("glue=sst2", f"{START}={tmp_path}/model.pt"))

    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["sst2_lln"]


@pytest.mark.parametrize("overrides", [[], ["model._name=roberta_base", f"{START}=missing.pt"]])
def test_nothing_is_taken_without_checkpoint_or_for_another_model(overrides, finetune_config):
    assert missing_options(finetune_config(*overrides)) == {}


def test_missing_checkpoint_is_an_error(finetune_config):
    with pytest.raises(UserError, match=f"{START}=missing.pt: no such checkpoint"):
        missing_options(finetune_config(f"{START}=missing.pt"))


def test_resumed_run_does_not_need_the_checkpoint(joint_checkpoint, tmp_path, finetune_config):
    shutil.copy(joint_checkpoint, tmp_path / "checkpoint_last.pt")
    config = finetune_config(f"{START}=missing.pt", f"checkpoint.save_dir={tmp_path}")
    assert missing_options(config)["lln_diag_mix"] == "joint_offset"


def test_checkpoint_without_configuration_gives_no_options(joint_checkpoint, tmp_path, finetune_config):
    state = torch.load(joint_checkpoint)
    torch.save({"model": state["model"]}, tmp_path / "model.pt")
    assert missing_options(finetune_config(f"{START}={tmp_path}/model.pt")) == {}


def test_callback_ends_the_program_with_one_line(finetune_config, capsys):
    with pytest.raises(SystemExit) as exit_info:
        InitialModel().on_run_start(finetune_config(f"{START}=missing.pt"))
    assert exit_info.value.code == 1
    assert capsys.readouterr().err == f"error: {START}=missing.pt: no such checkpoint\n"


def test_save_dir_that_cannot_be_written_ends_in_one_line(tmp_path, finetune_config, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        InitialModel().on_run_start(finetune_config(f"checkpoint.save_dir={tmp_path}/file/run"))
    assert capsys.readouterr().err == f"error: {tmp_path}/file/run: Not a directory\n"


def test_jobs_of_a_sweep_take_common_options(joint_checkpoint, started_run, finetune_config):
    config = finetune_config()
    config.hydra.overrides.task += ["attention=lln,lln_diag", f"{START}='{joint_checkpoint}','{joint_checkpoint}'"]
    InitialModel().on_multirun_start(config)
    added = config.hydra.overrides.task[2:]
    assert {"++model.encoder_layers=2", "++model.activation_fn='relu'"} <= set(added)
    assert not any("attention=" in override or "lln_diag" in override for override in added)

    config = finetune_config()
    config.hydra.overrides.task += [f"{START}='{joint_checkpoint}','{started_run.checkpoint}'"]
    with pytest.raises(UserError, match="the checkpoints of a sweep must have the same sizes"):
        missing_options(config)


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
