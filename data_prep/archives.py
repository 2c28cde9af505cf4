"""One way to read files out of directories, zip and tar archives: by name, as streams, never unpacked to the disk.

No name inside an archive ever becomes a path. An archive that is damaged, or has a name that leads out of it, is
refused as a whole; a member that is encrypted, sparse, a link, or there twice is refused when somebody asks for it.
A file NAME may also be there as NAME.xz or NAME.gz; it is decompressed while it is read. Limits: see streams.py.
"""

import io
import lzma
import stat
import tarfile
import zipfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from .command import DataError
from .files import sha256_of
from .streams import CHUNK, CheckedStream, Readable, damage, decompressed, gunzip, read_all

_SUFFIXES: dict[str, Callable[[BinaryIO], Readable]] = {".xz": lzma.LZMAFile, ".gz": gunzip}
MEMBERS, HEADER = 1 << 18, 1 << 20  # of one archive; bytes of what a tar archive says about one of them
_ZIP_END = (1 << 16) + 22  # bytes: a zip's last record and the comment in it
END = bytes(tarfile.BLOCKSIZE)  # the mark of the end of a tar archive
NOT_PLAIN = "it is not a plain file that occurs once"  # a link could point anywhere

Opener = Callable[[], BinaryIO]


@dataclass(frozen=True)
class Member:
    """One file: how it is opened, and the bytes that it takes where it lies. `path`: of a loose file."""

    open: Opener
    stored: int
    path: Path | None = None


@dataclass(frozen=True)
class Tree:
    """Files by relative name, wherever they are. `archive` is the one file that holds them, None for loose files."""

    where: str
    members: dict[str, Member]
    archive: Path | None = None

    def find(self, name: str, folder: str = "", others: Collection[str] = ()) -> str | None:
        """The member called `name` (or name.xz, name.gz), in whatever folder; None where there is none.

        One in a folder called `folder` is preferred; one in a folder called otherwise, but as one of `others`, is
        never taken. Raises DataError where several fit.
        """
        paths = {member: PurePosixPath(member) for member in self.members}
        names = {name, *(name + suffix for suffix in _SUFFIXES)}
        found = [member for member, path in paths.items() if path.name in names]
        inside = [member for member in found if paths[member].parent.name == folder]
        found = inside or [member for member in found if paths[member].parent.name not in others]
        if len(found) > 1:
            raise DataError(f"{self.where} has more than one {name}: {', '.join(sorted(found)[:3])}")
        return next(iter(found), None)

    def open(self, member: str) -> BinaryIO:
        """The decompressed content as a stream. Raises DataError where it is damaged, in the midst of reading too."""
        stream = self.members[member].open()
        opener = _SUFFIXES.get(PurePosixPath(member).suffix)
        if opener is None:
            return stream
        where = f"{self.where}: {member} cannot be read"
        return CheckedStream(opener(stream), where, self.members[member].stored, below=stream).buffered()

    def read(self, member: str) -> bytes:
        """The content as a whole. Raises DataError where it is damaged or too big for that."""
        with self.open(member) as stream:
            return read_all(stream, f"{self.where}: {member}")

    def checksums(self, members: Sequence[str]) -> dict[str, str]:
        """sha256 by name: of the archive, or of these loose files as they are on the disk."""
        if self.archive is not None:
            return {self.archive.name: sha256_of(self.archive)}
        return {name: sha256_of(path) for name in members if (path := self.members[name].path) is not None}


def loose_files(files: dict[str, Path], where: str) -> Tree:
    """A tree of files on the disk."""
    return Tree(where, {name: _loose_file(path) for name, path in files.items()})


def _loose_file(path: Path) -> Member:
    stored = path.stat().st_size
    return Member(lambda: CheckedStream(path.open("rb"), str(path), stored).buffered(), stored, path)


