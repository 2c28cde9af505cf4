"""Write files atomically, lock files, and compute checksums."""

import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path for the `with` block to write a file to. At its end, rename the file to `path`.

    The file is flushed to the disk before it is renamed. So if `path` exists, it is complete, even after a crash. If
    the block raises an exception, the temporary file is removed, and an existing `path` is unchanged. The directory of
    `path` is created if necessary. Two processes must not write the same path at the same time; see `lock_file`.

    Raises:
        OSError: if the file cannot be written. The error always names a file, also for a full disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename is None:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:  # the rename must survive a power failure too
        os.fsync(directory)
    finally:
        os.close(directory)


def lock_file(handle: int, wait: bool = False) -> bool:
    """Lock an open file or directory until it is closed.

    Args:
        handle: the file descriptor.
        wait: if another process holds the lock, wait until it closes the file.

    Returns:
        True if the lock was obtained, or if the file system does not support locks. False if another process holds the
        lock and `wait` is False.
    """
    operation = fcntl.LOCK_EX
    if not wait:
        operation |= fcntl.LOCK_NB
    try:
        fcntl.flock(handle, operation)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
    return True


def write_bytes(path: Path, data: bytes) -> None:
    """Write the data to `path` atomically, see `atomic_path`. A file that already has this content is not touched."""
    if path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data:
        return
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 checksum of a file in lower-case hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_bytes(data: bytes) -> str:
    """Return the SHA-256 checksum of `data` in lower-case hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()
