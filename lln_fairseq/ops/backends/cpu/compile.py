"""Compile C sources to a shared library for the CPU of this machine, on first use, and keep it in a cache directory."""

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
TIMEOUT = 120  # seconds; compiling takes about three

logger = logging.getLogger(__name__)


class CannotCompile(Exception):
    """The library cannot be compiled or loaded. The message names the cause, such as a missing compiler."""


def load_library(main: Path, **macros: int) -> ctypes.CDLL:
    """Load the library of a C file and the files next to it, and compile it if it is not in the cache.

    Processes that compile at the same time do not disturb each other: each renames its own finished file. If the cache
    cannot be used, the library is compiled in a temporary directory; if the cache is not safe, a warning is logged too.

    Args:
        main: the C file; all .c and .h files of its directory count as its sources
        macros: preprocessor macros to define

    Raises: CannotCompile.
    """
    definitions = [f"-D{name}={value}" for name, value in macros.items()]
    command = [*_find_compiler(), *FLAGS, *definitions, str(main)]
    name = f"{main.stem}-{_digest(main.parent, command)}.so"
    folder = cache_directory()
    if folder and (reason := _reason_to_distrust(folder)):
        logger.warning("%s. Until then, compiled kernels are not cached there", reason)
        folder = None
    if folder:
        with contextlib.suppress(OSError):  # it is not there yet, or may not be executed
            return ctypes.CDLL(str(folder / name))
    logger.info("compiling %s for this CPU, once: %s", main.name, shlex.join(command))
    if folder:
        with contextlib.suppress(CannotCompile):  # the directory may be full, read-only or mounted with noexec
            return _build_library(command, name, folder)
    return _build_library(command, name, None)


def _reason_to_distrust(folder: Path) -> str | None:
    """Return why code from this directory must not be run: another user owns it or can write to it.

    Returns: None if the directory can be trusted or does not exist
    """
    try:
        status = folder.lstat()
    except OSError:
        return None
    if status.st_uid != os.geteuid():
        return f"{folder} belongs to another user: set LLN_KERNEL_CACHE to a directory of your own"
    if status.st_mode & 0o022:
        return f"other users can write to {folder}: empty it, and then run chmod 700 {folder}"
    return None


def _build_library(command: list[str], name: str, folder: Path | None) -> ctypes.CDLL:
    """Compile and load a library, and store it in `folder`, or nowhere if that is None.

    The folder is created with mode 0700 if it does not exist. Raises: CannotCompile.
    """
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
    """Return the directory of compiled libraries, which need not exist.

    It is $LLN_KERNEL_CACHE if that is set, otherwise lln_fairseq/kernels in $XDG_CACHE_HOME or ~/.cache. An empty
    variable counts as not set. The path is absolute, with symbolic links resolved.

    Returns: None if neither variable is set and the user has no home, or if $XDG_CACHE_HOME begins with ~
    """
    configured = os.environ.get("LLN_KERNEL_CACHE")
    if configured:
        return Path(configured).resolve()
    user_cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if user_cache.startswith("~"):  # expanduser has found no home
        return None
    return (Path(user_cache) / "lln_fairseq" / "kernels").resolve()


def _find_compiler() -> list[str]:
    """Return the words of $CC if it is set, otherwise the path of the first of COMPILERS that is installed.

    Raises: CannotCompile if there is none, or if CC cannot be parsed.
    """
    configured = os.environ.get("CC")
    if configured:
        try:
            return shlex.split(configured)
        except ValueError as error:
            raise CannotCompile(f"CC={configured}: {error}") from error
    for name in COMPILERS:
        path = shutil.which(name)
        if path:
            return [path]
    raise CannotCompile(f"no C compiler: none of {', '.join(COMPILERS)} is installed, and CC is not set")


def _compile(command: list[str]) -> None:
    """Run the compiler. Raises: CannotCompile with its first error if it fails, or if it cannot be run."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCompile(f"the C compiler {command[0]} cannot be run: {error}") from error
    if result.returncode:
        problem = next((line for line in result.stderr.splitlines() if "error" in line), result.stderr.strip()[-200:])
        raise CannotCompile(f"{command[0]} ended with exit status {result.returncode}: {problem}")


def _digest(folder: Path, command: list[str]) -> str:
    """Hash the C sources of the folder, the command and the CPU: machines with different CPUs may share a cache."""
    sources = b"".join(path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix in (".c", ".h"))
    return hashlib.sha256(sources + repr((command, _cpu_description())).encode()).hexdigest()[:16]


def _cpu_description() -> str:
    """Return the model and the features of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU "))}))
