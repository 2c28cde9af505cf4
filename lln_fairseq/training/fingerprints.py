"""Hashes of what a run began with, by which it is known again: its training data, and the model it started from."""

import glob
import hashlib
import os
from pathlib import Path

WHOLE_FILE = 64 << 20  # bytes: larger token files are sampled
CHUNK, CHUNKS = 1 << 18, 64


def data_hash(directories: list[str], subset: str = "train") -> str:
    """sha256 of the training data; "" where there is none.

    The index and the targets are read whole, the token ids (.bin) too up to 64 MiB; of a larger .bin its size and 64
    evenly spread chunks of 256 KiB, the first and the last bytes among them.
    """
    name = glob.escape(subset)
    patterns = (f"{name}*.idx", f"{name}*.bin", f"*/{name}*.idx", f"*/{name}*.bin", f"*/{name}*.label")
    found = [path for folder in directories for pattern in patterns for path in sorted(Path(folder).glob(pattern))]
    parts = b"".join(_sampled(path) if path.suffix == ".bin" else _whole(path) for path in found)
    return hashlib.sha256(parts).hexdigest() if parts else ""


def file_hash(path: str) -> str:
    """sha256 of a file."""
    return _whole(Path(path)).hex()


def _whole(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _sampled(path: Path) -> bytes:
    size = os.path.getsize(path)
    if size <= WHOLE_FILE:
        return _whole(path)
    seen = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for number in range(CHUNKS):
            file.seek(number * (size - CHUNK) // (CHUNKS - 1))
            seen.update(file.read(CHUNK))
    return seen.digest()
