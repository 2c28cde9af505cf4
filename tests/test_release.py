"""One version, wherever it is written; and what a wheel holds."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import setuptools

import lln_fairseq

ROOT = Path(__file__).parents[1]


def test_the_version_is_the_same_everywhere(monkeypatch):
    packaged = {}
    monkeypatch.setattr(setuptools, "setup", packaged.update)
    exec((ROOT / "setup.py").read_text(), {"__file__": str(ROOT / "setup.py")})
    assert packaged["version"] == lln_fairseq.__version__
    assert f"\nversion: {lln_fairseq.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    released = re.findall(r"^## \[([\d.]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[0] == lln_fairseq.__version__


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """installed(module, ...) -> what a program of the built package prints, in a directory without a checkout."""
    built, empty = tmp_path_factory.mktemp("built"), tmp_path_factory.mktemp("empty")
    subprocess.run([sys.executable, "setup.py", "-q", "build_py", "--build-lib", built], cwd=ROOT, check=True)

    def run(*command):
        done = subprocess.run([sys.executable, "-m", *command], cwd=empty, env=os.environ | {"PYTHONPATH": str(built)},
                              capture_output=True, text=True, timeout=120)  # fmt: skip
        assert done.stderr == ""
        return done.stdout.replace(str(built), "BUILT")

    run.directory = built / "lln_fairseq"
    return run


def test_a_wheel_holds_all_that_the_checkout_has(installed):
    for folder, here in (("", ROOT / "lln_fairseq"), ("configs", ROOT / "configs"), ("data_prep", ROOT / "data_prep")):
        files = [path.relative_to(here) for path in here.rglob("*.*")
                 if path.is_file() and path.suffix != ".pyc"]  # fmt: skip
        assert files
        assert [name for name in files if not (installed.directory / folder / name).is_file()] == []


def test_an_installed_training_finds_its_recipes_and_itself(installed):
    said = installed("lln_fairseq.train", "--config-name", "pretrain", "--cfg", "job", "--resolve", "model=tiny",
                     "corpus=demo", "run=cpu")  # fmt: skip
    assert "_name: lln_roberta_tiny" in said
    assert "user_dir: BUILT/lln_fairseq\n" in said


def test_an_installed_data_preparation_runs(installed):
    assert "vaderSentiment-3.3.2.tar.gz" in installed("lln_fairseq.data_prep.fetch")
