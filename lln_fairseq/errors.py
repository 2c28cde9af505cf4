"""Exceptions for mistakes that the user can fix, and context managers that raise them.

These exceptions are reported to the user in one line, without a traceback.
"""

import contextlib
import errno
import os
import re
import sys
from collections.abc import Iterator

import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode

from lln_fairseq import command

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


class InputError(CompactHydraException, command.UserError, ValueError):
    """Wrong input or settings. All programs report it in one line, without a traceback.

    Each base class has a purpose: Hydra prints no traceback for a CompactHydraException, and `command.run_main` prints
    none for a UserError. In fairseq-train, a patch prints the line.
    """


class TrainingError(InputError, FloatingPointError):
    """A training run that cannot continue, for example because of NaN, infinite gradients or a lost worker."""


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or the name of its class if the message is empty."""
    lines = str(error).splitlines()
    if not lines:
        return type(error).__name__
    return lines[0]


@contextlib.contextmanager
def input_errors() -> Iterator[None]:
    """Turn a ValueError or FileNotFoundError in the `with` block into an InputError.

    Use this around code that builds models from options or loads files, where these exceptions are the user's mistakes.
    """
    try:
        yield
    except InputError:
        raise
    except FileNotFoundError as error:
        raise InputError(f"no such file: {error.filename or error}") from error
    except ValueError as error:
        raise InputError(str(error)) from error


@contextlib.contextmanager
def report_lost_workers() -> Iterator[None]:
    """Turn torch.distributed's errors about lost workers, in the `with` block, into a TrainingError.

    A lost worker has ended or does not answer. Other exceptions are raised unchanged.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.distributed.DistError) and "gloo" not in str(error):
            raise
        # The part of gloo's message between the line of its source code and its advice.
        gloo_reason = re.search(r"\.cc:\d+\] (.+?)(\. |$)", str(error))
        reason = gloo_reason[1] if gloo_reason else first_line(error)
        raise TrainingError(
            f"another worker of this training has ended or does not answer: see its own messages ({reason})"
        ) from error


@contextlib.contextmanager
def exit_with_one_line() -> Iterator[None]:
    """Make the training run in the `with` block end with one line instead of a traceback.

    Ctrl-C ends the run with exit code 130, SIGTERM with 143. A full disk, or a file that cannot be read or written,
    becomes an InputError.

    Under Hydra, an InputError is printed here and ends the run with exit code 1, because Hydra would print further
    lines around the error. The InputError is raised instead if Hydra is not used, if HYDRA_FULL_ERROR=1 is set, or in a
    sweep, so that Hydra continues with the next job.
    """
    try:
        with command.handle_signals(), _disk_errors():
            yield
    except KeyboardInterrupt:
        print("interrupted; run the same command again to resume from the last checkpoint", file=sys.stderr)
        raise SystemExit(command.interrupt_code()) from None
    except InputError as error:
        if not GlobalHydra.instance().is_initialized() or in_sweep() or full_errors():
            raise
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def in_sweep() -> bool:
    """Return True if this process runs a job of a Hydra sweep (--multirun)."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def full_errors() -> bool:
    """Return True if the environment has HYDRA_FULL_ERROR=1, with which the user asks Hydra for tracebacks."""
    return os.environ.get("HYDRA_FULL_ERROR", "0") == "1"


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    """Turn an OSError in the `with` block into an InputError if it names a file or the disk is full.

    Other OSErrors are raised unchanged.
    """
    try:
        yield
    except OSError as error:
        if not error.filename and error.errno not in FULL_DISK:
            raise
        raise InputError(f"{error.filename or 'cannot write the logs'}: {error.strerror}") from error
