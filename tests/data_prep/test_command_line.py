"""Test what the user of a data program sees: exit codes, and errors as one line on stderr."""

import os
import subprocess

import pytest

from data_prep import demo
from tests.data_prep.conftest import VOCAB_SIZE


@pytest.fixture
def command(archive, capfd):
    """A function that runs the program and returns the exit code, stdout and the lines of stderr."""

    def call(*arguments):
        code = demo.main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return code, out, err.splitlines()

    return call


def test_command_line_builds_data(tmp_path, command, archive):
    code, out, _ = command("--out", tmp_path / "out", "--archive", archive, "--vocab-size", VOCAB_SIZE)

    assert code == 0
    assert "negative" in out


def test_command_line_errors_are_one_line(tmp_path, command, archive, monkeypatch):
    wrong = tmp_path / "wrong"
    wrong.write_bytes(b"no archive")
    failed_pip = subprocess.CompletedProcess([], 1, stdout="", stderr="ERROR: one\nERROR: no index\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed_pip)

    for arguments, message in (
        (["--out", tmp_path / "new/out", "--archive", wrong], "sha256"),
        (["--out", tmp_path / "new/out", "--archive", tmp_path / "none"], "No such file"),
        (["--out", tmp_path / "new/out"], "ERROR: no index"),
        (["--out", wrong / "out", "--archive", archive], "Not a directory"),
        (["--out", wrong, "--archive", archive], "File exists"),
    ):
        code, _, err = command(*arguments)

        assert (code, len(err)) == (1, 1)
        assert err[0].startswith("error: ")
        assert message in err[0]
        assert not (tmp_path / "new").exists()


def test_directory_without_write_permission_is_one_line(tmp_path, command, archive, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)

    code, _, err = command("--out", tmp_path / "new/out", "--archive", archive)

    assert (code, len(err)) == (1, 1)
    assert "Permission denied" in err[0]
    assert not (tmp_path / "new").exists()
