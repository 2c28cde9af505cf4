"""Archives of many files, or big ones, read once from start to end; archives.py reads few files by name."""

import hashlib
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

from .archives import is_tar, open_tree
from .command import DataError, say
from .fetch import cache_directory
from .files import sha256_of, write_bytes
from .streams import CHUNK, damage, decompressed
from .text import MAX_LINE

Wanted = Callable[[str], bool]


def walk(source: Path, wanted: Wanted) -> Iterator[tuple[str, BinaryIO]]:
    """Name and content of the files whose name is `wanted`, of a directory (in order) or an archive (in its own).

    Names have forward slashes; those in a directory begin with the directory's own. A content is to be read before the
    next one is asked for. Raises DataError where there is nothing to read or it is damaged.
    """
    if source.is_dir():
        for name, path in _files(source, wanted):
            with path.open("rb") as file:
                yield name, file
        return
    with _opened(source) as stream, damage(f"{source} is a damaged archive"):
        if is_tar(source):
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                for info in archive:
                    archive.members.clear()  # type: ignore[attr-defined]  # tarfile would keep them all
                    if info.isreg() and wanted(info.name):
                        yield info.name, cast(BinaryIO, archive.extractfile(info))
            while stream.read(CHUNK):  # what vouches for the content comes last
                pass
            return
    if not zipfile.is_zipfile(source):
        raise DataError(f"{source} is a damaged archive, or none")
    tree = open_tree(source)
    for name in filter(wanted, tree.members):
        with tree.open(name) as file:
            yield name, file


def _opened(source: Path) -> BinaryIO:
    try:
        stored = source.stat().st_size
        if stored == 0:
            raise DataError(f"{source} is empty")
        return decompressed(source.open("rb"), f"{source} is a damaged archive", stored).buffered()
    except OSError as error:
        raise DataError(f"cannot read {source}: {error.strerror or error}") from error


def _files(folder: Path, wanted: Wanted) -> Iterator[tuple[str, Path]]:
    root = folder.resolve()
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root.parent).as_posix()
        if wanted(name) and path.is_file():
            yield name, path


def checksum(source: Path, wanted: Wanted) -> str:
    """sha256 of an archive, or over the names and contents of the wanted files of a directory."""
    if not source.is_dir():
        return sha256_of(source)
    digest = hashlib.sha256()
    for name, path in _files(source, wanted):
        digest.update(f"{name.partition('/')[2]} {sha256_of(path)}\n".encode())
    return digest.hexdigest()


def known_checksum(source: Path, wanted: Wanted) -> str:
    """The same; an archive of which nobody published one must be the file that was used first under its name."""
    found, pin = checksum(source, wanted), _pin(source)
    if source.is_file() and pin.is_file() and pin.read_bytes().strip() != found.encode():
        raise DataError(f"{source} is not the file that {pin} pins; remove that if this is the right one")
    return found


def pin(source: Path, found: str) -> None:
    """Remembers the checksum of an archive, once it has been read and found whole."""
    if source.is_file() and not _pin(source).is_file():
        say(f"no checksum of {source.name} is published: pinning sha256 {found}")
        write_bytes(_pin(source), f"{found}\n".encode())


def _pin(source: Path) -> Path:
    return cache_directory() / f"{source.name}.sha256"


def raw_lines(stream: BinaryIO, name: str) -> Iterator[tuple[int, bytes]]:
    """Number and content of each line, without its end. Raises DataError for one of more than MAX_LINE bytes."""
    number = 0
    while line := stream.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            raise DataError(f"{name}, line {number}: more than {MAX_LINE >> 20} MiB")
        yield number, line.removesuffix(b"\n").removesuffix(b"\r")
