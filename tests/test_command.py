"""How programs end: exit codes, signals, and no child that outlives its parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lln_fairseq import command
from lln_fairseq.command import UserError, run_main

ROOT = Path(__file__).parents[1]
SLEEPER = """
import time
from lln_fairseq.command import run_main

def program():
    print("here", flush=True)
    time.sleep(60)

run_main(program)
"""


def python(code, **options):
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, **options)  # fmt: skip


def raising(error):
    def program():
        raise error

    return program


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        (lambda: None, 0, ""),
        (lambda: 3, 3, ""),
        (raising(UserError("no such\n file")), 1, "error: no such file\n"),
        (raising(OSError(28, "No space left on device", "x")), 1, "error: [Errno 28] No space left on device: 'x'\n"),
        (raising(ModuleNotFoundError("No module named 'torch'")), 1,
         "error: No module named 'torch' (pip install -r requirements.txt)\n"),
        (raising(KeyboardInterrupt()), 130, "goes on\n"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), 143, "goes on\n"),
        (lambda: os.kill(os.getpid(), signal.SIGINT), 130, "goes on\n"),
    ],
)  # fmt: skip
def test_exit_codes(program, code, said, capsys):
    assert run_main(program, "goes on") == code
    assert capsys.readouterr().err == said
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_a_bug_keeps_its_traceback_also_after_an_interrupt_that_was_dealt_with():
    run_main(raising(KeyboardInterrupt()))
    with pytest.raises(ZeroDivisionError):
        run_main(lambda: 1 // 0)


def test_an_interrupt_that_became_another_error_is_one_line(capsys):
    def program():
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:  # as C code does that imports a module
            raise ImportError("numpy.core.multiarray failed to import") from None

    assert run_main(program) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_handler_of_the_caller_stays():
    calls = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    try:
        assert run_main(lambda: os.kill(os.getpid(), signal.SIGTERM)) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert calls == [signal.SIGTERM]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent was killed")
def test_a_child_does_not_outlive_a_parent_that_is_killed():
    parent = python(f"""
import subprocess, sys, time
from lln_fairseq.command import child_environment
child = subprocess.Popen([sys.executable, "-c", {SLEEPER!r}], env=child_environment(), stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
""")
    pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 10
    while alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def alive(pid):
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_child_whose_parent_died_before_it_could_ask_ends_at_once():
    orphan = python(SLEEPER, env=os.environ | {command.PARENT: "1"})
    assert orphan.communicate(timeout=30)[0] == ""
    assert orphan.returncode == -signal.SIGKILL
