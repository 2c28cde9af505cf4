"""A few kills of each kind; `python -m tests.kill` is the long version."""

import os
import subprocess
import sys
from pathlib import Path


def test_what_is_killed_finishes_with_the_same_result():
    # in a process of its own: a fork of this one, whose libraries have threads, may hang
    done = subprocess.run([sys.executable, "-m", "tests.kill", "--kills", "6"], cwd=Path(__file__).parents[2],
                          env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kills, no difference" in done.stdout
