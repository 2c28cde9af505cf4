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
CHECKSUM_BYTES = hashlib.sha256().digest_size
TIMEOUT = 120  # seconds; compiling takes about three

logger = logging.getLogger(__name__)


class CannotCompile(Exception):
    """Raised if the library cannot be compiled or loaded. The message names the cause, such as a missing compiler."""


def load_library(main: Path, **macros: int | float) -> ctypes.CDLL:
    """Load the shared library of a C file. Compile it first if it is not in the cache directory, or damaged there.

    Several processes may compile the library at the same time: each renames its own finished file. If the cache
    directory cannot be used, the library is compiled in a temporary directory instead. A cache directory that is not
    safe (see `reason_to_distrust`) is not used either, and a warning is logged.

    Args:
        main: the C file. The library is compiled again if any .c or .h file of its directory changes.
        macros: the preprocessor macros to define, with their values. Floats are constants of type float.

    Raises: CannotCompile if no compiler is found, the compiler fails, or the library cannot be loaded.
    """
    definitions = []
    for name, value in macros.items():
        definitions.append(f"-D{name}={value}f" if isinstance(value, float) else f"-D{name}={value}")
    command = [*_find_compiler(), *FLAGS, *definitions, str(main)]
    name = f"{main.stem}-{_digest(main.parent, command)}.so"
    folder = library_cache()
    if folder and (reason := reason_to_distrust(folder)):
        logger.warning("%s. Until then, compiled kernels are not cached there", reason)
        folder = None
    if folder:
        with contextlib.suppress(OSError):  # the library does not exist yet, or must not be executed there
            if _is_intact(folder / name):
                return ctypes.CDLL(str(folder / name))
    logger.info("compiling %s for this CPU, once: %s", main.name, shlex.join(command))
    if folder:
        with contextlib.suppress(CannotCompile):  # the directory may be full, read-only or mounted with noexec
            return _build_library(command, name, folder)
    return _build_library(command, name, None)


def reason_to_distrust(folder: Path) -> str | None:
    """Return a message if code from this directory must not be run, because another user owns it or can write to it.

    Returns: the message, or None if the directory can be trusted or does not exist.
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
    """Compile a library and load it.

    Args:
        command: the command of the compiler, without the output file.
        name: the file name of the library.
        folder: the directory in which to store the library. It is created with mode 0700 if it does not exist. None
            means that the library is not stored.

    Raises: CannotCompile if the library cannot be compiled, stored or loaded.
    """
    try:
        if folder:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / name
            _compile([*command, "-o", str(built), "-lm"])
            _append_checksum(built)
            library = ctypes.CDLL(str(built))
            if folder:
                with open(built, "rb") as file:
                    os.fsync(file)
                built.replace(folder / name)
            return library
    except OSError as error:
        raise CannotCompile(str(error)) from error


def _append_checksum(library: Path) -> None:
    """Append the SHA-256 checksum of a library to its file, where the dynamic linker ignores it."""
    checksum = hashlib.sha256(library.read_bytes()).digest()
    with library.open("ab") as file:
        file.write(checksum)


def _is_intact(library: Path) -> bool:
    """Return True if a library ends with its checksum. Loading one that was cut off would kill the process."""
    data = library.read_bytes()
    content = data[:-CHECKSUM_BYTES]
    return hashlib.sha256(content).digest() == data[-CHECKSUM_BYTES:]


def library_cache() -> Path | None:
    """Return the directory of the compiled libraries. It need not exist.

    It is $LLN_KERNEL_CACHE if that variable is set, otherwise $XDG_CACHE_HOME/lln_fairseq/kernels, otherwise
    ~/.cache/lln_fairseq/kernels. An empty variable counts as not set. The path is absolute, with symbolic links
    resolved.

    Returns: the path. None if LLN_KERNEL_CACHE is not set and either XDG_CACHE_HOME begins with ~ or the user has no
        home directory to use in its place.
    """
    configured = os.environ.get("LLN_KERNEL_CACHE")
    if configured:
        return Path(configured).resolve()
    user_cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if user_cache.startswith("~"):  # expanduser has found no home
        return None
    return (Path(user_cache) / "lln_fairseq" / "kernels").resolve()


def _find_compiler() -> list[str]:
    """Return the command of the C compiler as a list of arguments.

    It is $CC, split like a shell command, if that variable is set. Otherwise it is the path of the first compiler of
    COMPILERS that is installed.

    Raises: CannotCompile if $CC cannot be split, or if it is not set and no compiler is installed.
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
    """Run the compiler.

    Raises: CannotCompile if the compiler cannot be run, takes longer than TIMEOUT seconds, or fails. The message has
        the first error that the compiler prints.
    """
    try:
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCompile(f"the C compiler {command[0]} cannot be run: {error}") from error
    if result.returncode:
        problem = next((line for line in result.stderr.splitlines() if "error" in line), result.stderr.strip()[-200:])
        raise CannotCompile(f"{command[0]} ended with exit status {result.returncode}: {problem}")


def _digest(folder: Path, command: list[str]) -> str:
    """Return a hash of the C sources in the folder, the command and the CPU.

    The CPU is included because machines with different CPUs may share a cache directory.
    """
    sources = b"".join(path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix in (".c", ".h"))
    return hashlib.sha256(sources + repr((command, cpu_description())).encode()).hexdigest()[:16]


def cpu_description() -> str:
    """Return the model and the features of the CPU as text, or the result of platform.processor() if not on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU "))}))
