"""Test the version, the requirements and the content of the built package."""

import ast
import importlib.metadata
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
def package_metadata(monkeypatch):
    """The arguments of setup() in setup.py."""
    arguments = {}
    monkeypatch.setattr(setuptools, "setup", arguments.update)
    exec((ROOT / "setup.py").read_text(), {"__file__": str(ROOT / "setup.py")})
    return arguments


def test_version_is_the_same_everywhere(package_metadata):
    assert package_metadata["version"] == lln_fairseq.__version__
    assert f"\nversion: {lln_fairseq.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    releases = re.findall(r"^## \[([\d.]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert releases[0] == lln_fairseq.__version__


def test_requirements_have_upper_bounds(package_metadata):
    lines = [*package_metadata["install_requires"]]
    for extra in package_metadata["extras_require"].values():
        lines += extra
    for requirement in map(Requirement, lines):
        operators = {part.operator for part in requirement.specifier}
        assert operators & {"<", "=="}, requirement
        assert "9999" not in requirement.specifier, requirement


def test_readme_names_the_range_of_torch(package_metadata):
    low, last = re.search(r"keeps a torch from (2\.\d+) to (2\.\d+)", (ROOT / "README.md").read_text()).groups()
    after_last = f"2.{int(last.removeprefix('2.')) + 1}"
    assert f"torch>={low},<{after_last}" in package_metadata["install_requires"]


def test_pinned_versions_satisfy_requirements(package_metadata):
    pins = {}
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        if not line.startswith("#"):
            pin = Requirement(line)
            pins[pin.name] = pin
    required = [*package_metadata["install_requires"], *package_metadata["extras_require"]["onnx"]]
    for requirement in map(Requirement, required):
        pin = pins[requirement.name]
        (pinned_version,) = pin.specifier
        assert pinned_version.operator == "=="
        assert pinned_version.version in requirement.specifier, requirement
        assert requirement.marker == pin.marker


def imported_packages(path):
    """Yield the top-level packages of all absolute imports in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.split(".")[0]


def test_requirements_are_exactly_the_imported_packages(package_metadata):
    lines = [*package_metadata["install_requires"], *package_metadata["extras_require"]["onnx"]]
    required = {Requirement(line).name for line in lines}
    required -= {"onnxscript"}  # torch.onnx imports it
    imported = set()
    for folder in ("lln_fairseq", "data_prep"):
        for path in (ROOT / folder).rglob("*.py"):
            imported |= set(imported_packages(path))
    imported -= sys.stdlib_module_names
    imported -= {"lln_fairseq", "_typeshed"}  # only type checkers import the second one
    imported -= {"pyarrow", "sentence_transformers"}  # for Parquet and encoders: messages say how to install them
    distributions = importlib.metadata.packages_distributions()

    not_required = {package for package in imported if not required & set(distributions.get(package, ()))}
    assert not_required == set()
    imported_distributions = set()
    for package in imported:
        imported_distributions |= set(distributions[package])
    assert imported_distributions == required


@pytest.fixture(scope="module")
def built_package(tmp_path_factory):
    """Build the package and return the directory that contains it."""
    directory = tmp_path_factory.mktemp("built")
    subprocess.run([sys.executable, "setup.py", "-q", "build_py", "--build-lib", directory], cwd=ROOT, check=True)
    return directory


@pytest.mark.parametrize(
    ("folder", "packaged_folder"),
    [("lln_fairseq", ""), ("configs", "configs"), ("data_prep", "data_prep")],
)
def test_built_package_has_every_file_of_checkout(folder, packaged_folder, built_package):
    source = ROOT / folder
    target = built_package / "lln_fairseq" / packaged_folder
    files = [path for path in source.rglob("*.*") if path.is_file() and path.suffix != ".pyc"]

    assert files
    assert [path for path in files if not (target / path.relative_to(source)).is_file()] == []


def test_fairseq_commands_find_installed_package(built_package, tmp_path):
    """With the paths that the command in docs/training.md prints, and in any directory."""
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    (print_paths,) = re.findall(r"^python -c '(from lln_fairseq\.training\.recipes .*)'$", page, re.MULTILINE)
    options = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(built_package)}, "capture_output": True}

    paths = subprocess.run([sys.executable, "-c", print_paths], text=True, **options).stdout.split()

    flag, user_dir, config_flag, config_dir = paths
    assert [flag, config_flag] == ["--user-dir", "--config-dir"]
    recipe = [config_flag, config_dir, "--config-name", "pretrain", "run=cpu", "task.data=missing"]
    arguments = ["missing", flag, user_dir, "--arch", "lln_roberta_tiny", "--task", "lln_masked_lm", "--cpu"]
    arguments += ["--criterion", "masked_lm", "--optimizer", "adam", "--batch-size", "1"]
    for module, words in (("hydra_train", recipe), ("train", arguments)):
        program = f"from fairseq_cli.{module} import cli_main; cli_main()"
        result = subprocess.run([sys.executable, "-c", program, *words], text=True, **options)
        assert result.returncode == 1
        assert result.stderr.endswith("error: missing does not exist: prepare the data first, see docs/data.md\n")


def test_installed_data_preparation_runs(built_package, tmp_path):
    options = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(built_package)}, "text": True}
    words = [sys.executable, "-m", "lln_fairseq.data_prep.fetch"]
    assert "vaderSentiment-3.3.2.tar.gz" in subprocess.check_output(words, **options)
