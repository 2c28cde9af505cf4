"""Streams out of files that nobody vouches for: what is damaged in them, or too big, is a DataError.

The limits are meant to let everything through that is text: it grows a few times when it is unpacked, and the longest
line of the Wikipedia text that was tried has 7,024 bytes.
"""

import bz2
import gzip
import io
import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO, Protocol

from .command import DataError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# What the libraries raise for damaged files: tarfile and zipfile let much through from below, RuntimeError and its
# NotImplementedError are zipfile's words for an encrypted member and an unknown compression.
DAMAGE = (
    OSError, EOFError, ValueError, RuntimeError, IndexError, OverflowError, MemoryError, struct.error, zlib.error,
    lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile,
)  # fmt: skip

FREE, RATIO = 64 << 20, 200  # bytes that anything may grow to, and how many for each stored byte beyond that
IN_MEMORY = 256 << 20  # bytes of a file that is held as a whole
CHUNK = 1 << 16


class Readable(Protocol):
    """What the libraries that decompress have in common."""

    def read(self, size: int, /) -> bytes | None: ...
    def seek(self, offset: int, /) -> int: ...
    def close(self) -> None: ...


def gunzip(file: BinaryIO) -> Readable:
    """The content of a file that gzip made."""
    return gzip.GzipFile(fileobj=file)


_MAGIC: dict[bytes, Callable[[BinaryIO], Readable]] = {
    b"\x1f\x8b": gunzip,
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\x00": lzma.LZMAFile,
    b"\x5d\x00\x00": lzma.LZMAFile,
}


@contextmanager
def damage(where: str) -> Iterator[None]:
    """What libraries raise for a damaged file becomes a DataError that begins with `where`."""
    try:
        yield
    except DAMAGE as error:
        raise DataError(f"{where}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


class CheckedStream(io.RawIOBase):
    """`source` with damage as DataError, refused where more comes out of it than `stored` bytes of text can be.

    `part`: only these bytes of it, (start, length), all of which must be there. `step`: bytes asked for at a time.
    `below`: what `source` reads from and leaves open. Closing closes both.
    """

    def __init__(
        self,
        source: Readable,
        where: str,
        stored: int,
        part: tuple[int, int] | None = None,
        step: int = CHUNK,
        below: Readable | None = None,
    ) -> None:
        self._source, self._below, self._where, self._step = source, below, where, step
        self._most = max(FREE, RATIO * stored)
        self._start = part[0] if part else 0
        self._length = part[1] if part else None
        self._position = 0
        if part:
            self.seek(0)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        target = memoryview(buffer)
        wanted = min(len(target), self._step)
        if self._length is not None:
            wanted = min(wanted, self._length - self._position)
        with damage(self._where):
            data = self._source.read(wanted) or b""
        if wanted and not data and self._length is not None:
            raise DataError(f"{self._where}: it is cut off")
        self._go_to(self._position + len(data))
        target[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_SET:
            raise io.UnsupportedOperation("only from the start")
        self._go_to(offset)
        with damage(self._where):
            self._source.seek(self._start + offset)
        return offset

    def tell(self) -> int:
        return self._position

    def _go_to(self, position: int) -> None:
        if self._start + position > self._most:
            raise DataError(
                f"{self._where}: more than {self._most >> 20} MiB come out of a small file; text does not shrink to "
                f"1/{RATIO}, unpack it yourself if you trust it"
            )
        self._position = position

    def close(self) -> None:
        self._source.close()
        if self._below is not None:
            self._below.close()
        super().close()

    def buffered(self) -> io.BufferedReader:
        """The same for who reads lines."""
        return io.BufferedReader(self, CHUNK)


def decompressed(file: BinaryIO, where: str, stored: int) -> CheckedStream:
    """The content of `file`, which may be compressed by gzip, bzip2 or xz, and has `stored` bytes."""
    with damage(where):
        magic = file.read(max(map(len, _MAGIC)))
        file.seek(0)
        openers = [opener for start, opener in _MAGIC.items() if magic.startswith(start)]
        plain = openers[0](file) if openers else file
    return CheckedStream(plain, where, stored, below=file)


def read_all(stream: BinaryIO, where: str) -> bytes:
    """Everything in `stream`; DataError where that is more than IN_MEMORY bytes."""
    data = stream.read(IN_MEMORY + 1)
    if len(data) > IN_MEMORY:
        raise DataError(f"{where} has more than {IN_MEMORY >> 20} MiB, too many to be held in memory")
    return data
