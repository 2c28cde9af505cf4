"""How programs end: exit codes, signals, and children that end with their parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lln_fairseq import command
from lln_fairseq.command import run_main
from lln_fairseq.errors import UserError

ROOT = Path(__file__).parents[1]
SLEEPING_PROGRAM = """
import time
from lln_fairseq.command import run_main

def program():
    print("started", flush=True)
    time.sleep(60)

run_main(program)
"""


def start_python(code, **options):
    """Start a Python process that runs `code` in the root directory, with pipes for its output."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def raising(error):
    """Return a program that raises the exception."""

    def program():
        raise error

    return program


@pytest.mark.parametrize(
    ("program", "code", "message"),
    [
        (lambda: None, 0, ""),
        (lambda: 3, 3, ""),
        (raising(UserError("no such\n file")), 1, "error: no such file\n"),
        (raising(OSError(28, "No space left on device", "x")), 1, "error: x: No space left on device\n"),
        (raising(OSError(28, "No space left on device")), 1, "error: [Errno 28] No space left on device\n"),
        (
            raising(ModuleNotFoundError("No module named 'torch'")),
            1,
            "error: No module named 'torch' (pip install -r requirements.txt)\n",
        ),
        (raising(KeyboardInterrupt()), 130, "stopped\n"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), 143, "stopped\n"),
        (lambda: os.kill(os.getpid(), signal.SIGINT), 130, "stopped\n"),
    ],
)
def test_end_of_program_sets_exit_code_and_message(program, code, message, capsys):
    assert run_main(program, interrupted="stopped") == code
    assert capsys.readouterr().err == message
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_bug_keeps_traceback_after_earlier_interrupt():
    run_main(raising(KeyboardInterrupt()))
    with pytest.raises(ZeroDivisionError):
        run_main(lambda: 1 // 0)


def test_interrupt_that_became_other_error_is_reported_as_interrupt(capsys):
    def program():
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:  # C code that imports a module does this
            raise ImportError("numpy.core.multiarray failed to import") from None

    assert run_main(program) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_handler_of_caller_is_kept():
    calls = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    try:
        assert run_main(lambda: os.kill(os.getpid(), signal.SIGTERM)) == 0
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert calls == [signal.SIGTERM]


def is_alive(pid):
    """Return True for a process that exists and is not a zombie."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent was killed")
def test_child_ends_with_killed_parent():
    parent = start_python(f"""
import subprocess, sys, time
from lln_fairseq.command import child_environment
code = {SLEEPING_PROGRAM!r}
child = subprocess.Popen([sys.executable, "-c", code], env=child_environment(), stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
""")
    child = int(parent.stdout.readline())
    assert is_alive(child)

    parent.kill()
    parent.communicate()

    deadline = time.monotonic() + 10
    while is_alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_child_of_dead_parent_ends_at_once():
    orphan = start_python(SLEEPING_PROGRAM, env=os.environ | {command.PARENT: "1"})
    output, _ = orphan.communicate(timeout=30)
    assert output == ""
    assert orphan.returncode == -signal.SIGKILL
