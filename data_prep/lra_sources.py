"""The rows of the Long Range Arena's tasks, from the published files and from what stands in for them.

listops     basic_{train,val,test}.tsv, of LRA's release
text        aclImdb/{train,test}/{neg,pos}/*.txt; test is valid as well, as in LRA
retrieval   new_aan_pairs.{train,eval,test}.tsv, of LRA's release
pathfinder  pathfinder32/curv_contour_length_14/{metadata,imgs}, of LRA's release
image       {data_batch_1,...,test_batch}.bin of CIFAR-10's binary version, in grey; the last tenth of train is valid
"""

import hashlib
import io
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image

from lln_fairseq.data.archives import damage_as_data_error, list_matching_files, read_matching_files
from lln_fairseq.data.files import sha256_of
from lln_fairseq.data.reporting import DataError
from lln_fairseq.data.text import SPLITS, read_raw_lines

from . import listops, newsgroups
from .lra_tasks import STAND_INS, LraTask
from .pathfinder import SIDE

CIFAR_ROW = 1 + 3 * SIDE * SIDE  # bytes
FILES = {  # what of a source belongs to a task
    "listops": r"(^|/)basic_(train|val|test)\.tsv$",
    "text": r"(^|/)(train|test)/(neg|pos)/\d+_\d+\.txt$",
    "retrieval": r"(^|/)new_aan_pairs\.(train|eval|test)\.tsv$",
    "pathfinder": r"(^|[^\d/]32/)curv_contour_length_14/(metadata/[^/]+\.npy|imgs/.+\.png)$",
    "image": r"(^|/)(data_batch_[1-5]|test_batch)\.bin$",
}
EXPECTED = {  # the same in words
    "listops": "basic_train.tsv, basic_val.tsv, basic_test.tsv",
    "text": "train/neg/*.txt, train/pos/*.txt, test/neg/*.txt, test/pos/*.txt",
    "retrieval": "new_aan_pairs.train.tsv, new_aan_pairs.eval.tsv, new_aan_pairs.test.tsv",
    "pathfinder": "pathfinder32/curv_contour_length_14 with metadata/ and imgs/",
    "image": "data_batch_1.bin to data_batch_5.bin and test_batch.bin, CIFAR-10's binary version",
}
_SPLIT_OF = {"train": "train", "val": "valid", "eval": "valid", "test": "test"}


@dataclass
class LraRows:
    """The rows of a split: the numbers of their symbols by input, their classes, and how many were left out empty."""

    inputs: tuple[list[bytes], ...]
    labels: list[str] = field(default_factory=list)
    empty: int = 0

    def __len__(self) -> int:
        return len(self.labels)

    def add(self, label: str, *inputs: bytes) -> None:
        self.labels.append(label)
        for column, content in zip(self.inputs, inputs, strict=True):
            column.append(content)


Rows = dict[str, LraRows]


def wanted(task: str) -> Callable[[str], bool]:
    """Which files of a source belong to a task."""
    pattern = re.compile(FILES[task])
    return lambda name: pattern.search(name) is not None


def source_checksum(source: Path, task: str) -> str:
    """Return the sha256 of an archive, or one over the names and contents of a task's files in a directory."""
    if not source.is_dir():
        return sha256_of(source)
    digest = hashlib.sha256()
    for name, path in list_matching_files(source, wanted(task)):
        digest.update(f"{name.partition('/')[2]} {sha256_of(path)}\n".encode())
    return digest.hexdigest()


def read_source(task: LraTask, source: Path, length: int, seed: int) -> Rows:
    """The rows of the published files of a task. Raises DataError, with file and line, for what is wrong in them."""
    rows = {split: LraRows(tuple([] for _ in range(task.inputs))) for split in SPLITS}
    with damage_as_data_error(str(source)):
        READERS[task.name](task, source, length, seed, rows)
    missing = [split for split in SPLITS if not len(rows[split])]
    if missing:
        raise DataError(f"{source} has no rows of {task.name}'s {', '.join(missing)}: expected {EXPECTED[task.name]}")
    return rows


