"""One version, wherever it is written; what is required; what a wheel holds."""

import ast
import importlib.metadata
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import setuptools
from packaging.requirements import Requirement

import lln_fairseq

ROOT = Path(__file__).parents[1]


@pytest.fixture
def packaged(monkeypatch):
    """What setup.py says."""
    said = {}
    monkeypatch.setattr(setuptools, "setup", said.update)
    exec((ROOT / "setup.py").read_text(), {"__file__": str(ROOT / "setup.py")})
    return said


def test_the_version_is_the_same_everywhere(packaged):
    assert packaged["version"] == lln_fairseq.__version__
    assert f"\nversion: {lln_fairseq.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    released = re.findall(r"^## \[([\d.]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[0] == lln_fairseq.__version__


def test_no_package_is_taken_in_a_version_that_nobody_tried(packaged):
    extras = packaged["extras_require"].values()
    for requirement in map(Requirement, [*packaged["install_requires"], *itertools.chain(*extras)]):
        assert {"<", "=="} & {part.operator for part in requirement.specifier}, requirement
        assert "9999" not in requirement.specifier, requirement


def test_the_tested_set_lies_within_the_ranges(packaged):
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pinned = {pin.name: pin for pin in map(Requirement, (line for line in lines if not line.startswith("#")))}
    for requirement in map(Requirement, [*packaged["install_requires"], *packaged["extras_require"]["onnx"]]):
        (pin,) = pinned[requirement.name].specifier
        assert pin.operator == "=="
        assert pin.version in requirement.specifier, requirement
        assert requirement.marker == pinned[requirement.name].marker


def imported(path):
    """The packages that a file imports from anywhere but its own."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.split(".")[0]


def test_what_is_imported_is_required(packaged):
    required = {Requirement(line).name for line in [*packaged["install_requires"], *packaged["extras_require"]["onnx"]]}
    required -= {"onnxscript"}  # torch.onnx imports it
    owners = importlib.metadata.packages_distributions()
    files = [path for top in ("lln_fairseq", "data_prep") for path in (ROOT / top).rglob("*.py")]
    modules = {module for path in files for module in imported(path)} - sys.stdlib_module_names
    modules -= {"lln_fairseq", "_typeshed"}  # the second is for type checkers alone
    assert {module for module in modules if not required & {*owners.get(module, ())}} == set()
    assert {owner for module in modules for owner in owners[module]} == required


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """installed(module, ...) -> what a program of the built package prints, in a directory without a checkout."""
    built, empty = tmp_path_factory.mktemp("built"), tmp_path_factory.mktemp("empty")
    subprocess.run([sys.executable, "setup.py", "-q", "build_py", "--build-lib", built], cwd=ROOT, check=True)

    def run(*command):
        done = subprocess.run([sys.executable, "-m", *command], cwd=empty, env=os.environ | {"PYTHONPATH": str(built)},
                              capture_output=True, text=True, timeout=120)  # fmt: skip
        assert done.returncode == 0, done.stderr
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
    said = installed("lln_fairseq", "train", "--config-name", "pretrain", "--cfg", "job", "--resolve", "model=tiny",
                     "corpus=demo", "run=cpu")  # fmt: skip
    assert "_name: lln_roberta_tiny" in said
    assert "user_dir: BUILT/lln_fairseq\n" in said


def test_an_installed_data_preparation_runs(installed):
    assert "vaderSentiment-3.3.2.tar.gz" in installed("lln_fairseq.data_prep.fetch")
