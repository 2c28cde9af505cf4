"""End a training run with one line and a fixed exit code instead of a traceback."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator

from hydra.core.global_hydra import GlobalHydra

from lln_fairseq import command
from lln_fairseq.errors import UserError

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def exit_with_one_line() -> Iterator[None]:
    """Make what runs in the `with` block end with one line instead of a traceback.

    Ctrl-C ends the run with exit code 130, SIGTERM with 143. A full disk, or a file that cannot be read or written,
    becomes a UserError.

    Under Hydra, a UserError is printed here and ends the run with exit code 1, because Hydra would print a traceback.
    The UserError is raised instead if Hydra is not used, or if HYDRA_FULL_ERROR=1 asks Hydra for tracebacks.
    """
    try:
        with command.handle_signals(), _disk_errors():
            yield
    except KeyboardInterrupt:
        print("interrupted; run the same command again to resume from the last checkpoint, if any", file=sys.stderr)
        raise SystemExit(command.interrupt_code()) from None
    except UserError as error:
        if not GlobalHydra.instance().is_initialized() or os.environ.get("HYDRA_FULL_ERROR", "0") == "1":
            raise
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    """Turn an OSError in the `with` block into a UserError if it names a file or the disk is full."""
    try:
        yield
    except OSError as error:
        if not error.filename and error.errno not in FULL_DISK:
            raise
        raise UserError(f"{error.filename or 'cannot write the logs'}: {error.strerror}") from error
