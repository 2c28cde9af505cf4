"""Write files atomically, lock files, and compute checksums."""

import errno
import fcntl
import glob
import hashlib
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WHOLE_FILE = 64 << 20  # bytes; `data_hash` samples larger .bin files
CHUNK = 1 << 18  # bytes per sample
CHUNKS = 64  # samples per file


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield the path of an empty temporary file for the `with` block to write to. At its end, rename it to `path`.

    The file is flushed to the disk before it is renamed. So if `path` exists, it is complete, even after a crash. If
    the block raises an exception, the temporary file is removed, and an existing `path` is unchanged. The directory of
    `path` is created if necessary.

    Several processes may write the same path at the same time: each has its own temporary file, and the last one that
    ends wins. What a killed process has left is removed when the same path is written again, except on a file system
    without locks.

    Raises:
        OSError: if the file cannot be written. The error always names `path`, also for a full disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _temporary_file(path) as temporary:
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
    except OSError as error:
        names_temporary_file = error.filename is not None and _is_temporary(Path(error.filename), path)
        if error.errno and (error.filename is None or names_temporary_file):
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:  # the rename must survive a power failure too
        os.fsync(directory)
    finally:
        os.close(directory)


@contextmanager
def _temporary_file(path: Path) -> Iterator[Path]:
    """Create an empty file next to `path`, lock it during the `with` block, and remove it if it is still there then.

    The lock tells other processes that this one is alive. The permissions are those of the process's umask.
    """
    _remove_leftovers(path)
    while True:
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
        handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        # Another process may take the file for a leftover before it is locked.
        if lock_file(handle) and temporary.exists():
            break
        os.close(handle)
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)
        os.close(handle)


def _remove_leftovers(path: Path) -> None:
    """Remove the temporary files of `path` whose writers were killed: those that are not locked."""
    for candidate in path.parent.glob("*.part"):
        if not _is_temporary(candidate, path):
            continue
        try:
            with candidate.open("r+b") as file:  # NFS locks only files that are open for writing
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                candidate.unlink()
        except OSError:  # its writer is alive, another process removed it, or there are no locks
            continue


def _is_temporary(candidate: Path, path: Path) -> bool:
    """Return True if `candidate` has the name of a temporary file of `path`."""
    return re.fullmatch(re.escape(path.name) + r"\.[0-9a-f]{16}\.part", candidate.name) is not None


def lock_file(handle: int, wait: bool = False) -> bool:
    """Lock an open file or directory, given by its descriptor, until it is closed. With `wait`, wait for the lock.

    The result is False if another process holds the lock, or this process through another descriptor. It is True if the
    lock was obtained, and also if the file system does not support locks.
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
    return hashlib.sha256(data).hexdigest()


def data_hash(directories: list[str], subset: str = "train", exact: bool = False) -> str:
    """Return a sha256 of the content of binarized data as a hexadecimal string, or "" if there are no files.

    Only files whose names start with `subset` are hashed, such as train.bin and train1.bin, or with `exact` only those
    of this name; "" means all splits. The names are not part of the hash. In each directory the order is:

    1. .idx files in the directory
    2. .bin files in the directory
    3. .idx files in its immediate subdirectories
    4. .bin files in these subdirectories
    5. .label files in these subdirectories

    Files of the same kind are sorted by path. If a .bin file has more than 64 MiB, only its size and 64 evenly spaced
    chunks of 256 KiB are hashed. They include the first and the last bytes.
    """
    name = glob.escape(subset)
    if not exact:
        name += "*"
    patterns = (f"{name}.idx", f"{name}.bin", f"*/{name}.idx", f"*/{name}.bin", f"*/{name}.label")
    hashes = []
    for directory in directories:
        for pattern in patterns:
            for path in sorted(Path(directory).glob(pattern)):
                if path.suffix == ".bin" and path.stat().st_size > WHOLE_FILE:
                    hashes.append(_hash_samples(path))
                else:
                    hashes.append(bytes.fromhex(sha256_of(path)))
    if not hashes:
        return ""
    return hashlib.sha256(b"".join(hashes)).hexdigest()


def _hash_samples(path: Path) -> bytes:
    """Return the sha256 of a file's size and of CHUNKS evenly spaced chunks of it."""
    size = path.stat().st_size
    sha256 = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for number in range(CHUNKS):
            file.seek(number * (size - CHUNK) // (CHUNKS - 1))
            sha256.update(file.read(CHUNK))
    return sha256.digest()


def no_such_checkpoint(path: str) -> str:
    """Return the message that there is no checkpoint at this path; if it is a directory, it names one in it."""
    if not os.path.isdir(path):
        return f"no such checkpoint: {path}"
    for name in ("checkpoint_best.pt", "checkpoint_last.pt", "model.pt"):
        if os.path.isfile(os.path.join(path, name)):
            return f"{path} is a directory: give a checkpoint in it, {os.path.join(path, name)}"
    return f"{path} is a directory without a checkpoint"
