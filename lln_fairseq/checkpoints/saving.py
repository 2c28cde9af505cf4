"""Save checkpoints atomically, and lock the directory of a run."""

import errno
import fcntl
import logging
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from fairseq import checkpoint_utils

from lln_fairseq.errors import UserError, first_line
from lln_fairseq.files import atomic_path

LAST = "checkpoint_last.pt"
LOCK = "training.lock"  # never removed: otherwise two runs could lock two different files of this name

logger = logging.getLogger(__name__)


def lock_directory(
    save_dir: str | Path, what: str = "training", other: str = "directory (checkpoint.save_dir, --save-dir)"
) -> IO[str]:
    """Lock an existing directory until the returned file is closed or the process ends.

    The caller must keep a reference to the file, because Python closes an unused one. If another process has locked the
    directory, UserError is raised, whose message calls the program `what` and ends with the advice "give another
    `other`". If its file system has no locks, a warning is logged and nothing is locked.
    """
    file = open(Path(save_dir, LOCK), "a+")  # noqa: SIM115  the caller closes it
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not flock, which data loader processes would inherit
    except (BlockingIOError, PermissionError):  # POSIX allows either
        file.seek(0)
        holder = file.read().strip() or "just started"
        file.close()
        raise UserError(
            f"{save_dir} belongs to a {what} that is running ({holder}): wait until it ends, stop it with "
            f"kill, or give another {other}"
        ) from None
    except OSError as error:
        logger.warning(f"{save_dir} cannot be locked ({error.strerror}): do not start a second {what} in it")
        return file
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def atomic_copy(original: Callable, src_path: str, dst_path: str, overwrite: bool = False) -> bool:
    """Copy a file atomically: `dst_path` is always a complete file, either the old or the new one, even after a kill.

    The result is False if `dst_path` exists and `overwrite` is False. If writing fails, for example because the disk is
    full, UserError is raised and `dst_path` is unchanged. `original`, fairseq's PathManager.copy, is not called.
    """
    if os.path.exists(dst_path) and not overwrite:
        return False
    try:
        with atomic_path(Path(dst_path)) as part:
            shutil.copyfile(src_path, part)
    except OSError as error:
        raise _save_error(dst_path, error) from error
    return True


def save(original: Callable, obj: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
    """Call fairseq's torch_persistent_save, and report a failure in one message instead of three tracebacks.

    If the file at a path cannot be written, UserError is raised and its temporary file is removed. fairseq's function
    calls itself again with an open file as `filename`; then errors are raised unchanged.
    """
    log = checkpoint_utils.logger
    was_disabled = log.disabled
    log.disabled = True  # it would log a traceback for each of three attempts
    try:
        return original(obj, filename, *args, **kwargs)
    except (OSError, RuntimeError) as error:
        if not isinstance(filename, str):
            raise
        Path(f"{filename}.tmp").unlink(missing_ok=True)
        raise _save_error(filename, _root_cause(error)) from error
    finally:
        log.disabled = was_disabled


def _save_error(path: str, error: BaseException) -> UserError:
    """Return the error to raise if `path` cannot be written. Its message has the reason and says how to resume."""
    directory = os.path.dirname(os.path.abspath(path))
    if getattr(error, "errno", None) == errno.ENOENT or not os.path.isdir(directory):
        return UserError(
            f"cannot save {path}: {directory}, or a file being written in it, was removed by another program; run the "
            "same command again to resume from the last checkpoint that is left"
        )
    reason = getattr(error, "strerror", None) or first_line(error)
    free_megabytes = shutil.disk_usage(directory).free / 1e6
    if os.path.isfile(os.path.join(directory, LAST)):
        advice = (
            "the last saved checkpoint is complete: free some space and run the same command again to resume from it"
        )
    else:
        advice = f"{directory} has no {LAST} yet: free some space and run the same command again to start anew"
    return UserError(f"cannot save {path}: {reason} ({free_megabytes:.0f} MB free); {advice}")


def _root_cause(error: BaseException) -> BaseException:
    """Return the first OSError in the `__context__` chain of `error`, or the last error if there is none."""
    while not isinstance(error, OSError) and error.__context__ is not None:
        error = error.__context__
    return error
