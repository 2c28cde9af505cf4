"""Read the JSON files and tensors of a Hugging Face directory, and create output directories atomically."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lln_fairseq.checkpoints.reading import load_plain_data, verify_checksums
from lln_fairseq.checkpoints.saving import LOCK, lock_directory
from lln_fairseq.errors import UserError, first_line
from lln_fairseq.files import atomic_path

CONFIG = "config.json"
# Where the weights may be, in the order of search. The index files list the parts of a model saved in several files.
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def parse_json(path: Path) -> Any:
    """Read a JSON file. Raises UserError if it cannot be read or is not JSON."""
    if not path.exists():
        raise UserError(f"{path} does not exist")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {first_line(error)}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        UserError: if the file cannot be read, is not JSON, or does not hold a JSON object.
    """
    content = parse_json(path)
    if not isinstance(content, dict):
        raise UserError(f"{path} cannot be read: it does not hold a JSON object")
    return content


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Read all tensors of a Hugging Face model, by name.

    If there are several weight files, the first of WEIGHTS is read. Loading executes no code: a pickle that needs
    anything besides tensors and containers is refused.

    Raises:
        UserError: if there are no weights, a file is damaged or missing, or an entry is not a tensor.
    """
    path = None
    for name in WEIGHTS:
        if (directory / name).is_file():
            path = directory / name
            break
    if path is None:
        raise UserError(f"{directory} holds no weights: it needs {' or '.join(WEIGHTS)}")
    files = [path]
    if path.suffix == ".json":
        files = _files_in_index(path)
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= _read_tensor_file(file)
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise UserError(f"{path}: {str(name)[:80]} must be a tensor, got {type(value).__name__}")
    return tensors


def _files_in_index(index: Path) -> list[Path]:
    """Return the weight files that an index lists, sorted by name.

    Raises UserError if the index lists nothing, or a file that is missing or outside the directory of the index.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index} lists no files")
    if not all(isinstance(name, str) for name in weight_map.values()):
        raise UserError(f"{index} lists something that is not a file name")
    files = [index.parent / name for name in sorted(set(weight_map.values()))]
    for file in files:
        if file.parent != index.parent:
            raise UserError(f"{index} lists {file.name}, which is not in the same directory")
        if not file.is_file():
            raise UserError(f"{index} lists {file.name}, which does not exist: download it too")
    return files


def _read_tensor_file(path: Path) -> dict[str, Any]:
    """Read one weight file. The caller must reject entries that are not tensors, which a pickle can hold."""
    if path.suffix != ".safetensors":
        content = load_plain_data(str(path))
        verify_checksums(str(path))
        if not isinstance(content, dict):
            raise UserError(f"{path} must hold a dictionary of tensors, got {type(content).__name__}")
        return content
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} is damaged: {first_line(error)}") from error


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
    The files get the permissions of the process's umask.

    Raises:
        UserError: if `out` exists already, or another process is writing it.
    """
    _require_missing(out)
    part = out.with_name(f".{out.name}.part")
    part.mkdir(parents=True, exist_ok=True)
    lock_file = lock_directory(part, "conversion", "OUT")
    try:
        _require_missing(out)  # another process may have finished it before this one locked `part`
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
    """Raise UserError if there is a file, a directory or a symbolic link with this path."""
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
