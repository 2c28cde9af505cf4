"""Record with every result what produced it: the commit, the versions and the machine."""

import json
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from lln_fairseq.files import write_bytes

CHECKOUT = Path(__file__).parents[1]
COMMIT_FILE = "COMMIT"  # what `_git_state` returns, in a copy without git that scripts/gpu_run.sh --pack has made
PACKAGES = ("torch", "triton", "numpy", "transformers", "ve-fairseq", "lln-fairseq")
# The instructions that decide the speed of products.
INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")


def describe_provenance() -> dict[str, Any]:
    """Return the commit, the versions of the packages, and the machine, for a file of results.

    Call it before a measurement: the checkout may change meanwhile.

    Returns:
        `commit` and `changed`: see `read_commit`.
        `versions`: of Python and of the installed packages among PACKAGES.
        `processor`, `instructions`: its name, and which of INSTRUCTIONS it has, as far as Linux lists them.
        `threads`: of torch in this process.
        `gpu`: the name of torch's first GPU, or None.
    """
    commit, changed = read_commit()
    processor, flags = _read_processor()
    return {
        "commit": commit,
        "changed": changed,
        "versions": _read_versions(),
        "processor": processor,
        "instructions": [name for name in INSTRUCTIONS if name in flags],
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def read_commit(checkout: Path = CHECKOUT) -> tuple[str | None, list[str] | None]:
    """Return the commit of the checkout, and the files that differ from it, new ones included.

    Files in docs/ and tests/ are left out, because no result depends on them. Both are None if the package is installed
    without its repository.
    """
    packed = checkout / COMMIT_FILE
    state = packed.read_text() if packed.is_file() else _git_state(checkout)
    if not state:
        return None, None
    commit, *changes = state.splitlines()
    return commit, [line[3:] for line in changes]  # "XY PATH", where XY says how the file has changed


def _git_state(checkout: Path) -> str:
    """Return the commit and, in further lines, what `git status` lists; "" if git does not track this package."""
    state = ""
    # Without the first command, a package in a virtual environment would get the commit of the project around it.
    for command in (
        ["ls-files", "--error-unmatch", "lln_fairseq/__init__.py"],
        ["rev-parse", "HEAD"],
        ["status", "--porcelain", "--", ".", ":!docs", ":!tests"],
    ):
        try:
            done = subprocess.run(["git", "-C", checkout, *command], capture_output=True, text=True)
        except OSError:
            return ""
        if done.returncode:
            return ""
        if command[0] != "ls-files":
            state += done.stdout
    return state


def _read_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _read_processor() -> tuple[str, list[str]]:
    """Return the name of the processor and its flags, which are empty if this is not Linux."""
    name = platform.processor() or platform.machine()
    flags: list[str] = []
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return name, flags
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        if key.strip() == "flags":
            flags = value.split()
    return name, flags


def format_result(content: dict[str, Any], provenance: dict[str, Any]) -> str:
    """Return a result as JSON with its provenance as the last entry, in a line per entry and per row of a list."""
    lines = []
    for key, value in {**content, "provenance": provenance}.items():
        text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n " + ",\n ".join(json.dumps(row, ensure_ascii=False) for row in value) + "\n]"
        lines.append(f"{json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def write_result(path: Path, content: dict[str, Any], provenance: dict[str, Any]) -> None:
    """Write `format_result` to a file, atomically."""
    write_bytes(path, format_result(content, provenance).encode())
