"""Keep checkpoints whole on the disk, whatever happens while they are written."""

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

from lln_fairseq.data.files import atomic_path
from lln_fairseq.errors import InputError, first_line

LAST = "checkpoint_last.pt"
LOCK = "training.lock"  # stays there: to remove it would let two trainings lock two files of that name

logger = logging.getLogger(__name__)


def lock_directory(
    save_dir: str | Path, what: str = "training", other: str = "directory (checkpoint.save_dir, --save-dir)"
) -> IO[str]:
    """Lock a directory until the returned file is closed, or the process ends in any way.

    Args:
        save_dir: the directory; if its file system has no locks, a warning is logged
        what: the kind of program that works in it, for messages
        other: what the user can give instead, for messages
    Raises: InputError if another process has it.
    """
    file = open(Path(save_dir, LOCK), "a+")  # noqa: SIM115  the caller closes it
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not flock, which loader processes would inherit and keep
    except (BlockingIOError, PermissionError):  # POSIX allows either
        file.seek(0)
        holder = file.read().strip() or "just started"
        file.close()
        raise InputError(
            f"{save_dir} belongs to a {what} that is running ({holder}): wait for its end, stop it with kill, or "
            f"give another {other}"
        ) from None
    except OSError as error:
        logger.warning(f"{save_dir} cannot be locked ({error.strerror}): do not start a second {what} in it")
        return file
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def atomic_copy(src_path: str, dst_path: str, overwrite: bool = False) -> bool:
    """Copy a file such that `dst_path` is always whole, the old or the new one, whatever kills the program.

    Raises: InputError if the file system refuses, for example because it is full; `dst_path` is then as before.
    """
    if os.path.exists(dst_path) and not overwrite:
        return False
    try:
        with atomic_path(Path(dst_path)) as part:
            shutil.copyfile(src_path, part)
    except OSError as error:
        raise _cannot_save(dst_path, error) from error
    return True


def save(original: Callable, obj: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
    """Call fairseq's torch_persistent_save, and raise InputError if the file cannot be written."""
    log = checkpoint_utils.logger
    was_disabled = log.disabled
    log.disabled = True  # it would print three tracebacks of the same full disk
    try:
        return original(obj, filename, *args, **kwargs)
    except (OSError, RuntimeError) as error:
        if not isinstance(filename, str):  # the open file of a call inside this one
            raise
        Path(f"{filename}.tmp").unlink(missing_ok=True)
        raise _cannot_save(filename, _root_cause(error)) from error
    finally:
        log.disabled = was_disabled


def remove_superseded(cfg: Any) -> None:
    """Remove the interval checkpoint that the last save of a run was killed before removing.

    More than one too many are of a run that was told to keep more; they stay, as do those that a pattern of updates
    keeps. `cfg` is fairseq's checkpoint configuration.
    """
    kept = cfg.keep_interval_updates
    if kept > 0 and cfg.keep_interval_updates_pattern == -1:
        found = checkpoint_utils.checkpoint_paths(cfg.save_dir, pattern=r"checkpoint_\d+_(\d+)\.pt")  # the newest first
        if len(found) == kept + 1:
            os.remove(found[-1])


def _cannot_save(path: str, error: BaseException) -> InputError:
    folder = os.path.dirname(os.path.abspath(path))
    if getattr(error, "errno", None) == errno.ENOENT or not os.path.isdir(folder):
        return InputError(
            f"cannot save {path}: {folder}, or what was being written in it, was removed by another program; the same "
            "command goes on from the last checkpoint that is left"
        )
    reason = getattr(error, "strerror", None) or first_line(error)
    free = shutil.disk_usage(folder).free / 1e6
    if os.path.isfile(os.path.join(folder, LAST)):
        advice = "the last checkpoint that was saved is whole: make room and give the same command again to resume it"
    else:
        advice = f"{folder} has no {LAST} yet: make room and give the same command again, which begins anew"
    return InputError(f"cannot save {path}: {reason} ({free:.0f} MB free); {advice}")


def _root_cause(error: BaseException) -> BaseException:
    while not isinstance(error, OSError) and error.__context__ is not None:
        error = error.__context__
    return error
