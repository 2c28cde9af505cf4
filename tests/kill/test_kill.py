"""Run tests.kill briefly, in a separate process: a fork of this process, whose libraries have threads, may hang."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.exhaustive
def test_killed_programs_finish_with_the_same_result():
    command = [sys.executable, "-m", "tests.kill", "--kills", "3"]

    result = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)

    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("no difference") == 2
