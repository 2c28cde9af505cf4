"""Exceptions for mistakes that the user can fix, which are reported in one line, and helpers that raise them."""

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
    """Wrong input or settings. No program prints a traceback for it.

    Hydra prints a CompactHydraException without one, fairseq-train is patched to, and run_main handles a UserError.
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
    """Turn a ValueError or FileNotFoundError inside the context into an InputError.

    It is meant for code that builds models from options or loads files, where such an exception is the user's mistake.
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
    """Turn the errors of torch.distributed about a worker that ended or does not answer into a TrainingError.

    Other RuntimeErrors are raised as they are.
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
    """End a training run with one line instead of a traceback.

    Ctrl-C and SIGTERM end it with exit code 130 or 143. A full disk, or a file that cannot be read or written, becomes
    an InputError. Under Hydra, which prints further lines around an InputError, an InputError is printed here and ends
    the run with exit code 1. It is raised instead in a sweep, which continues with its next job, and with
    HYDRA_FULL_ERROR=1.
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
    """Return True in a job of a Hydra sweep (--multirun)."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def full_errors() -> bool:
    """Return True if the user asks Hydra for tracebacks with HYDRA_FULL_ERROR=1."""
    return os.environ.get("HYDRA_FULL_ERROR", "0") == "1"


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    """Turn an OSError that names a file, or is about a full disk, into an InputError; raise others as they are."""
    try:
        yield
    except OSError as error:
        if not error.filename and error.errno not in FULL_DISK:
            raise
        raise InputError(f"{error.filename or 'cannot write the logs'}: {error.strerror}") from error
