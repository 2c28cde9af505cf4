"""Test what a file of results says of its origin: the commit, changed files, versions and the machine."""

import json
import subprocess

import numpy
import pytest
import torch

from lln_fairseq import provenance


def git(folder, *words):
    identity = ("-c", "user.name=n", "-c", "user.email=e")
    done = subprocess.run(["git", "-C", folder, *identity, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """Return a repository with one commit that has the package and a page."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("lln_fairseq/__init__.py", "docs/page.md"):
        (folder / name).parent.mkdir()
        (folder / name).touch()
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return folder


def test_commit_comes_with_the_changed_files_that_results_depend_on(checkout):
    commit = git(checkout, "rev-parse", "HEAD")
    assert provenance.read_commit(checkout) == (commit, [])

    (checkout / "docs" / "page.md").write_text("a new result")
    (checkout / "lln_fairseq" / "__init__.py").write_text("changed")
    (checkout / "lln_fairseq" / "prototype.py").touch()

    assert provenance.read_commit(checkout) == (commit, ["lln_fairseq/__init__.py", "lln_fairseq/prototype.py"])


def test_package_inside_another_repository_has_no_commit(checkout):
    installed = checkout / "environment"
    (installed / "lln_fairseq").mkdir(parents=True)
    (installed / "lln_fairseq" / "__init__.py").touch()

    assert provenance.read_commit(installed) == (None, None)


def test_packed_copy_keeps_commit_and_changed_files(tmp_path):
    (tmp_path / provenance.COMMIT_FILE).write_text("abc\n M lln_fairseq/files.py\n?? lln_fairseq/prototype.py\n")

    assert provenance.read_commit(tmp_path) == ("abc", ["lln_fairseq/files.py", "lln_fairseq/prototype.py"])


def test_result_has_versions_and_machine_and_a_row_per_line(tmp_path):
    rows = [{"attention": "lln", "seed": seed} for seed in (1, 2)]

    provenance.write_result(tmp_path / "a.json", {"rows": rows}, provenance.describe_provenance())

    text = (tmp_path / "a.json").read_text()
    result = json.loads(text)
    origin = result.pop("provenance")
    assert result == {"rows": rows}
    assert ' {"attention": "lln", "seed": 1},\n' in text
    assert {"torch": torch.__version__, "numpy": numpy.__version__}.items() <= origin["versions"].items()
    assert {"python", "ve-fairseq"} <= origin["versions"].keys()
    assert origin["processor"]
    assert origin["threads"] == torch.get_num_threads()
    assert bool(origin["gpu"]) == torch.cuda.is_available()
