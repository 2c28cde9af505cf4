"""Write files atomically, lock files, and compute checksums."""

import errno
import fcntl
import glob
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WHOLE_FILE = 64 << 20  # bytes; `data_hash` samples larger .bin files
CHUNK = 1 << 18  # bytes per sample
CHUNKS = 64  # samples per file


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


def data_hash(directories: list[str], subset: str = "train") -> str:
    """Return a sha256 of the content of binarized data as a hexadecimal string, or "" if there are no files.

    Only files whose names start with `subset` are hashed, such as train.bin and train1.bin; "" means all splits. The
    names are not part of the hash. In each directory the order is:

    1. .idx files in the directory
    2. .bin files in the directory
    3. .idx files in its immediate subdirectories
    4. .bin files in these subdirectories
    5. .label files in these subdirectories

    Files of the same kind are sorted by path. If a .bin file has more than 64 MiB, only its size and 64 evenly spaced
    chunks of 256 KiB are hashed. They include the first and the last bytes.
    """
    name = glob.escape(subset)
    patterns = (f"{name}*.idx", f"{name}*.bin", f"*/{name}*.idx", f"*/{name}*.bin", f"*/{name}*.label")
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
