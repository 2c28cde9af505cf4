"""Test the settings of trainings as Hydra overrides, and the comparison of settings with those of earlier results."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from lln_fairseq.command import UserError
from scripts.experiments import finetune, lra_runs, steps
from scripts.experiments.settings import format_override, last_value

PATHS = ("runs/a_b/checkpoint.pt", "runs/common.seed=1,x y/it's", "back\\slash/", "[a]{b}:c")


@pytest.fixture
def commands(monkeypatch):
    """Return the list of commands that would be started; none is."""
    started = []
    monkeypatch.setattr(steps, "call", started.append)
    return started


@pytest.mark.parametrize("path", PATHS)
def test_override_round_trips_a_path(path):
    override = format_override("checkpoint.save_dir", path)

    assert OverridesParser.create().parse_override(override).value() == path
    assert last_value("checkpoint.save_dir", ["checkpoint.save_dir=other", override, "x=1"]) == path


def test_last_value_names_an_unreadable_override():
    with pytest.raises(UserError, match=r"^a\.b=c=d: \w"):
        last_value("a.b", ["a.b=c=d"])


def test_finished_finetuning_is_not_repeated(commands, tmp_path, capsys):
    checkpoint = tmp_path / "seed=1" / "best.pt"
    out = tmp_path / "seed=1" / "glue" / "sst2" / "seed7"
    out.mkdir(parents=True)

    finetune.finetune("sst2", checkpoint, 7, ["attention=elu", "run=cpu"])
    (out / "valid.json").touch()
    finetune.finetune("sst2", checkpoint, 7, ["attention=elu", "run=gpu1"])

    assert len(commands) == 2  # the training and the evaluation of the first call
    assert f"checkpoint.finetune_from_model='{checkpoint}'" in commands[0]
    assert "done before" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("start_model", "attention", "difference"),
    [("best.pt", "lln", "elu.*this command has.*lln"), ("last.pt", "elu", "best.*this command has.*last")],
)
def test_finetuning_rejects_results_of_other_settings(start_model, attention, difference, commands, tmp_path):
    out = tmp_path / "glue" / "sst2" / "seed7"
    out.mkdir(parents=True)
    finetune.finetune("sst2", tmp_path / "best.pt", 7, ["attention=elu"])
    (out / "valid.json").touch()

    with pytest.raises(UserError, match=f"holds a result with other settings: .*{difference}"):
        finetune.finetune("sst2", tmp_path / start_model, 7, [f"attention={attention}"])


def test_finetuning_rejects_results_of_earlier_start_model(commands, tmp_path):
    checkpoint = tmp_path / "best.pt"
    checkpoint.write_text("after 50,000 updates")
    out = tmp_path / "glue" / "sst2" / "seed7"
    out.mkdir(parents=True)
    finetune.finetune("sst2", checkpoint, 7, [])
    (out / "valid.json").touch()
    checkpoint.write_text("after 125,000 updates")

    with pytest.raises(UserError, match=r"other files: the content of checkpoint\.finetune_from_model has changed"):
        finetune.finetune("sst2", checkpoint, 7, [])


def test_lra_training_rejects_results_of_earlier_data(commands, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "data-bin" / "lra" / "text"
    data.mkdir(parents=True)
    (data / "valid.bin").write_bytes(b"1")
    out = tmp_path / "runs" / "lra" / "lln_diag" / "text" / "seed1"
    out.mkdir(parents=True)
    lra_runs.train_task("text", 1, [])
    (out / "test.json").touch()
    (data / "valid.bin").write_bytes(b"2")

    with pytest.raises(UserError, match=r"other files: the content of task\.data has changed"):
        lra_runs.train_task("text", 1, [])
    (data / "valid.bin").unlink()
    lra_runs.train_task("text", 1, [])  # data that has been deleted is not compared


def test_lra_training_rejects_results_of_other_settings(commands, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "runs" / "lra" / "lln_diag" / "text" / "seed1"
    out.mkdir(parents=True)
    lra_runs.train_task("text", 1, [])
    (out / "test.json").touch()

    lra_runs.train_task("text", 1, ["attention=lln_diag", "run=cpu"])
    assert len(commands) == 2  # the default attention and the device make no difference

    with pytest.raises(UserError, match=r"with other settings: .* has optimization\.lr=\[1\]"):
        lra_runs.train_task("text", 1, ["optimization.lr=[1]"])
