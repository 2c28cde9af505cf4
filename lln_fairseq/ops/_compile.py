"""C sources to a shared library for the CPU at hand: compiled at first use, kept in a cache directory."""

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
TIMEOUT = 120  # seconds; it takes one or two

logger = logging.getLogger(__name__)


class CannotCompile(Exception):
    """Why there is no library: no compiler, or what it said."""


def load_library(main: Path, **macros: int) -> ctypes.CDLL:
    """The library of `main` and the files beside it with these macros defined, compiled unless it is in the cache.

    Processes that compile at the same time do not disturb each other: each renames its own finished file.
    Raises: CannotCompile.
    """
    command = [*_compiler(), *FLAGS, *(f"-D{name}={value}" for name, value in macros.items()), str(main)]
    folder = cache_directory()
    library = folder / f"{main.stem}-{_digest(main.parent, command)}.so"
    try:
        return ctypes.CDLL(str(library))
    except OSError:  # not there, or not whole
        logger.info("compiling %s for this CPU, once: %s", main.name, shlex.join(command))
    try:
        with tempfile.TemporaryDirectory(dir=folder if _is_writable(folder) else None) as scratch:
            built = Path(scratch) / library.name
            _compile([*command, "-o", str(built), "-lm"])
            if built.parent.parent == folder:
                built = built.replace(library)
            return ctypes.CDLL(str(built))
    except OSError as error:  # no space, a directory whose files may not be executed, ...
        raise CannotCompile(str(error)) from error


def cache_directory() -> Path:
    """$LLN_KERNEL_CACHE, else lln_fairseq/kernels in the user's cache directory."""
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("LLN_KERNEL_CACHE") or Path(user) / "lln_fairseq" / "kernels").resolve()


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _compiler() -> list[str]:
    if named := os.environ.get("CC"):
        return shlex.split(named)
    found = next(filter(None, map(shutil.which, COMPILERS)), None)
    if found is None:
        raise CannotCompile(f"no C compiler: none of {', '.join(COMPILERS)} is installed, and CC names no other")
    return [found]


def _compile(command: list[str]) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCompile(f"the C compiler {command[0]} cannot be run: {error}") from error
    if result.returncode:
        problem = next((line for line in result.stderr.splitlines() if "error" in line), result.stderr.strip()[-200:])
        raise CannotCompile(f"{command[0]} ended with {result.returncode}: {problem}")


def _digest(folder: Path, command: list[str]) -> str:
    """Of everything that the library depends on: a home directory may be shared by machines with different CPUs."""
    sources = b"".join(path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix in (".c", ".h"))
    return hashlib.sha256(sources + repr((command, _cpu())).encode()).hexdigest()[:16]


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU "))}))
