"""One case: a subject is killed a few times, then finishes; nothing of it may be left alive, or differ."""

import os
import random
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kill.subjects import Subject

LONGEST_ORPHAN = 20  # seconds; a loader process looks for its parent every five, a compiler ends by itself


@dataclass
class Undisturbed:
    """What an undisturbed run takes and gives."""

    seconds: float
    result: Any
    output: str


def start(subject: Subject, folder: Path) -> int:
    """The process id of a run, which is a session of its own; its output is appended to FOLDER.log."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        log = os.open(f"{folder}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        subject.work(folder)
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def finish(subject: Subject, folder: Path) -> None:
    """A run to its end. AssertionError where it fails or prints a traceback.

    A loader process of a run that was killed may have printed one: multiprocessing misses who it was sending to.
    """
    before = len(output_of(folder))
    code = os.waitstatus_to_exitcode(os.waitpid(start(subject, folder), 0)[1])
    output = output_of(folder)[before:]
    assert code == 0, f"exit code {code}: ...{output[-1500:]}"
    assert "Traceback" not in output, output[output.index("Traceback") :]


def output_of(folder: Path) -> str:
    log = Path(f"{folder}.log")
    return log.read_text(errors="replace") if log.exists() else ""


def undisturbed(subject: Subject, folder: Path) -> Undisturbed:
    folder.mkdir()
    begin = time.monotonic()
    finish(subject, folder)
    return Undisturbed(time.monotonic() - begin, subject.result(folder), output_of(folder))


def attack(subject: Subject, expected: Undisturbed, rng: random.Random, folder: Path) -> int:
    """One case in a new folder; how many runs were killed before their end. Raises: AssertionError."""
    folder.mkdir()
    subject.vary(rng)
    killed = sum(kill(subject, folder, rng.uniform(0, expected.seconds)) for _ in range(rng.randint(1, 3)))
    finish(subject, folder)
    found = subject.result(folder)
    assert found == expected.result, f"{folder} is not what an undisturbed run leaves: {differences(found, expected)}"
    subject.check_output(output_of(folder), expected.output)
    return killed


def differences(found: Any, expected: Undisturbed) -> str:
    """Where a result differs, as far as its containers go alike."""
    a, b, where = found, expected.result, "result"
    while type(a) is type(b) and isinstance(a, dict | list | tuple) and len(a) == len(b):
        keys = list(a) if isinstance(a, dict) else range(len(a))
        if isinstance(a, dict) and a.keys() != b.keys():
            break
        key = next(key for key in keys if a[key] != b[key])
        a, b, where = a[key], b[key], f"{where}[{key!r}]"
    return f"{where} is {a!r:.300}, undisturbed {b!r:.300}"


def kill(subject: Subject, folder: Path, after: float) -> bool:
    """Starts a run and kills it after so many seconds; whether it was still running."""
    pid = start(subject, folder)
    time.sleep(after)
    os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    deadline = time.monotonic() + LONGEST_ORPHAN
    while left := alive(pid):
        assert time.monotonic() < deadline, f"processes {left} outlive the run {pid} that started them"
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def alive(session: int) -> list[int]:
    """The processes of a session, zombies left out."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, number = status.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it has just ended
            continue
        if int(number) == session and state != "Z":
            found.append(int(status.parent.name))
    return found
