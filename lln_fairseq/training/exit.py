"""End a training run with one line and a fixed exit code instead of a traceback."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from lln_fairseq import command
from lln_fairseq.errors import UserError

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def exit_with_one_line() -> Iterator[None]:
    """Make what runs in the `with` block end with one line instead of a traceback.

    Ctrl-C ends the run with exit code 130, SIGTERM with 143. A full disk, or a file that cannot be read or written,
    becomes a UserError.

    Under Hydra, a UserError is printed here and ends the run with exit code 1, because Hydra would print a traceback.
    The UserError is raised instead if Hydra is not used, if HYDRA_FULL_ERROR=1 is set, or in a sweep, so that Hydra
    continues with the next job.
    """
    try:
        with command.handle_signals(), _disk_errors():
            yield
    except KeyboardInterrupt:
        print("interrupted; run the same command again to resume from the last checkpoint", file=sys.stderr)
        raise SystemExit(command.interrupt_code()) from None
    except UserError as error:
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
    """Turn an OSError in the `with` block into a UserError if it names a file or the disk is full."""
    try:
        yield
    except OSError as error:
        if not error.filename and error.errno not in FULL_DISK:
            raise
        raise UserError(f"{error.filename or 'cannot write the logs'}: {error.strerror}") from error
