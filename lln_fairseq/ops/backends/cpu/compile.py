"""C sources to a shared library for the CPU at hand: compiled at first use, kept in a cache directory."""

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

COMPILERS = ("gcc", "cc", "clang")
FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC"]
if platform.machine() in ("x86_64", "AMD64"):
    FLAGS.append("-mprefer-vector-width=512")  # compilers use half of AVX-512 by default; without it this does nothing
TIMEOUT = 120  # seconds; it takes about three

logger = logging.getLogger(__name__)


class CannotCompile(Exception):
    """Why there is no library: no compiler, or what it said."""


def load_library(main: Path, **macros: int) -> ctypes.CDLL:
    """The library of `main` and the files beside it with these macros defined, compiled unless it is in the cache.

    Processes that compile at the same time do not disturb each other: each renames its own finished file.
    Raises: CannotCompile.
    """
    command = [*_compiler(), *FLAGS, *(f"-D{name}={value}" for name, value in macros.items()), str(main)]
    name = f"{main.stem}-{_digest(main.parent, command)}.so"
    folder = cache_directory()
    if folder and (reason := _distrust(folder)):
        logger.warning("%s, so the compiled kernels are neither taken from there nor kept", reason)
        folder = None
    if folder:
        with contextlib.suppress(OSError):  # there is none yet, or it may not be executed
            return ctypes.CDLL(str(folder / name))
    logger.info("compiling %s for this CPU, once: %s", main.name, shlex.join(command))
    if folder:
        with contextlib.suppress(CannotCompile):  # the directory is full, read-only, its files may not be executed, ...
            return _build(command, name, folder)
    return _build(command, name, None)


def _distrust(folder: Path) -> str | None:
    """Return why code from this directory must not run: it is somebody else's, or others can write to it."""
    try:
        status = folder.lstat()
    except OSError:  # not there yet, or nothing can be in it
        return None
    if status.st_uid != os.geteuid():
        return f"{folder} belongs to another user: set LLN_KERNEL_CACHE to a directory of your own"
    if status.st_mode & 0o022:
        return f"others may write to {folder}: empty it, and then chmod 700 {folder}"
    return None


def _build(command: list[str], name: str, folder: Path | None) -> ctypes.CDLL:
    """Compile in `folder` and leave the library there, or in a temporary directory if it is None."""
    try:
        if folder:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / name
            _compile([*command, "-o", str(built), "-lm"])
            library = ctypes.CDLL(str(built))
            if folder:
                with open(built, "rb") as file:
                    os.fsync(file)
                built.replace(folder / name)
            return library
    except OSError as error:
        raise CannotCompile(str(error)) from error


def cache_directory() -> Path | None:
    """$LLN_KERNEL_CACHE, else lln_fairseq/kernels in the user's cache directory; None for users without a home."""
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    given = os.environ.get("LLN_KERNEL_CACHE")
    if not given and user.startswith("~"):
        return None
    return Path(given or Path(user) / "lln_fairseq" / "kernels").resolve()


def _compiler() -> list[str]:
    if named := os.environ.get("CC"):
        try:
            return shlex.split(named)
        except ValueError as error:
            raise CannotCompile(f"CC={named}: {error}") from error
    found = next(filter(None, map(shutil.which, COMPILERS)), None)
    if found is None:
        raise CannotCompile(f"no C compiler: none of {', '.join(COMPILERS)} is installed, and CC names no other")
    return [found]


def _compile(command: list[str]) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCompile(f"the C compiler {command[0]} cannot be run: {error}") from error
    if result.returncode:
        problem = next((line for line in result.stderr.splitlines() if "error" in line), result.stderr.strip()[-200:])
        raise CannotCompile(f"{command[0]} ended with {result.returncode}: {problem}")


def _digest(folder: Path, command: list[str]) -> str:
    """Of the sources, the command and the CPU: a home directory may be shared by machines with different ones."""
    sources = b"".join(path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix in (".c", ".h"))
    return hashlib.sha256(sources + repr((command, _cpu())).encode()).hexdigest()[:16]


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU "))}))
