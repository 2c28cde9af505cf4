"""End a training run with one line and a fixed exit code instead of a traceback."""

import contextlib
import errno
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from lln_fairseq import command
from lln_fairseq.checkpoints.saving import LOCK
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
        remove_logs_of_refused_run()
        raise SystemExit(1) from None


def remove_logs_of_refused_run() -> None:
    """Under Hydra, remove the logs of this start from the save_dir of a run that has nothing but logs.

    The save_dir is removed, too, unless another start of the run has logs there.
    """
    if not HydraConfig.initialized():
        return
    logs = Path(HydraConfig.get().runtime.output_dir)  # SAVE_DIR/hydra/DATE in our recipes
    all_logs = logs.parent
    save_dir = all_logs.parent
    if all_logs.name != "hydra" or {path.name for path in save_dir.iterdir()} - {all_logs.name, LOCK}:
        return
    shutil.rmtree(logs)
    with contextlib.suppress(OSError):  # raised if there are logs of another start, which may be running
        all_logs.rmdir()
        (save_dir / LOCK).unlink(missing_ok=True)
        save_dir.rmdir()


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    """Turn an OSError in the `with` block into a UserError if it names a file or the disk is full."""
    try:
        yield
    except OSError as error:
        if not error.filename and error.errno not in FULL_DISK:
            raise
        raise UserError(f"{error.filename or 'cannot write the logs'}: {error.strerror}") from error
