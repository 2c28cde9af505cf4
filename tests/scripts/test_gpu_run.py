"""Test scripts/gpu_run.sh with programs that take the place of Python: its report, and the folder that it packs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lln_fairseq.provenance import read_commit
from scripts.benchmarks import attention, model

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_run.sh"
# Writes the arguments of every module to its output; pytest fails.
PYTHON = """#!/bin/sh
if [ "$1" = -c ]; then echo "a GPU"; exit; fi
shift
echo "arguments: $*"
[ "$1" != pytest ]
"""
PIP = '#!/bin/sh\nwhile [ "$1" != --wheel-dir ]; do shift; done\nmkdir "$2"\n'


def run_script(folder, python, *arguments):
    (folder / "python").write_text(python)
    (folder / "python").chmod(0o755)
    environment = {**os.environ, "PYTHON": str(folder / "python")}
    return subprocess.run([SCRIPT, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(("version", "code"), [("3.5.1", 1), ("3.6.0", 0)])
def test_triton_is_refused_only_below_the_version_that_the_kernels_need(version, code, tmp_path, monkeypatch):
    (tmp_path / "triton.py").write_text(f"__version__ = '{version}'")
    torch = "version = cuda = SimpleNamespace(is_available=lambda: True, get_device_name=lambda: 'a GPU', cuda='13.0')"
    (tmp_path / "torch.py").write_text(f"from types import SimpleNamespace\n__version__ = '2.10.0'\n{torch}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    python = f'#!/bin/sh\n[ "$1" != -c ] || exec {sys.executable} "$@"\n'

    (tmp_path / "runs" / "gpu").mkdir(parents=True)
    (tmp_path / "runs" / "gpu" / "report.txt").write_text("earlier")

    done = run_script(tmp_path, python)

    assert done.returncode == code, done.stderr
    report = (tmp_path / "runs" / "gpu" / "report.txt").read_text()
    assert (report == "earlier") == bool(code)
    assert (f"commit {read_commit()[0]}, changed files: " in report) == (not code)
    assert ("error: the kernels need Triton" in done.stderr) == bool(code)


def test_report_has_every_step_also_after_a_failure(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the benchmarks check that the directory of their results exists
    done = run_script(tmp_path, PYTHON)

    assert done.returncode == 1
    report = (tmp_path / "runs" / "gpu" / "report.txt").read_text()
    assert report.startswith("a GPU\n")
    assert [line for line in report.splitlines() if line.startswith("==")] == [
        "== kernels: FAILED",
        "== attention: complete",
        "== update: complete",
    ]
    assert done.stdout.endswith(report)
    commands = [line.split()[1:] for line in report.splitlines() if line.startswith("arguments: ")]
    assert all(Path(word).is_file() for word in commands[0] if word.endswith(".py"))
    assert attention.parse_arguments(commands[1][1:]).dtype == "float16"
    assert model.parse_arguments(commands[2][1:]).preset == "base"


def test_packed_folder_holds_checkout_and_wheels(tmp_path):
    done = run_script(tmp_path, PIP, "--pack", "packed")

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "packed" / "scripts" / "gpu_run.sh").exists()
    assert (tmp_path / "packed" / "wheels").exists()
    assert read_commit(tmp_path / "packed") == read_commit()
