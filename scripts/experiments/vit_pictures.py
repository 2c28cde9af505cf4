"""Load labeled pictures from a directory with one folder per class, or the digits that scikit-learn includes."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lln_fairseq.command import UserError

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
VALID_SHARE = 0.15
TEST_SHARE = 0.25
SPLIT_SEED = 0  # the split does not depend on the seed of a run


@dataclass
class Pictures:
    """A data set of labeled pictures, which are square and have the same size.

    Attributes:
        pixels: uint8 (N, channels, side, side).
        labels: int64 (N), indices into `classes`.
        classes: names of the classes.
    """

    pixels: Tensor
    labels: Tensor
    classes: list[str]

    def split(self, name: str) -> "Pictures":
        """Return the pictures of one split, "train", "valid" or "test", sorted by class.

        Every class is divided in the same proportions. The division is random, but the same in every call.
        """
        rows = []
        for label in range(len(self.classes)):
            rows_of_class = torch.nonzero(self.labels == label)[:, 0]
            rows.append(_select_split(rows_of_class, name))
        selected = torch.cat(rows)
        return Pictures(self.pixels[selected], self.labels[selected], self.classes)

    def batches(self, size: int, generator: torch.Generator | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of all pictures with their labels.

        Args:
            size: pictures per batch; the last batch can have fewer.
            generator: draws the order; None keeps the order of the pictures.

        Yields:
            The pictures as float32 in [0, 1], (B, channels, side, side), and their labels, int64 (B).
        """
        count = len(self.labels)
        if generator is None:
            order = torch.arange(count)
        else:
            order = torch.randperm(count, generator=generator)
        for rows in order.split(size):
            yield self.pixels[rows].float() / 255, self.labels[rows]


def _select_split(rows: Tensor, name: str) -> Tensor:
    """Return the rows that belong to the split `name`. `rows` are the row numbers of one class, int64 (rows)."""
    shuffled = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(SPLIT_SEED))]
    valid_count = round(VALID_SHARE * len(rows))
    test_count = round(TEST_SHARE * len(rows))
    valid, test, train = shuffled.split([valid_count, test_count, len(rows) - valid_count - test_count])
    return {"valid": valid, "test": test, "train": train}[name]


def load_digits_pictures() -> Pictures:
    """Return the 1,797 handwritten digits of UCI: gray pictures of 8 x 8 pixels in ten classes."""
    from sklearn.datasets import load_digits

    data = load_digits()
    pixels = torch.from_numpy(data.images)[:, None] * (255 / 16)
    return Pictures(pixels.round().to(torch.uint8), torch.from_numpy(data.target), [str(i) for i in range(10)])


def load_folder_pictures(path: Path, side: int | None) -> Pictures:
    """Load the pictures PATH/CLASS/* in color. Files whose suffix is not in SUFFIXES are ignored.

    Args:
        path: directory with one folder for each class. Classes are sorted by name.
        side: side length in pixels to which pictures are scaled and cropped; None keeps their size.

    Raises:
        UserError: if there are fewer than two classes, a class has too few pictures for three splits, or a file cannot
            be read. If `side` is None, also if the pictures are not square or have different sizes.
    """
    classes = sorted(entry.name for entry in path.iterdir() if entry.is_dir())
    if len(classes) < 2:
        raise UserError(f"{path} must have at least two folders, one for each class, and has {len(classes)}")
    pixels: list[np.ndarray] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        files = sorted(file for file in (path / name).iterdir() if file.suffix.lower() in SUFFIXES)
        if len(files) < 1 / min(VALID_SHARE, TEST_SHARE):
            raise UserError(f"{path / name} has too few pictures to split: {len(files)} ({', '.join(SUFFIXES)})")
        for file in files:
            picture = _read_picture(file, side)
            height, width, _ = picture.shape
            if height != width or (pixels and picture.shape != pixels[0].shape):
                raise UserError(
                    f"{file} has {width} x {height} pixels: all pictures must be square and of one size, or use --side"
                )
            pixels.append(picture)
            labels.append(label)
    return Pictures(torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2), torch.tensor(labels), classes)


def _read_picture(file: Path, side: int | None) -> np.ndarray:
    """Return a picture as uint8 (height, width, 3). If `side` is not None, it is scaled and cropped to a square.

    Raises UserError if the file is not a readable picture.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(file) as opened:
            image = opened.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"{file} is not a readable picture: {error}") from error
    if side is not None:
        image = ImageOps.fit(image, (side, side))
    return np.asarray(image)
