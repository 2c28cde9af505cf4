"""A model directory of Hugging Face: its JSON files and its tensors, in one file or in several; and a new directory."""

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
from lln_fairseq.errors import InputError, first_line

CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises: InputError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read: {first_line(error)}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} cannot be read: it holds no JSON object")
    return content


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of the model by name. Nothing is executed: a pickle that wants to call a function is refused.

    Raises: InputError for a directory without weights, files that are damaged or missing, and what is no tensor.
    """
    path = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if path is None:
        raise InputError(f"{folder} holds no weights: neither {' nor '.join(WEIGHTS[::2])}, whole or with an index")
    files = _files_of(path) if path.suffix == ".json" else [path]
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= _read(file)
    wrong = [str(name)[:80] for name, value in tensors.items() if not isinstance(value, Tensor)]
    if wrong:
        raise InputError(f"{path} holds what is no tensor: {wrong[0]}")
    return tensors


def _files_of(index: Path) -> list[Path]:
    """The files that an index lists, all of them beside it."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise InputError(f"{index} lists no files")
    files = [index.parent / name for name in sorted(set(names.values()))]
    for file in files:
        if file.parent != index.parent or not file.is_file():
            raise InputError(f"{index} lists {file.name}, which is not beside it")
    return files


def _read(path: Path) -> dict[str, Tensor]:
    if path.suffix != ".safetensors":
        content = load_plain_data(str(path))
        verify_checksums(str(path))
        if not isinstance(content, dict):
            raise InputError(f"{path} holds no model: {type(content).__name__}")
        return content
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no dictionary
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{path} is damaged: {first_line(error)}") from error


def as_float32(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Numbers in the dtype of our checkpoints; integers (a mechanism's seeds) stay."""
    return {
        name: (value.to(torch.float32) if value.is_floating_point() else value).contiguous()
        for name, value in tensors.items()
    }


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """Yield a hidden directory beside `out` that is renamed to `out` on a clean exit and removed otherwise.

    What a killed program has left in the hidden directory is removed first.
    Raises: InputError if `out` exists or another process is writing it.
    """
    if out.exists() or out.is_symlink():
        raise InputError(f"{out} is there already")
    part = out.with_name(f".{out.name}.part")
    part.mkdir(parents=True, exist_ok=True)
    lock_file = lock_directory(part, "conversion", "OUT")
    try:
        for left in part.iterdir():
            if left.name != LOCK:
                left.unlink()
        yield part
        mask = os.umask(0)
        os.umask(mask)
        for file in part.iterdir():  # some libraries write files for their owner alone
            file.chmod(0o666 & ~mask)
        (part / LOCK).unlink()
        part.rename(out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    finally:
        lock_file.close()


def write_large(path: Path, write: Callable[[Path], None]) -> None:
    """write(path), by a library that has errors of its own for a disk that is full. Raises: InputError."""
    try:
        write(path)
    except Exception as error:
        free = shutil.disk_usage(path.parent).free / 1e6
        raise InputError(f"cannot write {path.name}: {first_line(error)} ({free:.0f} MB free)") from error