def _stripped_lines(stream: BinaryIO, name: str) -> Iterator[tuple[int, bytes]]:
    for number, line in read_raw_lines(stream, name):
        yield number, line.removesuffix(b"\n").removesuffix(b"\r")


def _read_listops(task: LraTask, source: Path, length: int, seed: int, rows: Rows) -> None:
    for name, stream in read_matching_files(source, wanted(task.name)):
        split = _SPLIT_OF[name.removesuffix(".tsv").rpartition("_")[2]]
        for number, line in _stripped_lines(stream, name):
            if number == 1 and line == b"Source\tTarget":
                continue
            text, _, target = line.decode(errors="replace").partition("\t")
            try:
                symbols = listops.parse(text)
                value = str(listops.evaluate(symbols))
            except (KeyError, ValueError) as error:
                raise DataError(f"{source}: {name}, line {number}: not a row of ListOps ({error})") from error
            if target != value:
                raise DataError(f"{source}: {name}, line {number}: the target is {target!r:.40}, expected {value}")
            rows[split].add(target, symbols)


def _read_text(task: LraTask, source: Path, length: int, seed: int, rows: Rows) -> None:
    found: dict[str, list[tuple[str, bytes]]] = {"train": [], "test": []}
    for name, stream in read_matching_files(source, wanted(task.name)):
        split, label, file = name.split("/")[-3:]
        text = stream.read(length)
        if not text:
            raise DataError(f"{source}: {name} is empty")
        found[split].append((f"{label}/{file}", text))
    for split in SPLITS:
        for name, text in sorted(found["train" if split == "train" else "test"]):
            rows[split].add(name.partition("/")[0], text)


def _read_retrieval(task: LraTask, source: Path, length: int, seed: int, rows: Rows) -> None:
    labels = {b"0": "0", b"0.0": "0", b"1": "1", b"1.0": "1"}
    for name, stream in read_matching_files(source, wanted(task.name)):
        split = _SPLIT_OF[name.split(".")[-2]]
        for number, line in _stripped_lines(stream, name):
            cells = line.split(b"\t")
            if len(cells) != 5 or cells[0] not in labels or not all(cells[3:]):
                raise DataError(f"{source}: {name}, line {number}: expected a label, two numbers and two texts")
            rows[split].add(labels[cells[0]], cells[3][:length], cells[4][:length])


def _read_pathfinder(task: LraTask, source: Path, length: int, seed: int, rows: Rows) -> None:
    pictures: dict[str, bytes] = {}
    labels: list[tuple[str, str]] = []
    empty = 0
    for name, stream in read_matching_files(source, wanted(task.name)):
        where = f"{source}: {name}"
        inner = name.partition("curv_contour_length_14/")[2]
        if inner.endswith(".npy"):  # which is text
            for number, line in _stripped_lines(stream, name):
                cells = line.decode(errors="replace").split(" ")
                if len(cells) < 4 or cells[3] not in task.labels:
                    raise DataError(f"{where}, line {number}: expected a folder, a file, a number and a label")
                labels.append((f"{cells[0]}/{cells[1]}", cells[3]))
        elif content := stream.read(1 << 20):
            pictures[inner] = read_png(content, where)
        else:
            empty += 1  # the release has such pictures, and every code base leaves them out
            pictures[inner] = b""
    labels.sort()
    missing = next((name for name, _ in labels if name not in pictures), None)
    if missing:
        raise DataError(f"{source} has no {missing}, which its metadata lists")
    found = [(label, pictures[name]) for name, label in labels if pictures[name]]
    random.Random(f"{seed} pathfinder order").shuffle(found)
    split_rows(found, task.shares, rows)
    rows["train"].empty = empty


def read_png(content: bytes, where: str) -> bytes:
    """Return the SIDE² pixels of a grey picture of 8 bits, row by row. Raises DataError for any other."""
    try:
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            if image.mode != "L" or image.size != (SIDE, SIDE):
                raise DataError(
                    f"{where}: {image.size} pixels, mode {image.mode}; expected {SIDE} x {SIDE} in 8-bit grey"
                )
            return image.tobytes()
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{where} is not a readable PNG picture: {error}") from error


