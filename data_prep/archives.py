"""Read files by name from directories, zip archives and tar archives, without unpacking them to the disk.

`open_tree` gives access to the files in any order. `read_matching_files` reads the files once, in the order in which
they are stored. For tar archives with many files this is much faster.
"""

import gzip
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from lln_fairseq.errors import UserError
from lln_fairseq.files import sha256_of

# The standard library raises these for damaged archives, and RuntimeError for an encrypted member of a zip archive.
ARCHIVE_ERRORS = (EOFError, RuntimeError, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile, zlib.error)
DECOMPRESSORS: dict[str, Callable[[BinaryIO], Any]] = {".xz": lzma.open, ".gz": gzip.open}
ARCHIVE_SUFFIXES = {".zip", ".whl", ".tar", ".tgz"}

CHUNK_BYTES = 1 << 16


@contextmanager
def damage_as_data_error(where: str) -> Iterator[None]:
    """Turn the standard library's errors about damaged archives into UserErrors that begin with `where`.

    Errors of the file system, such as a full disk or a missing file, are raised unchanged.
    """
    try:
        yield
    except (*ARCHIVE_ERRORS, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise UserError(f"{where} cannot be read, it is damaged or incomplete: {error}") from error


@dataclass(frozen=True)
class FileTree:
    """Read-only access to the files of a directory or an archive, or to a set of single files.

    A file is named by its path relative to the directory or archive, with forward slashes. This is its full name.
    """

    where: str  # the name of the tree in messages
    openers: Mapping[str, Callable[[], Any]]  # for each file name a function that opens the file for reading bytes
    paths: Mapping[str, Path] = field(default_factory=dict)  # for each file name its path; empty for an archive
    archive: Path | None = None  # the archive that contains the files; None for a directory

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """Open the file with the full name `name` for reading bytes. The content of .xz and .gz files is decompressed.

        If there is no such file, this raises KeyError. Damaged data raises UserError, possibly only at a later read in
        the `with` block.
        """
        with damage_as_data_error(f"{self.where}: {name}"), self.openers[name]() as stream:
            decompress = DECOMPRESSORS.get(PurePosixPath(name).suffix)
            if decompress is not None:
                stream = decompress(stream)
            yield stream

    def read(self, name: str) -> bytes:
        """Return the decompressed content of the file with the full name `name`.

        A missing or damaged file raises UserError.
        """
        if name not in self.openers:
            raise UserError(f"{self.where} has no {name}")
        with self.open(name) as stream:
            return stream.read()

    def find(self, name: str, directory: str = "", excluded_directories: Collection[str] = ()) -> str | None:
        """Return the full name of the only file called `name`, `name`.xz or `name`.gz, or None if there is none.

        Files directly inside a directory called `directory` are considered first, at any depth of the tree; "" is the
        top level. If there are none, all files are considered except those directly inside one of the
        `excluded_directories`. Directories are named without their parents. More than one match raises UserError.
        """
        accepted = {name}
        for suffix in DECOMPRESSORS:
            accepted.add(name + suffix)
        candidates = [path for path in map(PurePosixPath, self.openers) if path.name in accepted]
        matches = [path for path in candidates if path.parent.name == directory]
        if not matches:
            matches = [path for path in candidates if path.parent.name not in excluded_directories]
        if not matches:
            return None
        if len(matches) > 1:
            raise UserError(f"{self.where} has more than one {name}: {', '.join(sorted(map(str, matches))[:3])}")
        return str(matches[0])

    def checksums(self, names: Sequence[str]) -> dict[str, str]:
        """Return {name: sha256} for the files with the full names `names`.

        For an archive, return {name of the archive: sha256 of the whole archive} instead.
        """
        if self.archive is not None:
            return {self.archive.name: sha256_of(self.archive)}
        return {name: sha256_of(self.paths[name]) for name in names}


def loose_files(paths: Mapping[str, Path], where: str) -> FileTree:
    """Return a tree of single files, whose names in the tree are the keys of `paths`."""
    openers = {name: partial(path.open, "rb") for name, path in paths.items()}
    return FileTree(where, openers, paths)


def open_tree(path: Path) -> FileTree:
    """Return the tree of all files in a directory and its subdirectories, in a zip archive or in a tar archive.

    Any other file becomes a tree that contains only this file. An archive stays open until its tree is
    garbage-collected. Links inside a tar archive are left out. UserError is raised if the archive is damaged, or if a
    file with the suffix of an archive is not an archive.
    """
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        return loose_files({file.relative_to(path).as_posix(): file for file in files}, str(path))
    with damage_as_data_error(str(path)):
        if tarfile.is_tarfile(path):
            return _open_tar(path)
        if zipfile.is_zipfile(path):
            return _open_zip(path)
    if ARCHIVE_SUFFIXES.intersection(path.suffixes):
        raise UserError(f"{path} is not a readable archive; if it was downloaded, download it again")
    return loose_files({path.name: path}, str(path))


def _open_tar(path: Path) -> FileTree:
    """Return the tree of the files in a tar archive, after reading the whole archive. Links are left out."""
    archive = tarfile.open(path)  # noqa: SIM115  it stays open for the files of the tree
    openers = {}
    for member in archive:
        if member.isfile():
            openers[str(PurePosixPath(member.name))] = partial(archive.extractfile, member)
    read_to_end(archive)
    return FileTree(str(path), openers, archive=path)


def _open_zip(path: Path) -> FileTree:
    archive = zipfile.ZipFile(path)
    names = [name for name in archive.namelist() if not name.endswith("/")]
    openers = {str(PurePosixPath(name)): partial(archive.open, name) for name in names}
    return FileTree(str(path), openers, archive=path)


def read_to_end(archive: tarfile.TarFile) -> None:
    """Read a tar archive to its end. Otherwise the checksum at the end of a compressed archive is never verified."""
    assert archive.fileobj is not None
    while archive.fileobj.read(CHUNK_BYTES):
        pass


def read_matching_files(source: Path, matches: Callable[[str], bool]) -> Iterator[tuple[str, BinaryIO]]:
    """Yield (name, stream) for every matching file of a directory or an archive, in one pass.

    Each stream must be read before the next one is requested. Names have forward slashes; in a directory, they begin
    with the directory's own name. Files whose names end with .xz or .gz are decompressed only if they are in a zip
    archive. A damaged tar archive raises the standard library's errors; wrap the loop in `with
    damage_as_data_error(...)` to get a UserError instead.
    """
    if source.is_dir():
        for name, path in list_matching_files(source, matches):
            with path.open("rb") as file:
                yield name, file
    elif tarfile.is_tarfile(source):
        with tarfile.open(source) as archive:
            for member in archive:
                archive.members.clear()  # type: ignore[attr-defined]  # tarfile would keep millions of them
                name = str(PurePosixPath(member.name))
                if member.isfile() and matches(name):
                    yield name, cast(BinaryIO, archive.extractfile(member))
            read_to_end(archive)
    elif zipfile.is_zipfile(source):
        tree = open_tree(source)
        for name in filter(matches, tree.openers):
            with tree.open(name) as file:
                yield name, file
    else:
        raise UserError(f"{source} is not a readable archive; if it was downloaded, download it again")


def list_matching_files(directory: Path, matches: Callable[[str], bool]) -> Iterator[tuple[str, Path]]:
    """Yield (name, path) for every matching file in a directory and its subdirectories, sorted by path.

    Names have forward slashes and begin with the directory's own name.
    """
    root = directory.resolve()
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root.parent).as_posix()
        if matches(name) and path.is_file():
            yield name, path
