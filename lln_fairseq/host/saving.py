"""Checkpoints are whole on the disk, whatever happens while they are written."""

import errno
import os
import shutil
from collections.abc import Callable
from typing import Any

from fairseq import checkpoint_utils

from lln_fairseq.host.errors import InputError, first_line
from lln_fairseq.host.settings import LAST


def atomic_copy(src_path: str, dst_path: str, overwrite: bool = False) -> bool:
    """Copies a file such that `dst_path` is the old or the new one, whole, whatever kills the program.

    Raises: InputError where the file system refuses, for example because it is full; `dst_path` is then as before.
    """
    part = f"{dst_path}.tmp"
    if os.path.exists(dst_path) and not overwrite:
        return False
    try:
        shutil.copyfile(src_path, part)
        with open(part, "rb") as file:
            os.fsync(file.fileno())
        os.replace(part, dst_path)
    except OSError as error:
        _remove(part)
        raise _cannot_save(dst_path, error) from error
    return True


def save(original: Callable, obj: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
    """Around fairseq's torch_persistent_save, which is given an open file too. Raises: InputError."""
    log = checkpoint_utils.logger
    quiet, log.disabled = log.disabled, True  # three tracebacks of the same full disk
    try:
        return original(obj, filename, *args, **kwargs)
    except (OSError, RuntimeError) as error:
        if isinstance(filename, str):
            _remove(f"{filename}.tmp")
            raise _cannot_save(filename, _root_cause(error)) from error
        raise
    finally:
        log.disabled = quiet


def remove_superseded(cfg: Any) -> None:
    """What the last save of a run removes at its very end, where it was killed before that: the one interval checkpoint
    that is too many. `cfg`: fairseq's checkpoint configuration.

    More than one are of a run that was told to keep more; they stay, as do those that a pattern of updates keeps.
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
    reason, free = getattr(error, "strerror", None) or first_line(error), shutil.disk_usage(folder).free / 1e6
    if os.path.isfile(os.path.join(folder, LAST)):
        advice = "the last checkpoint that was saved is whole: make room and give the same command again to resume it"
    else:
        advice = f"{folder} has no {LAST} yet: make room and give the same command again, which begins anew"
    return InputError(f"cannot save {path}: {reason} ({free:.0f} MB free); {advice}")


def _root_cause(error: BaseException) -> BaseException:
    while not isinstance(error, OSError) and error.__context__ is not None:
        error = error.__context__
    return error


def _remove(path: str) -> None:
    if os.path.exists(path):
        os.remove(path)
