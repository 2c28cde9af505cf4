"""Run a program so that errors and signals end it with a fixed exit code and one line on stderr.

0    success
1    a foreseeable failure, described in one line on stderr; any other exception is a bug and keeps its traceback
2    wrong usage (argparse)
130  Ctrl-C (SIGINT), reported in one line
143  SIGTERM, which ends a program in the same way as Ctrl-C

This module imports only the standard library, because `lln-fairseq` imports it before everything else.
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

PARENT = "LLN_PARENT"  # environment variable with the id of the process that started this one with child_environment
PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
DEFAULT_HANDLERS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}

_received_signal: int | None = None


class UserError(Exception):
    """Wrong input or settings, described for the user: it is printed as one line, without a traceback."""


def run_main(program: Callable[[], int | None], interrupted: str = "interrupted") -> int:
    """Run a program and return its exit code.

    UserError, OSError (such as a full disk or missing permissions) and a missing package end the program with one line
    on stderr. Other exceptions are raised.

    Args:
        program: the program, which returns its exit code, or None for success.
        interrupted: the line that is printed after Ctrl-C or SIGTERM; empty prints none.
    """
    parent = os.environ.pop(PARENT, None)
    if parent:
        exit_with_parent(int(parent))
    if sys.stderr is None:  # closed by the shell: print and tqdm would fail or write to standard output instead
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  it stays open until the process ends
    try:
        with handle_signals():
            return program() or 0
    except ModuleNotFoundError as error:
        return _end_with_line(f"error: {error} (pip install -r requirements.txt)")
    except (UserError, OSError) as error:
        return _end_with_line("error: " + " ".join(str(error).split()))
    except KeyboardInterrupt:
        return _end_with_line(interrupted, interrupt_code())


def _end_with_line(line: str, code: int = 1) -> int:
    """Print a line on stderr unless it is empty, and return the exit code."""
    if line:
        print(line, file=sys.stderr)
    return code


@contextmanager
def handle_signals() -> Iterator[None]:
    """Make SIGTERM raise KeyboardInterrupt as SIGINT does, unless the caller installed a handler.

    After a signal, any exception that ends the context becomes a KeyboardInterrupt (SystemExit stays), because C code
    that calls back into Python can turn a KeyboardInterrupt into another exception. The child processes of
    multiprocessing are terminated then: Ctrl-C in a terminal reaches them, but SIGTERM does not.

    The handlers are restored at the end. Outside the main thread, where Python allows no handlers, nothing is changed.
    """
    global _received_signal
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handlers = {}
    for number, default in DEFAULT_HANDLERS.items():
        if signal.getsignal(number) == default:  # nohup and launchers have handlers of their own
            previous_handlers[number] = signal.signal(number, _raise_interrupt)
    if previous_handlers:
        _received_signal = None
    try:
        yield
    except BaseException as error:
        if _received_signal is None:
            raise
        for child in multiprocessing.active_children():
            child.terminate()
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise KeyboardInterrupt from None
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def _raise_interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Handle a signal: remember its number and raise KeyboardInterrupt."""
    global _received_signal
    _received_signal = number
    raise KeyboardInterrupt


def interrupt_code() -> int:
    """Return the exit code after a KeyboardInterrupt: 143 if SIGTERM caused it, otherwise 130."""
    return 128 + (_received_signal or signal.SIGINT)


def exit_with_parent(parent: int) -> None:
    """Kill this process now if its parent has died; on Linux, also let the kernel kill it when the parent dies later.

    On other systems, a process outlives a parent that is killed with SIGKILL. It keeps its lock on the directory of the
    run, so that no other run starts there.

    Args:
        parent: the process id that the parent must have.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def child_environment() -> dict[str, str]:
    """Return the environment for a child process that uses `run_main` and is to end with this process."""
    return os.environ | {PARENT: str(os.getpid())}
