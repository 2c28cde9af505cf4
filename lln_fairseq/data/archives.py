"""Read files out of directories, zip archives and tar archives by name, without unpacking them to the disk."""

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

from lln_fairseq.data.files import sha256_of
from lln_fairseq.data.reporting import DataError

# What the standard library raises for damaged archives, and for zip members that are encrypted (RuntimeError).
DAMAGE = (EOFError, RuntimeError, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile, zlib.error)
DECOMPRESSORS: dict[str, Callable[[BinaryIO], Any]] = {".xz": lzma.open, ".gz": gzip.open}
ARCHIVE_SUFFIXES = {".zip", ".whl", ".tar", ".tgz"}

CHUNK = 1 << 16


@contextmanager
def damage_as_data_error(where: str) -> Iterator[None]:
    """Raise DataError with the place `where` for what the standard library raises while it reads a damaged archive."""
    try:
        yield
    except (*DAMAGE, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the file system: a full disk, a missing file
        raise DataError(f"{where} cannot be read, it is damaged or incomplete: {error}") from error


@dataclass(frozen=True)
class FileTree:
    """Files by their relative names: of a directory, of an archive, or single ones.

    Args:
        where: what messages call the tree.
        openers: a function for each name that opens the file.
        paths: the files of a tree that is not an archive.
        archive: the archive that holds the files.
    """

    where: str
    openers: Mapping[str, Callable[[], Any]]
    paths: Mapping[str, Path] = field(default_factory=dict)
    archive: Path | None = None

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """Open a file; name.xz and name.gz are decompressed. Raises DataError in the `with` block for damaged data."""
        with damage_as_data_error(f"{self.where}: {name}"), self.openers[name]() as stream:
            decompress = DECOMPRESSORS.get(PurePosixPath(name).suffix)
            if decompress is not None:
                stream = decompress(stream)
            yield stream

    def read(self, name: str) -> bytes:
        """Return the content of a file. Raises DataError as `open` does, and where there is no such file."""
        if name not in self.openers:
            raise DataError(f"{self.where} has no {name}")
        with self.open(name) as stream:
            return stream.read()

    def find(self, name: str, folder: str = "", others: Collection[str] = ()) -> str | None:
        """Return the full name of the file called `name` (or name.xz, name.gz) in any folder, or None.

        Args:
            name: the last part of the file's name.
            folder: a file in a folder of this name is preferred.
            others: files in folders of these names are ignored, unless it is `folder`.

        Raises:
            DataError: if several files fit.
        """
        names = {name, *(name + suffix for suffix in DECOMPRESSORS)}
        found = [path for path in map(PurePosixPath, self.openers) if path.name in names]
        preferred = [path for path in found if path.parent.name == folder]
        if not preferred:
            preferred = [path for path in found if path.parent.name not in others]
        if len(preferred) > 1:
            raise DataError(f"{self.where} has more than one {name}: {', '.join(sorted(map(str, preferred))[:3])}")
        return str(preferred[0]) if preferred else None

    def checksums(self, names: Sequence[str]) -> dict[str, str]:
        """Return sha256 by name: of the archive, or of these files of a directory."""
        if self.archive is not None:
            return {self.archive.name: sha256_of(self.archive)}
        return {name: sha256_of(self.paths[name]) for name in names}


def loose_files(paths: Mapping[str, Path], where: str) -> FileTree:
    """Return a tree of these files on the disk."""
    return FileTree(where, {name: partial(path.open, "rb") for name, path in paths.items()}, paths)


def open_tree(path: Path) -> FileTree:
    """Return the files of a directory, of a zip or tar archive, or the one file `path` where it is neither.

    Raises:
        DataError: if the archive is damaged.
        OSError: if there is no such file.
    """
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        return loose_files({file.relative_to(path).as_posix(): file for file in files}, str(path))
    with damage_as_data_error(str(path)):
        if tarfile.is_tarfile(path):
            tar = tarfile.open(path)  # noqa: SIM115  it stays open for the files of the tree
            members = {member.name: partial(tar.extractfile, member) for member in tar if member.isfile()}
            check_end(tar)
            return FileTree(str(path), members, archive=path)
        if zipfile.is_zipfile(path):
            archive = zipfile.ZipFile(path)
            names = [name for name in archive.namelist() if not name.endswith("/")]
            return FileTree(str(path), {name: partial(archive.open, name) for name in names}, archive=path)
    if ARCHIVE_SUFFIXES.intersection(path.suffixes):
        raise DataError(f"{path} is not a readable archive; if it was downloaded, download it again")
    return loose_files({path.name: path}, str(path))


def check_end(archive: tarfile.TarFile) -> None:
    """Read a tar archive to its end, where the checksum of its compression is, which tarfile does not look at."""
    assert archive.fileobj is not None
    while archive.fileobj.read(CHUNK):
        pass


def walk(source: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, BinaryIO]]:
    """Yield name and content of the wanted files of a directory or an archive, in one pass from start to end.

    Names have forward slashes; those in a directory begin with the directory's own. Read each file before you ask for
    the next one, and the whole within `damage_as_data_error`.

    Raises:
        DataError: if `source` is neither a directory nor an archive.
        OSError: if there is no such file.
    """
    if source.is_dir():
        for name, path in wanted_files(source, wanted):
            with path.open("rb") as file:
                yield name, file
    elif tarfile.is_tarfile(source):
        with tarfile.open(source) as archive:
            for member in archive:
                archive.members.clear()  # type: ignore[attr-defined]  # tarfile would keep millions of them
                if member.isfile() and wanted(member.name):
                    yield member.name, cast(BinaryIO, archive.extractfile(member))
            check_end(archive)
    elif zipfile.is_zipfile(source):
        tree = open_tree(source)
        for name in filter(wanted, tree.openers):
            with tree.open(name) as file:
                yield name, file
    else:
        raise DataError(f"{source} is not a readable archive; if it was downloaded, download it again")


def wanted_files(folder: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Path]]:
    """Yield name and path of the wanted files of a directory in order; names begin with the directory's own."""
    root = folder.resolve()
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root.parent).as_posix()
        if wanted(name) and path.is_file():
            yield name, path
