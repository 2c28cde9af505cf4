"""A few kills in a process of its own, for a fork of this one, whose libraries have threads, may hang."""

import subprocess
import sys
from pathlib import Path


def test_killed_programs_finish_with_the_same_result():
    command = [sys.executable, "-m", "tests.kill", "--kills", "3"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("no difference") == 2
