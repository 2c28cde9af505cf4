"""Read the JSON files of a Hugging Face directory, and create output directories atomically."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lln_fairseq.checkpoints.saving import LOCK, lock_directory
from lln_fairseq.errors import UserError, first_line
from lln_fairseq.files import atomic_path

CONFIG = "config.json"


def parse_json(path: Path) -> Any:
    if not path.exists():
        raise UserError(f"{path} does not exist")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {first_line(error)}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. UserError is raised if it cannot be read or holds something else."""
    content = parse_json(path)
    if not isinstance(content, dict):
        raise UserError(f"{path} cannot be read: it does not hold a JSON object")
    return content


def as_float32(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors with floating-point values in float32, the dtype of the project's checkpoints.

    Integer tensors, such as the seeds of some attentions, keep their dtype. A tensor that needs no change is returned
    as it is, not as a copy.
    """
    converted = {}
    for name, value in tensors.items():
        if value.is_floating_point():
            value = value.to(torch.float32)
        converted[name] = value.contiguous()
    return converted


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """Yield a hidden directory next to `out` that is renamed to `out` on a clean exit and removed otherwise.

    Missing parent directories are created. Files that a killed program left in the hidden directory are removed first.
    The files get the permissions of the process's umask. UserError is raised if `out` exists already, or another
    process is writing it.
    """
    _require_missing(out)
    part = out.with_name(f".{out.name}.part")
    part.mkdir(parents=True, exist_ok=True)
    lock_file = lock_directory(part, "conversion", "OUT")
    try:
        for leftover in part.iterdir():
            if leftover.is_dir():
                shutil.rmtree(leftover)
            elif leftover.name != LOCK:
                leftover.unlink()
        yield part
        umask = os.umask(0)  # the only way to read the umask is to set it
        os.umask(umask)
        for file in part.rglob("*"):
            if file.is_file():  # some libraries write files that only their owner can read
                file.chmod(0o666 & ~umask)
        part.rename(out)
        (out / LOCK).unlink()  # not earlier: another process would lock `part` and empty it
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    finally:
        lock_file.close()


def _require_missing(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise UserError(f"{out} already exists: remove it or choose another directory")


def write_large(path: Path, write: Callable[[Path], None]) -> None:
    """Call write(path), and turn any exception, such as a library's own for a full disk, into a UserError."""
    try:
        write(path)
    except Exception as error:
        free = shutil.disk_usage(path.parent).free / 1e6
        raise UserError(f"cannot write {path.name}: {first_line(error)} ({free:.0f} MB free)") from error


def save_atomically(state: Any, path: Path) -> None:
    """Save an object with `torch.save`, completely or not at all. Raises UserError if the file cannot be written."""

    def write(path: Path) -> None:
        with atomic_path(path) as part:
            torch.save(state, part)

    write_large(path, write)
