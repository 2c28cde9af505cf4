"""Run a program so that errors and signals end it with a fixed exit code and one line on stderr.

The exit codes are:

0    success
1    a foreseeable failure, described in one line on stderr; any other exception is a bug and keeps its traceback
2    wrong usage (argparse)
130  Ctrl-C (SIGINT), reported in one line
141  nobody reads standard output any more (`lln-fairseq predict ... | head`)
143  SIGTERM, which ends a program in the same way as Ctrl-C

This module imports nothing heavy, because `lln-fairseq` imports it before everything else.
"""

import ctypes
import multiprocessing
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from lln_fairseq.errors import UserError

PARENT = "LLN_PARENT"  # environment variable with the id of the process that started this one with child_environment
PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
DEFAULT_HANDLERS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}

_received_signal: int | None = None


def run_main(program: Callable[[], int | None], interrupted: str = "interrupted") -> int:
    """Run a program and return its exit code, see the module docstring.

    A UserError, an OSError (such as a full disk or missing permissions) or a missing package ends the program with one
    line on stderr and exit code 1. If nobody reads standard output any more (`... | head`), the program ends without a
    word. Other exceptions are raised. If the environment comes from `child_environment`, this process ends together
    with its parent.

    Args:
        program: the program, which returns its exit code, or None for success.
        interrupted: the line to print on stderr after Ctrl-C or SIGTERM. If it is empty, nothing is printed.
    """
    parent = os.environ.pop(PARENT, None)
    if parent:
        exit_with_parent(int(parent))
    try:
        with handle_signals():
            return program() or 0
    except ModuleNotFoundError as error:
        return _end_with_line(f"error: {error} (pip install -r requirements.txt)")
    except BrokenPipeError as error:
        if _discard_output():
            return 128 + signal.SIGPIPE
        return _end_with_line(f"error: {error}")
    except (UserError, OSError) as error:
        message = str(error)
        if isinstance(error, OSError) and error.filename is not None:
            message = f"{error.filename}: {error.strerror}"
        return _end_with_line("error: " + " ".join(message.split()))
    except KeyboardInterrupt:
        return _end_with_line(interrupted, interrupt_code())


def _discard_output() -> bool:
    """Return True if standard output is a pipe that nobody reads, and send what is left in its buffer nowhere."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if not any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it exits
    return True


def _end_with_line(line: str, code: int = 1) -> int:
    if line:
        print(line, file=sys.stderr)
    return code


@contextmanager
def handle_signals() -> Iterator[None]:
    """Make SIGTERM raise KeyboardInterrupt in the `with` block, as SIGINT (Ctrl-C) does.

    A signal for which the process already has a handler keeps that handler. At the end of the block, the handlers are
    restored. Outside the main thread, where Python allows no handlers, nothing is changed.

    After a signal, any exception that leaves the block becomes a KeyboardInterrupt, except SystemExit. The reason is
    that C code that calls back into Python can turn a KeyboardInterrupt into another exception. The child processes of
    multiprocessing are then terminated, because SIGTERM does not reach them (Ctrl-C in a terminal does).
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
    """Handle a signal: remember its number for `interrupt_code`, and raise KeyboardInterrupt."""
    global _received_signal
    _received_signal = number
    raise KeyboardInterrupt


def interrupt_code() -> int:
    """Return the exit code after a KeyboardInterrupt: 143 if SIGTERM caused it, otherwise 130."""
    return 128 + (_received_signal or signal.SIGINT)


def exit_with_parent(parent: int) -> None:
    """Make this process end together with its parent, and kill it at once if the parent has already died.

    This works on Linux, where the kernel kills the process. On other systems, only the check at the call is made: the
    process outlives a parent that is killed later with SIGKILL. It then still holds its lock on the directory of the
    run, so no other run starts there.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def child_environment() -> dict[str, str]:
    """Return the environment to pass to a child process. If the child uses `run_main`, it ends with this process."""
    return os.environ | {PARENT: str(os.getpid())}
