"""Pictures with classes: a folder with a sub-folder a class, or scikit-learn's digits, which need no file."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lln_fairseq.command import UserError

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
SHARES = {"valid": 0.15, "test": 0.25}  # the rest is for training
SEED = 0  # of the split, whatever the seed of a training


@dataclass
class Pictures:
    """Bytes (N, channels, side, side), class ids (N), the names of the classes."""

    pixels: Tensor
    labels: Tensor
    classes: list[str]

    def split(self, name: str) -> "Pictures":
        """`train`, `valid` or `test`: of every class the same share, drawn once and for all."""
        rows = torch.cat(
            [_share(torch.nonzero(self.labels == label)[:, 0], name) for label in range(len(self.classes))]
        )
        return Pictures(self.pixels[rows], self.labels[rows], self.classes)

    @property
    def digest(self) -> str:
        """Return the sha256 of the pictures, the labels and the names of the classes."""
        sha256 = hashlib.sha256(repr((tuple(self.pixels.shape), self.classes, self.labels.tolist())).encode())
        sha256.update(self.pixels.numpy().tobytes())
        return sha256.hexdigest()

    def batches(self, size: int, generator: torch.Generator | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Pictures as numbers in [0, 1] and their labels, in random order if there is a generator."""
        count = len(self.labels)
        order = torch.arange(count) if generator is None else torch.randperm(count, generator=generator)
        for rows in order.split(size):
            yield self.pixels[rows].float() / 255, self.labels[rows]


def _share(rows: Tensor, name: str) -> Tensor:
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(SEED))]
    valid, test = (round(SHARES[part] * len(rows)) for part in ("valid", "test"))
    return {"valid": rows[:valid], "test": rows[valid : valid + test], "train": rows[valid + test :]}[name]


def digits() -> Pictures:
    """1,797 grey pictures of 8 x 8 in ten classes (UCI's optical recognition of handwritten digits)."""
    from sklearn.datasets import load_digits

    data = load_digits()
    pixels = torch.from_numpy(data.images)[:, None] * (255 / 16)
    return Pictures(pixels.round().to(torch.uint8), torch.from_numpy(data.target), [str(i) for i in range(10)])


def folder(path: Path, side: int | None) -> Pictures:
    """The pictures of PATH/CLASS/*, in colour, all in memory as bytes; with a side scaled and cut to it.

    Raises: UserError for a folder without two classes, a class with too few pictures, what is no picture, and for other
    sizes than the first one's where no side is given.
    """
    classes = sorted(entry.name for entry in path.iterdir() if entry.is_dir())
    if len(classes) < 2:
        raise UserError(f"{path} has {len(classes)} sub-folders with pictures, and needs one for each class")
    pixels: list[np.ndarray] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        files = sorted(file for file in (path / name).iterdir() if file.suffix.lower() in SUFFIXES)
        if len(files) < 1 / min(SHARES.values()):
            raise UserError(f"{path / name} has {len(files)} pictures ({', '.join(SUFFIXES)}), too few to be split")
        for file in files:
            picture = _read(file, side)
            height, width, _ = picture.shape
            if height != width or (pixels and picture.shape != pixels[0].shape):
                raise UserError(f"{file} has {width} x {height} pixels: all must be square and equal, or give --side")
            pixels.append(picture)
            labels.append(label)
    return Pictures(torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2), torch.tensor(labels), classes)


def _read(file: Path, side: int | None) -> np.ndarray:
    from PIL import Image, ImageOps  # matplotlib needs it too

    try:
        with Image.open(file) as opened:
            image = opened.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"{file} is no picture that can be read: {error}") from error
    return np.asarray(image if side is None else ImageOps.fit(image, (side, side)))
