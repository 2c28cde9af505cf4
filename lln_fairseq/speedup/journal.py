"""What a search has finished, in OUT/work, so that the same command continues an interrupted one."""

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lln_fairseq.checkpoints.saving import lock_directory
from lln_fairseq.conversion.directory import read_json, save_atomically
from lln_fairseq.errors import UserError
from lln_fairseq.files import sha256_of, write_bytes

FOLDER = "work"
FILE = "journal.json"


class Journal:
    """Keeps the results of a search, and the time that it has taken in all its runs.

    Attributes:
        folder: OUT/work, for the files of the search.
    """

    def __init__(self, out: Path, identity: dict[str, Any]) -> None:
        """Open OUT, or create it and lock it. UserError is raised if it holds another search or something else.

        `identity` has what the results depend on, as JSON.
        """
        self.folder = out / FOLDER
        self.file = self.folder / FILE
        if out.exists() and not self.file.exists() and {path.name for path in out.iterdir()} - {FOLDER}:
            raise UserError(f"{out} holds something else: give another OUT")
        self.values: dict[str, Any] = {}
        self.earlier_seconds = 0.0
        if self.file.exists():
            content = read_json(self.file)
            stored = content.get("identity", {})
            changed = [name for name, value in identity.items() if stored.get(name) != value]
            if changed:
                raise UserError(f"{out} holds a search with another {', '.join(changed)}: give another OUT")
            self.values = content["values"]
            self.earlier_seconds = content["seconds"]
        self.identity = identity
        self.start = time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = lock_directory(self.folder, "search", "OUT")
        if not self.file.exists():
            self.remove_folders()  # of a search that was refused, perhaps with another model

    def seconds(self) -> float:
        """Return the time that this and the earlier runs have taken, without what an interruption lost."""
        return self.earlier_seconds + time.monotonic() - self.start

    def save(self) -> None:
        """Write the results and the time so far."""
        content = {"identity": self.identity, "seconds": self.seconds(), "values": self.values}
        write_bytes(self.file, (json.dumps(content, indent=1) + "\n").encode())

    def remove_folders(self) -> None:
        """Remove the models of the search, but not its results."""
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)

    def once(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return a value that JSON can store, computed by the first run that needs it."""
        if name not in self.values:
            self.values[name] = compute()
            self.save()
        return self.values[name]

    def tensor_once(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """Return a tensor as `once` does; it is in a file of its own."""
        path = self.folder / f"{name}.pt"
        if not path.exists():
            save_atomically(compute(), path)
            self.save()
        tensor: Tensor = torch.load(path)
        return tensor


def checksum(path: Path) -> str:
    """Return a checksum of a file, or of all visible files in a directory."""
    if path.is_file():
        return sha256_of(path)
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path)
        if file.is_file() and not any(part.startswith(".") for part in name.parts):
            digest.update(f"{name} {sha256_of(file)}\n".encode())
    return digest.hexdigest()