def _read_image(task: LraTask, source: Path, length: int, seed: int, rows: Rows) -> None:
    batches = {}
    for name, stream in read_matching_files(source, wanted(task.name)):
        content = np.frombuffer(stream.read(), dtype=np.uint8)
        if not len(content) or len(content) % CIFAR_ROW or content[::CIFAR_ROW].max() >= len(task.labels):
            raise DataError(f"{source}: {name} does not hold pictures of {SIDE} x {SIDE} pixels in three colours")
        batches[name.rpartition("/")[2]] = content.reshape(-1, CIFAR_ROW)
    found: dict[str, list[tuple[str, bytes]]] = {"train": [], "test": []}
    for name in sorted(batches):
        pictures = found["test" if name == "test_batch.bin" else "train"]
        for row, pixels in zip(batches[name], grey(batches[name][:, 1:]), strict=True):
            pictures.append((task.labels[row[0]], pixels.tobytes()))
    split_rows(found["train"], (0.9, 0.1), rows)
    rows["test"] = LraRows(([],))
    for label, picture in found["test"]:
        rows["test"].add(label, picture)


def grey(colours: np.ndarray) -> np.ndarray:
    """(n, 3 SIDE²) -> (n, SIDE²): 0.2989 r + 0.587 g + 0.114 b, rounded as TensorFlow does, in whole numbers."""
    red, green, blue = colours.reshape(len(colours), 3, -1).astype(np.int64).transpose(1, 0, 2)
    return ((2989 * red + 5870 * green + 1140 * blue) * 511 // 5_100_000).astype(np.uint8)


READERS: dict[str, Callable[[LraTask, Path, int, int, Rows], None]] = {
    "listops": _read_listops,
    "text": _read_text,
    "retrieval": _read_retrieval,
    "pathfinder": _read_pathfinder,
    "image": _read_image,
}


def split_rows(found: Sequence[tuple[str, bytes]], shares: tuple[float, float], rows: Rows) -> None:
    """Adds (label, symbols) to train, valid and test, one after the other."""
    ends = [round(len(found) * shares[0]), round(len(found) * (shares[0] + shares[1]))]
    for number, (label, content) in enumerate(found):
        rows[SPLITS[sum(number >= end for end in ends)]].add(label, content)


def read_stand_in(name: str, wheel: Path | None, length: int, seed: int) -> Rows:
    """Return the rows that stand in for those of a task: posts of 20 newsgroups as bytes, or scikit-learn's digits."""
    task = STAND_INS[name]
    rows = {split: LraRows(tuple([] for _ in range(task.inputs))) for split in SPLITS}
    if wheel is None:
        for number, (label, pixels) in enumerate(_digits()):
            rows[{0: "valid", 1: "test"}.get(number % 10, "train")].add(label, pixels)
        return rows
    for split, posts in newsgroups.read_posts(wheel).items():
        kept = [(label, text.encode()[:length]) for label, text in posts if text]
        rows[split].empty = len(posts) - len(kept)
        for label, *texts in _pairs(kept, random.Random(f"{seed} {split}")) if task.inputs == 2 else kept:
            rows[split].add(label, *texts)
    return rows


def _pairs(posts: list[tuple[str, bytes]], generator: random.Random) -> Iterator[tuple[str, bytes, bytes]]:
    """A pair for every post: by turns with one of its newsgroup (label 1) and of another (label 0)."""
    by_label: dict[str, list[bytes]] = {}
    for label, text in posts:
        by_label.setdefault(label, []).append(text)
    for number, (label, text) in enumerate(posts):
        others = sorted(by_label.keys() - {label}) or [label]
        group = by_label[label if number % 2 else others[int(generator.random() * len(others))]]
        yield str(number % 2), text, group[int(generator.random() * len(group))]


def _digits() -> Iterator[tuple[str, bytes]]:
    """(digit, SIDE² pixels): pictures of 8 x 8 pixels from 0 to 16, made as big as CIFAR's."""
    from sklearn.datasets import load_digits

    data = load_digits()
    for image, label in zip(data.images, data.target, strict=True):
        pixels = (image.astype(np.int64) * 255 // 16).astype(np.uint8)
        yield str(label), pixels.repeat(SIDE // 8, axis=0).repeat(SIDE // 8, axis=1).tobytes()
