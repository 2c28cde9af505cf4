"""How every program of ours ends. Standard library only: `lln-fairseq` imports this before all else.

0    done
1    a foreseeable failure, said in one line on stderr; any other exception is a bug and keeps its traceback
2    wrong usage (argparse)
130  Ctrl-C (SIGINT), in one line
143  SIGTERM, which ends a program in the same order as Ctrl-C
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

PARENT = "LLN_PARENT"  # process id of the program of ours that started this one
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
DEFAULT_HANDLERS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}

_received: int | None = None


class UserError(Exception):
    """Bad input or settings, in words for the user: printed as one line, without a traceback."""


def run_main(program: Callable[[], int | None], interrupted: str = "interrupted") -> int:
    """Run a program and return its exit code.

    UserError, OSError (a full disk, permissions) and a missing package end in one line on stderr, as do Ctrl-C and
    SIGTERM, with the line `interrupted` (none if empty).
    """
    if parent := os.environ.pop(PARENT, None):
        end_with(int(parent))
    if sys.stderr is None:  # closed by the shell: print and tqdm would fail, or write to standard output instead
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  until the process ends
    try:
        with signals():
            return program() or 0
    except ModuleNotFoundError as error:
        return _fail(f"error: {error} (pip install -r requirements.txt)")
    except (UserError, OSError) as error:
        return _fail("error: " + " ".join(str(error).split()))
    except KeyboardInterrupt:
        return _fail(interrupted, interrupt_code())


def _fail(line: str, code: int = 1) -> int:
    if line:
        print(line, file=sys.stderr)
    return code


@contextmanager
def signals() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt as SIGINT does, unless the caller has a handler of their own.

    Whatever exception ends the block after a signal is the interrupt: C code that imports or calls back turns a
    KeyboardInterrupt into its own errors. Processes of multiprocessing, which hear of Ctrl-C in a terminal but of no
    SIGTERM, are ended.
    """
    global _received
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _interrupt) for number in _free()}
    if before:
        _received = None
    try:
        yield
    except BaseException as error:
        if _received is None:
            raise
        for child in multiprocessing.active_children():
            child.terminate()
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise KeyboardInterrupt from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _free() -> list[int]:
    """The signals that nobody but Python and this file has a handler for: "nohup" and launchers have theirs."""
    return [number for number, default in DEFAULT_HANDLERS.items() if signal.getsignal(number) == default]


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    global _received
    _received = number
    raise KeyboardInterrupt


def interrupt_code() -> int:
    """The exit code after a KeyboardInterrupt: 143 if SIGTERM brought it, else 130."""
    return 128 + (_received or signal.SIGINT)


def end_with(parent: int) -> None:
    """Lets the kernel kill this process when its parent dies, kill -9 included, and ends it if that has happened.

    On Linux only. Elsewhere a child outlives a parent that is killed with -9; no other training gets into its
    directory meanwhile, see `lock_save_dir` in training/worker.py.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def child_environment() -> dict[str, str]:
    """The environment for a program of ours that is to end with this process."""
    return os.environ | {PARENT: str(os.getpid())}
