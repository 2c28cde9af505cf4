"""Test that steps run once, report their failures, and can be stopped from another thread."""

import json
import sys
import threading
import time

import pytest

from lln_fairseq.command import UserError
from lln_fairseq.linearize import progress_bar
from scripts.experiments.progress import show_update
from scripts.experiments.steps import StepFailed, Steps

APPEND = "import sys; open(sys.argv[1], 'a').write('x'); print('written')"


def python(code, *arguments):
    return [sys.executable, "-c", code, *map(str, arguments)]


def test_finished_step_is_not_repeated(tmp_path):
    file = tmp_path / "file"

    for _ in range(2):
        Steps(tmp_path / "out").run("one step", python(APPEND, file))

    assert file.read_text() == "x"
    assert json.loads((tmp_path / "out" / "times.json").read_text()).keys() == {"one step"}
    assert (tmp_path / "out" / "logs" / "one_step.log").read_text() == "written\n"


def test_step_rejects_changed_settings(tmp_path):
    out = tmp_path / "out"
    Steps(out).run("one", python(APPEND, out / "file", "lr=1", "run=cpu"))
    Steps(tmp_path / "." / "out").run("one", python(APPEND, out / "file", "lr=1", "run=gpu1"))

    message = r"out holds one with other settings: it has lr=1, this command has lr=2\. .* choose another --out"
    with pytest.raises(UserError, match=message):
        Steps(out).run("one", python(APPEND, out / "file", "lr=2", "run=cpu"))
    assert (out / "file").read_text() == "x"


def test_failed_step_shows_its_last_line_and_runs_again(tmp_path):
    code = APPEND + "; import os; sys.exit('out of memory' if os.environ['RESULT'] == 'failure' else 0)"

    with pytest.raises(StepFailed, match=r"one failed \(exit code 1\): out of memory\n.* in .*one\.log"):
        Steps(tmp_path).run("one", python(code, tmp_path / "file"), environment={"RESULT": "failure"})
    Steps(tmp_path).run("one", python(code, tmp_path / "file"), environment={"RESULT": "success"})

    assert (tmp_path / "file").read_text() == "xx"


def test_step_that_exceeds_its_timeout_fails_and_runs_again(tmp_path):
    with pytest.raises(StepFailed, match=r"one failed \(exit code -15\)"):
        Steps(tmp_path).run("one", python("import time; time.sleep(60)"), timeout=1)
    Steps(tmp_path).run("one", python(APPEND, tmp_path / "file"), timeout=60)

    assert (tmp_path / "file").read_text() == "x"


def test_stop_terminates_running_steps_and_prevents_new_ones(tmp_path):
    steps = Steps(tmp_path)
    errors = []

    def run_long_step():
        try:
            steps.run("long", python("import time; print('started', flush=True); time.sleep(60)"))
        except StepFailed as error:
            errors.append(str(error))

    thread = threading.Thread(target=run_long_step)
    thread.start()
    while not steps._running:
        time.sleep(0.01)
    steps.stop()
    thread.join(timeout=20)

    assert not thread.is_alive()
    assert "long failed (exit code -15)" in errors[0]
    with pytest.raises(StepFailed, match="stopped"):
        steps.run("next", python("print()"))
    assert not steps.times


def test_progress_in_a_file_is_printed_as_lines(capsys, monkeypatch):
    monkeypatch.setattr(progress_bar, "SHORTEST", 0)
    monkeypatch.setattr(progress_bar, "SECONDS_BETWEEN_LINES", 0)

    with progress_bar.progress_bar("pre-train", 100, "update") as bar:
        show_update(bar, 10, "9.1")
        show_update(bar, 20, "8.5")

    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("pre-train:   0%|")
    assert any("| 20/100 [" in line and "loss 8.5 bits" in line for line in lines)
