"""Report what the user can fix in one line; anything else is a bug and keeps its traceback."""

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
    """Bad input: Hydra prints it without a traceback because of its base class, fairseq-train because of our patch."""


class TrainingError(InputError, FloatingPointError):
    """A training that cannot go on: NaN, infinite gradients, the minimum loss scale."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its name if it has none."""
    return next(iter(str(error).splitlines()), type(error).__name__)


@contextlib.contextmanager
def input_errors() -> Iterator[None]:
    """Turn the ValueErrors and missing files of building and loading into InputErrors."""
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
    """Turn the errors of torch.distributed for a worker that has ended or does not answer into a TrainingError."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.distributed.DistError) and "gloo" not in str(error):
            raise
        gloo = re.search(r"\.cc:\d+\] (.+?)(\. |$)", str(error))  # between its source line and its advice
        raise TrainingError(
            "another worker of this training has ended or does not answer, see what it said "
            f"({gloo[1] if gloo else first_line(error)})"
        ) from error


@contextlib.contextmanager
def exit_with_one_line() -> Iterator[None]:
    """Run a whole training such that it ends in one line.

    Ctrl-C and SIGTERM end it with exit code 130 or 143. A full disk, or a file that cannot be read or written, is an
    InputError. Under Hydra, which prints lines around an InputError that do not help, an InputError ends it here with
    exit code 1; but not in a sweep, whose other jobs are still to come, and not with HYDRA_FULL_ERROR=1.
    """
    try:
        with command.signals(), _disk_errors():
            yield
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
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
    """Return True if Hydra is asked for tracebacks."""
    return os.environ.get("HYDRA_FULL_ERROR", "0") == "1"


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if not error.filename and error.errno not in FULL_DISK:
            raise
        raise InputError(f"{error.filename or 'cannot write the logs'}: {error.strerror}") from error