def open_tree(path: Path) -> Tree:
    """The files of a directory, of a zip or tar archive (any compression), or the file itself if it is no archive.

    Raises DataError where there is nothing to read or the archive cannot be trusted.
    """
    if path.is_dir():
        files = {p.relative_to(path).as_posix(): p for p in sorted(path.rglob("*")) if p.is_file()}
        return loose_files(files, str(path))
    try:
        if path.stat().st_size == 0:
            raise DataError(f"{path} is empty")
        if is_tar(path):
            return Tree(str(path), _tar_members(lambda: path.open("rb"), path.stat().st_size, str(path)), path)
        if zipfile.is_zipfile(path):
            return Tree(str(path), _zip_members(path), path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    if path.suffix in (".zip", ".tgz") or ".tar" in path.suffixes:
        raise DataError(f"{path} is not a readable archive (half a download?)")
    return loose_files({path.name: path}, str(path))


class _Names:
    """Collects the members of the archive `where`, whose names are checked on the way."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.members: dict[str, Member] = {}

    def add(self, name: str, member: Member, problem: str = "") -> None:
        """`problem`: why the member cannot be read; that comes up when somebody asks for it."""
        path = PurePosixPath(name.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts or ":" in name.partition("/")[0]:
            raise DataError(f"{self.where}: the member {name!r} leads out of the archive; it is refused as a whole")
        if not path.name:
            raise DataError(f"{self.where}: it has a member without a name; it is refused as a whole")
        if len(self.members) == MEMBERS:
            raise DataError(f"{self.where} has more than {MEMBERS} members; unpack it yourself if you trust it")
        key = str(PurePosixPath(name))
        if key in self.members:
            problem = NOT_PLAIN
        if problem:
            member = Member(partial(_refuse, f"{self.where}: member {key} cannot be read: {problem}"), member.stored)
        self.members[key] = member


def _refuse(message: str) -> BinaryIO:
    raise DataError(message)


def _zip_members(path: Path) -> dict[str, Member]:
    names, size = _Names(str(path)), path.stat().st_size
    with damage(f"{path} is a damaged archive"), zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
        if _declared_members(path, size) not in (0xFFFF, len(infos) & 0xFFFF):  # 0xFFFF: it stands elsewhere
            raise zipfile.BadZipFile("its list of members is not complete")
        for info in infos:
            problem = NOT_PLAIN if stat.S_ISLNK(info.external_attr >> 16) else ""
            try:  # compares the two places that hold the member's name, too
                archive.open(info).close()
            except RuntimeError as error:  # encrypted, or a compression that zipfile lacks
                problem = str(error)
            if info.filename.endswith("/"):
                continue
            stored = min(info.compress_size, size)
            names.add(info.filename, Member(partial(_open_zipped, path, info, stored), stored), problem)
    return names.members


def _declared_members(path: Path, size: int) -> int:
    """The number at the end of a zip. zipfile does not look at it, and may skip members whose record is damaged."""
    with path.open("rb") as file:
        file.seek(max(size - _ZIP_END, 0))
        tail = file.read()
    place = tail.rfind(b"PK\x05\x06")
    return int.from_bytes(tail[place + 10 : place + 12], "little")


def _open_zipped(path: Path, info: zipfile.ZipInfo, stored: int) -> BinaryIO:
    where = f"{path}: {info.filename} cannot be read"
    # of bzip2 and LZMA zipfile gives at once all that these bytes hold: 46,000 times as much at most
    step = CHUNK if info.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) else 1 << 12
    with damage(where), zipfile.ZipFile(path) as archive:
        source = archive.open(info)  # which keeps the file open for itself
    return CheckedStream(source, where, stored, step=step).buffered()


class _HeaderReader(io.BufferedReader):
    """A tar archive for tarfile: at most HEADER bytes are read for one member, whatever its header declares."""

    left = HEADER

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= self.left:
            raise tarfile.HeaderError(f"a header declares more than {HEADER >> 10} KiB about one member")
        self.left -= size
        return super().read(size)


def is_tar(path: Path) -> bool:
    try:
        with decompressed(path.open("rb"), str(path), path.stat().st_size) as stream:
            first = stream.read(tarfile.BLOCKSIZE) or b""
            if first == END:
                return True  # an empty one
            tarfile.TarInfo.frombuf(first, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, DataError):
        return False
    return True


def _tar_members(opener: Opener, size: int, where: str) -> dict[str, Member]:
    """The members of a tar archive of `size` bytes. All of it is read, since what vouches for it comes last."""
    names, damaged = _Names(where), f"{where} is not a readable tar archive"
    with decompressed(opener(), damaged, size) as stream, damage(damaged):
        headers, end = _HeaderReader(stream, CHUNK), 0
        with tarfile.open(fileobj=headers, mode="r:") as archive:
            while (info := archive.next()) is not None:
                if not end < archive.offset >= info.offset_data:
                    raise tarfile.ReadError(f"the size of {info.name} is negative")
                end, headers.left = archive.offset, HEADER
                archive.members.clear()  # type: ignore[attr-defined]  # tarfile would keep them all
                if not info.isdir():
                    names.add(info.name, _tar_member(opener, info, size, where), _problem(info))
            headers.seek(archive.offset)
            if headers.read(tarfile.BLOCKSIZE) != END:  # tarfile stops at any other header, too
                raise tarfile.ReadError("it is cut off or damaged: no mark of its end follows the last member")
        while stream.read(CHUNK):
            pass
    return names.members


def _problem(info: tarfile.TarInfo) -> str:
    if not info.isreg():
        return NOT_PLAIN
    return "it is sparse" if info.issparse() else ""


def _tar_member(opener: Opener, info: tarfile.TarInfo, size: int, where: str) -> Member:
    part, where = (info.offset_data, info.size), f"{where}: {info.name} cannot be read"
    return Member(
        lambda: CheckedStream(decompressed(opener(), where, size), where, size, part).buffered(), min(info.size, size)
    )


def read_members(archive: BinaryIO, names: Sequence[str], label: str) -> dict[str, bytes]:
    """The contents of the members `names` of a tar archive (any compression), in memory.

    Raises DataError where the archive cannot be read or is unsafe, a name is missing or occurs twice, or is not a
    plain file. `label` names the archive in messages.
    """
    content = read_all(archive, label)
    members = _tar_members(partial(io.BytesIO, content), len(content), label)
    found: dict[str, bytes] = {}
    for name in names:
        if name not in members:
            raise DataError(f"{label} has no member {name}")
        with members[name].open() as stream:
            found[name] = read_all(stream, f"{label}: {name}")
    return found


def read_nested_members(archive: Path, inner: str, names: Sequence[str]) -> dict[str, bytes]:
    """As read_members, from the archive that is the member `inner` of `archive`."""
    with archive.open("rb") as file:
        content = read_members(file, [inner], archive.name)[inner]
    return read_members(io.BytesIO(content), names, f"{archive.name}/{inner}")
