"""One training at a time in a save_dir: two would overwrite each other's checkpoints."""

import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from fairseq import checkpoint_utils
from fairseq.distributed import utils as distributed_utils

from lln_fairseq.errors import InputError

FILE = "training.lock"  # stays there: to remove it would let two trainings lock two files of that name

logger = logging.getLogger(__name__)


@contextmanager
def one_training(cfg: Any) -> Iterator[None]:
    """Locks the save_dir of a fairseq configuration. The kernel releases the lock when the process ends, in any way.

    The first of several workers locks for all of them. A file system without locks: one warning.
    Raises: InputError where another training has the directory.
    """
    distributed_utils.infer_init_method(cfg.distributed_training)  # the rank; call_main does it next
    training = cfg.model is not None  # fairseq-validate and others only read
    if not training or cfg.checkpoint.no_save or cfg.distributed_training.distributed_rank != 0:
        yield
        return
    checkpoint_utils.verify_checkpoint_directory(cfg.checkpoint.save_dir)
    with lock(cfg.checkpoint.save_dir):
        yield


def lock(
    save_dir: str | Path, what: str = "training", other: str = "directory (checkpoint.save_dir, --save-dir)"
) -> IO[str]:
    """Locks a directory until the file that is returned is closed.

    `what` is at work in it, and is told that another one has it: `other` is what it can be given then.
    Raises: InputError where another one has it.
    """
    file = open(Path(save_dir, FILE), "a+")  # noqa: SIM115  the caller closes it
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
