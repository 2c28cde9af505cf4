"""Files that appear under their name whole or not at all, and their checksums."""

import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on a clean exit it is fsynced and renamed, else removed.

    A file under its final name is therefore always complete, whatever kills the program. Creates the directory.
    An OSError without a file name (a full disk has none) gets `path` as its name. Two processes must not write the
    same path at once: see `lock`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename is None:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:  # the rename itself must survive a power cut too
        os.fsync(directory)
    finally:
        os.close(directory)


def lock(handle: int, wait: bool = False) -> bool:
    """Lock an open file or directory until it is closed; False where another process has it and we do not `wait`.

    On a file system without locks it is True: processes are the user's to keep apart there.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
    return True


def write_bytes(path: Path, data: bytes) -> None:
    """Write the whole file atomically; a file that already holds these bytes is left as it is."""
    if path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data:
        return
    with atomic_path(path) as part:
        part.write_bytes(data)


def sha256_of(path: Path) -> str:
    """sha256 of a file, lower-case hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_bytes(data: bytes) -> str:
    """sha256 of these bytes, lower-case hex."""
    return hashlib.sha256(data).hexdigest()
