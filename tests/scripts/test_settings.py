"""Settings as Hydra overrides: paths that mean something to Hydra, and results of other settings."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from lln_fairseq.command import UserError
from scripts.experiments import finetune, lra_runs, steps
from scripts.experiments.settings import last_of, setting

PATHS = ("runs/a_b/checkpoint.pt", "runs/common.seed=1,x y/it's", "back\\slash/", "[a]{b}:c")


@pytest.mark.parametrize("path", PATHS)
def test_hydra_reads_a_path_as_it_is(path):
    override = setting("checkpoint.save_dir", path)
    assert OverridesParser.create().parse_override(override).value() == path
    assert last_of("checkpoint.save_dir", ["checkpoint.save_dir=other", override, "x=1"]) == path


def test_a_value_that_hydra_cannot_read_is_said():
    with pytest.raises(UserError, match=r"^a\.b=c=d: \w"):
        last_of("a.b", ["a.b=c=d"])


@pytest.fixture
def commands(monkeypatch):
    """What finetune and lra start, which writes what a training and an evaluation would."""
    started = []
    monkeypatch.setattr(steps, "call", started.append)
    return started


def test_a_fine_tuning_with_other_settings_is_not_done_before(commands, tmp_path, capsys):
    checkpoint, out = tmp_path / "seed=1" / "best.pt", tmp_path / "seed=1" / "glue" / "sst2" / "seed7"
    out.mkdir(parents=True)
    finetune.finetune("sst2", checkpoint, 7, ["attention=elu", "run=cpu"])
    assert f"checkpoint.finetune_from_model='{checkpoint}'" in commands[0]
    (out / "valid.json").touch()
    finetune.finetune("sst2", checkpoint, 7, ["attention=elu", "run=gpu1"])
    assert len(commands) == 2
    assert "done before" in capsys.readouterr().out
    for other, overrides in ((checkpoint, ["attention=lln"]), (checkpoint.with_name("last.pt"), ["attention=elu"])):
        with pytest.raises(UserError, match=r"holds a result with other settings: .*(elu, here: .*lln|best.*last)"):
            finetune.finetune("sst2", other, 7, overrides)


def test_a_task_of_the_long_range_arena_with_other_settings_is_not_done_before(commands, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "runs" / "lra" / "lln_diag" / "text" / "seed1"
    out.mkdir(parents=True)
    lra_runs.train("text", 1, [])
    (out / "test.json").touch()
    lra_runs.train("text", 1, ["attention=lln_diag", "run=cpu"])
    assert len(commands) == 2
    with pytest.raises(UserError, match=r"with other settings: without, here: optimization\.lr=\[1\]"):
        lra_runs.train("text", 1, ["optimization.lr=[1]"])
