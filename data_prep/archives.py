"""One way to read files out of directories, zip and tar archives: by name, as streams, never unpacked to the disk.

No name inside an archive ever becomes a path, and an archive with a name that leads out of it is refused as a whole.
A file NAME may also be there as NAME.xz or NAME.gz; it is decompressed while it is read.
"""

import gzip
import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from data_prep.command import DataError
from data_prep.files import sha256_of

_DAMAGED = (tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error, gzip.BadGzipFile, EOFError)
_COMPRESSED: dict[str, Callable[..., BinaryIO]] = {"": lambda stream: stream, ".xz": lzma.open, ".gz": gzip.open}
_BUFFER = 1 << 20

Opener = Callable[[], AbstractContextManager[BinaryIO]]


def check_names(names: Iterable[str], archive: str) -> None:
    """DataError where a name is absolute or climbs with "..": such an archive was made to write somewhere else."""
    for name in names:
        path = PurePosixPath(name.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts or ":" in name.partition("/")[0]:
            raise DataError(f"{archive}: the member {name!r} leads out of the archive; it is refused as a whole")


@dataclass(frozen=True)
class Tree:
    """Files by relative name, wherever they are. `archive` is the one file that holds them, None for loose files."""

    where: str
    members: dict[str, Opener]
    archive: Path | None = None

    def find(self, name: str, folder: str = "", others: Collection[str] = ()) -> str | None:
        """The member called `name` (or name.xz, name.gz), in whatever folder; None where there is none.

        One in a folder called `folder` is preferred; one in a folder called otherwise, but as one of `others`, is
        never taken. Raises DataError where several fit.
        """
        paths = {member: PurePosixPath(member) for member in self.members}
        found = [member for member, path in paths.items() if path.name in {name + suffix for suffix in _COMPRESSED}]
        inside = [member for member in found if paths[member].parent.name == folder]
        found = [member for member in found if paths[member].parent.name not in others]
        if len(inside or found) > 1:
            raise DataError(f"{self.where} has more than one {name}: {', '.join(sorted(inside or found)[:3])}")
        return next(iter(inside or found), None)

    @contextmanager
    def open(self, member: str) -> Iterator[BinaryIO]:
        """The decompressed content as a stream. Raises DataError where it is damaged, in the midst of reading too."""
        suffix = PurePosixPath(member).suffix
        try:
            with self.members[member]() as stream, _COMPRESSED.get(suffix, _COMPRESSED[""])(stream) as plain:
                yield io.BufferedReader(plain, _BUFFER)  # reading lines in C, whatever lies below
        except _DAMAGED as error:
            raise DataError(f"{self.where}: {member} cannot be read: {error}") from error

    def checksums(self, members: Sequence[str]) -> dict[str, str]:
        """sha256 by name: of the archive, or of these loose files as they are on the disk."""
        if self.archive is not None:
            return {self.archive.name: sha256_of(self.archive)}
        checksums = {}
        for member in members:
            with self.members[member]() as stream:
                checksums[member] = sha256_of(Path(stream.name))
        return checksums


def loose_files(files: dict[str, Path], where: str) -> Tree:
    """A tree of files on the disk."""
    return Tree(where, {name: lambda path=path: path.open("rb") for name, path in files.items()})


def open_tree(path: Path) -> Tree:
    """The files of a directory, of a zip or tar archive (any compression), or the file itself if it is no archive.

    Raises DataError where there is nothing to read or a name leads out of the archive.
    """
    if path.is_dir():
        files = {p.relative_to(path).as_posix(): p for p in sorted(path.rglob("*")) if p.is_file()}
        return loose_files(files, str(path))
    try:
        if path.stat().st_size == 0:
            raise DataError(f"{path} is empty")
        if zipfile.is_zipfile(path):
            return _zip_tree(path)
        if tarfile.is_tarfile(path):
            return _tar_tree(path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except _DAMAGED as error:
        raise DataError(f"{path} is a damaged archive: {error}") from error
    if path.suffix in (".zip", ".tgz") or ".tar" in path.suffixes:
        raise DataError(f"{path} is not a readable archive (half a download?)")
    return loose_files({path.name: path}, str(path))


def _zip_tree(path: Path) -> Tree:
    with zipfile.ZipFile(path) as archive:
        names = [info.filename for info in archive.infolist() if not info.is_dir()]
    check_names(names, str(path))

    @contextmanager
    def opener(name: str) -> Iterator[BinaryIO]:
        with zipfile.ZipFile(path) as archive, archive.open(name) as stream:
            yield stream

    return Tree(str(path), {name: lambda name=name: opener(name) for name in names}, path)


def _tar_tree(path: Path) -> Tree:
    with tarfile.open(path) as archive:
        infos = archive.getmembers()
    check_names([info.name for info in infos], str(path))

    @contextmanager
    def opener(info: tarfile.TarInfo) -> Iterator[BinaryIO]:
        with tarfile.open(path) as archive, archive.extractfile(info) as stream:
            yield stream

    # Plain files only: a link could point anywhere.
    return Tree(str(path), {info.name: lambda info=info: opener(info) for info in infos if info.isreg()}, path)


def read_members(archive: BinaryIO, names: Sequence[str], label: str) -> dict[str, bytes]:
    """The contents of the members `names` of a tar archive (any compression), in memory.

    Raises DataError where the archive cannot be read or is unsafe, a name is missing or occurs twice, or is not a
    plain file (a link could point anywhere). `label` names the archive in messages.
    """
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=archive) as tar:
            for member in tar:
                check_names([member.name], label)
                if member.name not in names:
                    continue
                if not member.isreg() or member.name in found:
                    raise DataError(f"{label}: member {member.name} is not a plain file that occurs once")
                found[member.name] = tar.extractfile(member).read()
    except (*_DAMAGED, OSError) as error:
        raise DataError(f"{label} is not a readable tar archive: {error}") from error
    missing = [name for name in names if name not in found]
    if missing:
        raise DataError(f"{label} has no member {missing[0]}")
    return found


def read_nested_members(archive: Path, inner: str, names: Sequence[str]) -> dict[str, bytes]:
    """As read_members, from the archive that is the member `inner` of `archive`."""
    with archive.open("rb") as file:
        content = read_members(file, [inner], archive.name)[inner]
    return read_members(io.BytesIO(content), names, f"{archive.name}/{inner}")
