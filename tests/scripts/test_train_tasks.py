"""Test how the programs of scripts start trainings: logs, failures, kept scores, and Hydra overrides."""

import os
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from lln_fairseq.errors import UserError
from lln_fairseq.training.recipes import format_override
from scripts import train_tasks

PATHS = ("runs/a_b/checkpoint.pt", "runs/common.seed=1,x y/it's", "back\\slash/", "[a]{b}:c")
PROGRAM = """
import sys
print("[train_inner][INFO] - epoch 001:      3 / 9 loss=2.5, ppl=5.66, num_updates=3, lr=0.1")
print("the reason")
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Return the name of a module that prints an update and a reason, and ends with the code of its argument."""
    (tmp_path / "a_program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "a_program"


def test_failure_shows_the_last_line_and_the_log(program, tmp_path, monkeypatch):
    log = tmp_path / "logs" / "train.log"
    updates = []
    monkeypatch.setattr(train_tasks, "show_update", lambda bar, update, loss: updates.append((update, loss)))
    train_tasks.call_logged("train", [program, "0"], log, 3)
    assert updates == [(3, "2.5")]

    with pytest.raises(UserError, match=r"train failed \(exit code 5\): the reason \(output in .*train\.log\)"):
        train_tasks.call_logged("train", [program, "5"], log, 3)

    assert log.read_text().count("the reason") == 2


def test_tasks_beyond_the_table_end_with_their_files(monkeypatch, capsys):
    monkeypatch.setattr(train_tasks, "finetune", lambda *args: None)
    arguments = ["glue_all", "runs/a/checkpoint_best.pt", "--seeds", "1", "--tasks", "rte mrpc"]
    assert train_tasks.main(arguments) == 0
    assert capsys.readouterr().out == (
        "not in Table 1: rte, mrpc; their scores are in runs/a/glue/TASK/seedN/valid.json\n"
    )


@pytest.mark.parametrize(
    ("code", "message"),
    [("1", "a step failed, see above"), ("5", "exit code 5, see above; run the same command again to continue")],
)
def test_only_what_can_help_is_advised_after_a_failure(code, message, program):
    with pytest.raises(UserError, match=f"{message}$"):
        train_tasks.call([program, code])


def test_interrupt_ends_the_program(tmp_path, monkeypatch):
    slow = PROGRAM.replace('print("the reason")', "sys.stdout.flush(); __import__('time').sleep(60)")
    (tmp_path / "slow.py").write_text(slow)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    started = []
    popen = train_tasks.subprocess.Popen

    def remember(*args, **kwargs):
        started.append(popen(*args, **kwargs))
        return started[0]

    def interrupt(bar, updates, loss):
        raise KeyboardInterrupt

    monkeypatch.setattr(train_tasks.subprocess, "Popen", remember)
    monkeypatch.setattr(train_tasks, "show_update", interrupt)

    with pytest.raises(KeyboardInterrupt):
        train_tasks.call_logged("slow", ["slow", "0"], tmp_path / "log")

    assert started[0].returncode == -15


def test_scores_are_kept_until_the_checkpoint_changes(tmp_path):
    commands = []
    checkpoint = tmp_path / "checkpoint_best.pt"
    checkpoint.touch()

    train_tasks.score(tmp_path, ["valid", "test"], commands.append)
    for split in ("valid", "test"):
        (tmp_path / f"{split}.json").touch()
    os.utime(checkpoint, (0, 0))
    train_tasks.score(tmp_path, ["valid", "test"], commands.append)
    assert len(commands) == 1
    assert commands[0][-3:] == ["--split=valid,test", "--json", str(tmp_path / "{split}.json")]

    os.utime(tmp_path / "test.json", (1, 1))
    os.utime(checkpoint, (2, 2))
    train_tasks.score(tmp_path, ["valid", "test"], commands.append)
    assert len(commands) == 2


@pytest.mark.parametrize("path", PATHS)
def test_override_round_trips_a_path(path):
    override = format_override("checkpoint.save_dir", path)

    assert OverridesParser.create().parse_override(override).value() == path
    assert train_tasks.last_value("checkpoint.save_dir", ["checkpoint.save_dir=other", override, "x=1"]) == path


def test_last_value_names_an_unreadable_override():
    with pytest.raises(UserError, match=r"^a\.b=c=d: \w"):
        train_tasks.last_value("a.b", ["a.b=c=d"])


def test_results_are_next_to_the_checkpoint_or_in_save_dir(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(train_tasks, "call", commands.append)
    monkeypatch.setattr(train_tasks, "score", lambda directory, splits: commands.append((directory, splits)))
    checkpoint = tmp_path / "a b" / "best.pt"
    checkpoint.parent.mkdir()
    checkpoint.touch()

    train_tasks.main(["finetune_mnli", str(checkpoint), "--seed", "7", "run=cpu"])
    train_tasks.main(["lra", "text", "attention=elu", "checkpoint.save_dir=mine"])

    assert f"checkpoint.finetune_from_model='{checkpoint}'" in commands[0]
    assert commands[1] == (checkpoint.parent / "glue" / "mnli" / "seed7", ("valid1", "valid"))
    assert "attention=elu" in commands[2]
    assert commands[3] == (Path("mine"), ("valid", "test"))
