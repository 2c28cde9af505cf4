"""An error in our Hydra callback ends the run, which Hydra itself would start after a warning."""

import os
import subprocess
import sys

import pytest

from lln_fairseq.training import hydra_callback
from lln_fairseq.training.hydra_callback import PrepareRun
from lln_fairseq.training.recipes import CONFIGS, PACKAGE
from tests.fairseq_runs import hydra_train

RUN = ("run=cpu", "task.data=missing")


def end_of_run(monkeypatch, capfd, *arguments):
    """Return the exit code of a training through fairseq-hydra-train that fails, and the lines on its stderr."""
    with pytest.raises(SystemExit) as exit_info:
        hydra_train(monkeypatch, *arguments, *RUN)
    return exit_info.value.code, capfd.readouterr().err.splitlines()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["checkpoint.finetune_from_model=missing.pt"],
            "error: checkpoint.finetune_from_model: no such checkpoint: missing.pt",
        ),
        (["checkpoint.save_dir=file/run"], "error: file/run: Not a directory"),
        ([], "error: missing does not exist: prepare the data first, see docs/data.md"),
        (
            ["layout=local_global", "model=tiny"],
            "error: layout=local_global needs a model with more layers: softmax_layers must be numbers from 0 to 1, "
            "separated by commas, or every:N with N from 1 to 2 (in linearize also best:N), got 'every:4'",
        ),
        (
            ["--multirun", "attention=lln,elu"],
            "error: --multirun is not supported: start a run for each combination, with a loop in the shell",
        ),
    ],
    ids=["missing checkpoint", "save_dir", "missing data", "layout", "multirun"],
)
def test_user_error_ends_the_run_with_one_line(arguments, line, tmp_path, monkeypatch, capfd):
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    assert end_of_run(monkeypatch, capfd, *arguments) == (1, [line])


@pytest.mark.parametrize("method", [name for name in vars(PrepareRun) if name.startswith("on_")])
def test_bug_ends_the_run_with_its_traceback(method, tmp_path, monkeypatch, capfd):
    def fail(*args):
        raise KeyError("a bug")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hydra_callback, "missing_options", fail)
    monkeypatch.setattr(hydra_callback, "UserError", fail)
    arguments = {"on_run_start": [], "on_multirun_start": ["--multirun"]}[method]

    code, lines = end_of_run(monkeypatch, capfd, *arguments)

    assert code == 1
    assert lines[0].startswith("Traceback")
    assert lines[-1] == "KeyError: 'a bug'"


def test_missing_user_directory_is_named(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    code, lines = end_of_run(monkeypatch, capfd, "common.user_dir=missing")
    assert (code, lines) == (1, [f"error: no such file: {tmp_path}/missing"])


def test_user_directory_is_this_package_by_default(tmp_path, monkeypatch):
    """Also for fairseq-hydra-train in a process that has not imported the package, and in any directory."""
    program = "import sys; from fairseq_cli.hydra_train import cli_main; sys.exit(cli_main())"
    command = [sys.executable, "-c", program, "--config-dir", str(CONFIGS), "--config-name", "pretrain", *RUN]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}

    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    assert result.returncode == 1
    assert result.stderr.endswith("error: missing does not exist: prepare the data first, see docs/data.md\n")
