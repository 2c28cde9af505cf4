"""Read the rows of the Long Range Arena's tasks from the published files.

listops     basic_{train,val,test}.tsv of LRA's release
text        aclImdb/{train,test}/{neg,pos}/*.txt; the test split is also the valid split, as in LRA
retrieval   new_aan_pairs.{train,eval,test}.tsv of LRA's release
pathfinder  pathfinder32/curv_contour_length_14/{metadata,imgs} of LRA's release
image       {data_batch_1,...,test_batch}.bin of CIFAR-10's binary version, converted to gray; the last tenth of
            the training data is the valid split
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

from lln_fairseq.errors import UserError
from lln_fairseq.files import sha256_of
from lln_fairseq.text.read_lines import SPLITS, read_raw_lines

from . import listops
from .archives import damage_as_data_error, list_matching_files, read_matching_files
from .lra_tasks import LraTask

IMAGE_SIZE = 32  # pixels, the side of a picture of Pathfinder and CIFAR-10
CIFAR_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
CIFAR_ROW_BYTES = 1 + 3 * IMAGE_SIZE * IMAGE_SIZE  # the class, then the pixels in red, green and blue
FILE_PATTERNS = {
    "listops": r"(^|/)basic_(train|val|test)\.tsv$",
    "text": r"(^|/)(train|test)/(neg|pos)/\d+_\d+\.txt$",
    "retrieval": r"(^|/)new_aan_pairs\.(train|eval|test)\.tsv$",
    "pathfinder": r"(^|[^\d/]32/)curv_contour_length_14/(metadata/[^/]+\.npy|imgs/.+\.png)$",
    "image": r"(^|/)(data_batch_[1-5]|test_batch)\.bin$",
}
FILE_DESCRIPTIONS = {  # FILE_PATTERNS in words, for error messages
    "listops": "basic_train.tsv, basic_val.tsv, basic_test.tsv",
    "text": "train/neg/*.txt, train/pos/*.txt, test/neg/*.txt, test/pos/*.txt",
    "retrieval": "new_aan_pairs.train.tsv, new_aan_pairs.eval.tsv, new_aan_pairs.test.tsv",
    "pathfinder": "pathfinder32/curv_contour_length_14 with metadata/ and imgs/",
    "image": "data_batch_1.bin to data_batch_5.bin and test_batch.bin, CIFAR-10's binary version",
}
# fairseq's name of a split, by the word for it in LRA's file names
_FAIRSEQ_SPLITS = {"train": "train", "val": "valid", "eval": "valid", "test": "test"}


@dataclass
class LraRows:
    """The inputs and labels of one split of an LRA task.

    Attributes:
        inputs: one list for each input of the task, with one byte string per row. A byte is an index into the task's
            symbols.
        labels: the class name of each row.
        empty: number of rows that were left out because an input was empty.
    """

    inputs: tuple[list[bytes], ...]
    labels: list[str] = field(default_factory=list)
    empty: int = 0

    def __len__(self) -> int:
        return len(self.labels)

    def add(self, label: str, *inputs: bytes) -> None:
        self.labels.append(label)
        for column, content in zip(self.inputs, inputs, strict=True):
            column.append(content)


RowsBySplit = dict[str, LraRows]


def no_rows(num_inputs: int) -> RowsBySplit:
    """Return an LraRows without rows for each of train, valid and test."""
    rows: RowsBySplit = {}
    for split in SPLITS:
        columns: list[list[bytes]] = [[] for _ in range(num_inputs)]
        rows[split] = LraRows(tuple(columns))
    return rows


def file_filter(task: str) -> Callable[[str], bool]:
    pattern = re.compile(FILE_PATTERNS[task])
    return lambda name: pattern.search(name) is not None


def source_checksum(source: Path, task: str) -> str:
    """Return the SHA-256 of an archive or of the task's files in a directory.

    The checksum of a directory depends on the names and contents of these files, but not on the directory's own name.
    """
    if not source.is_dir():
        return sha256_of(source)
    digest = hashlib.sha256()
    for name, path in list_matching_files(source, file_filter(task)):
        digest.update(f"{name.partition('/')[2]} {sha256_of(path)}\n".encode())
    return digest.hexdigest()


def read_published_rows(task: LraTask, source: Path, length: int, seed: int) -> RowsBySplit:
    """Read the rows of a task from its published files, in an archive or a directory.

    Texts are cut to `length` bytes. `seed` shuffles Pathfinder's pictures before they are divided into splits.
    """
    rows = no_rows(task.inputs)
    with damage_as_data_error(str(source)):
        if task.name == "listops":
            _read_listops(source, rows)
        elif task.name == "text":
            _read_reviews(source, length, rows)
        elif task.name == "retrieval":
            _read_retrieval(source, length, rows)
        elif task.name == "pathfinder":
            _read_pathfinder(task, source, seed, rows)
        else:
            _read_images(task, source, rows)
    missing = [split for split in SPLITS if not len(rows[split])]
    if missing:
        raise UserError(
            f"{source} has no rows for {', '.join(missing)} of {task.name}: expected {FILE_DESCRIPTIONS[task.name]}"
        )
    return rows


def _stripped_lines(stream: BinaryIO, name: str) -> Iterator[tuple[int, bytes]]:
    """Yield the number of each line, counted from 1, and its bytes without LF or CRLF."""
    for number, line in read_raw_lines(stream, name):
        yield number, line.removesuffix(b"\n").removesuffix(b"\r")


def _read_listops(source: Path, rows: RowsBySplit) -> None:
    """Add the rows of ListOps to `rows`. Every target is compared with the digit that its row evaluates to."""
    for name, stream in read_matching_files(source, file_filter("listops")):
        split = _FAIRSEQ_SPLITS[name.removesuffix(".tsv").rpartition("_")[2]]
        for number, line in _stripped_lines(stream, name):
            if number == 1 and line == b"Source\tTarget":
                continue
            text, _, target = line.decode(errors="replace").partition("\t")
            try:
                symbols = listops.parse_listops_row(text)
                value = str(listops.evaluate_listops_row(symbols))
            except (KeyError, ValueError) as error:
                raise UserError(f"{source}: {name}, line {number}: not a row of ListOps ({error})") from error
            if target != value:
                raise UserError(f"{source}: {name}, line {number}: the target must be {value}, got {target!r:.40}")
            rows[split].add(target, symbols)


def _read_reviews(source: Path, length: int, rows: RowsBySplit) -> None:
    """Add IMDb's reviews to `rows`, sorted by class and file name. The test reviews are also the valid ones."""
    texts: dict[str, list[tuple[str, bytes]]] = {"train": [], "test": []}
    for name, stream in read_matching_files(source, file_filter("text")):
        split, label, file = name.split("/")[-3:]
        text = stream.read(length)
        if not text:
            raise UserError(f"{source}: {name} is empty")
        texts[split].append((f"{label}/{file}", text))
    for split, reviews in texts.items():
        names = {name for name, _ in reviews}
        if len(names) < len(reviews):
            raise UserError(f"{source} has a review of {split} twice: expected {FILE_DESCRIPTIONS['text']}")
        if len({name.partition("/")[0] for name in names}) == 1:
            raise UserError(f"{source} has reviews of one class only in {split}: expected {FILE_DESCRIPTIONS['text']}")
    for split, published_split in (("train", "train"), ("valid", "test"), ("test", "test")):
        for name, text in sorted(texts[published_split]):
            rows[split].add(name.partition("/")[0], text)


def _read_retrieval(source: Path, length: int, rows: RowsBySplit) -> None:
    """Add the pairs of papers to `rows`, each of the two texts cut to `length` bytes."""
    labels = {b"0": "0", b"0.0": "0", b"1": "1", b"1.0": "1"}
    for name, stream in read_matching_files(source, file_filter("retrieval")):
        split = _FAIRSEQ_SPLITS[name.split(".")[-2]]
        for number, line in _stripped_lines(stream, name):
            cells = line.split(b"\t")
            if len(cells) != 5 or cells[0] not in labels or not all(cells[3:]):
                raise UserError(f"{source}: {name}, line {number}: expected a label, two numbers and two texts")
            rows[split].add(labels[cells[0]], cells[3][:length], cells[4][:length])


def _read_pathfinder(task: LraTask, source: Path, seed: int, rows: RowsBySplit) -> None:
    """Shuffle Pathfinder's pictures, divide them into splits, and add them to `rows`.

    Empty picture files are left out, and all are counted in the train split.
    """
    pictures: dict[str, bytes] = {}
    labels: list[tuple[str, str]] = []  # name of the picture, label
    empty = 0
    for name, stream in read_matching_files(source, file_filter("pathfinder")):
        path = f"{source}: {name}"
        inner_name = name.partition("curv_contour_length_14/")[2]
        if inner_name.endswith(".npy"):  # in spite of its name this is a text file
            for number, line in _stripped_lines(stream, name):
                cells = line.decode(errors="replace").split(" ")
                if len(cells) < 4 or cells[3] not in task.labels:
                    raise UserError(f"{path}, line {number}: expected a directory, a file, a number and a label")
                labels.append((f"{cells[0]}/{cells[1]}", cells[3]))
            continue
        content = stream.read(1 << 20)
        if content:
            pictures[inner_name] = read_png(content, path)
        else:
            empty += 1  # the release has some empty pictures, and every code base leaves them out
            pictures[inner_name] = b""
    labels.sort()
    labeled_pictures = []
    for name, label in labels:
        if name not in pictures:
            raise UserError(f"{source} has no {name}, which its metadata lists")
        if pictures[name]:
            labeled_pictures.append((label, pictures[name]))
    random.Random(f"{seed} pathfinder order").shuffle(labeled_pictures)
    add_rows_to_splits(labeled_pictures, task.shares, rows)
    rows["train"].empty = empty


def read_png(content: bytes, name: str) -> bytes:
    """Return the IMAGE_SIZE² pixels of an 8-bit gray PNG file, row by row. `name` is for error messages."""
    try:
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            image.load()
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"{name} is not a readable PNG picture: {error}") from error
    if image.mode != "L" or image.size != (IMAGE_SIZE, IMAGE_SIZE):
        raise UserError(
            f"{name}: the picture must have {IMAGE_SIZE} x {IMAGE_SIZE} pixels in 8-bit gray (mode L), "
            f"got {image.size[0]} x {image.size[1]} pixels in mode {image.mode}"
        )
    return image.tobytes()


def _read_images(task: LraTask, source: Path, rows: RowsBySplit) -> None:
    """Add CIFAR-10's pictures in gray to `rows`. The last tenth of the training data becomes valid."""
    batches = {}
    for name, stream in read_matching_files(source, file_filter("image")):
        content = np.frombuffer(stream.read(), dtype=np.uint8)
        is_damaged = not len(content) or len(content) % CIFAR_ROW_BYTES
        if is_damaged or content[::CIFAR_ROW_BYTES].max() >= len(task.labels):
            raise UserError(
                f"{source}: {name} does not hold pictures of {IMAGE_SIZE} x {IMAGE_SIZE} pixels in three colors"
            )
        batches[name.rpartition("/")[2]] = content.reshape(-1, CIFAR_ROW_BYTES)
    missing = [name for name in CIFAR_FILES if name not in batches]
    if missing:
        raise UserError(f"{source} has no {', '.join(missing)}: expected {FILE_DESCRIPTIONS['image']}")
    training_pictures = []
    for name in sorted(batches):
        for row, pixels in zip(batches[name], to_gray(batches[name][:, 1:]), strict=True):
            label = task.labels[row[0]]
            if name == "test_batch.bin":
                rows["test"].add(label, pixels.tobytes())
            else:
                training_pictures.append((label, pixels.tobytes()))
    add_rows_to_splits(training_pictures, (0.9, 0.1), rows)


def to_gray(colors: np.ndarray) -> np.ndarray:
    """Convert pictures to gray, 0.2989 red + 0.587 green + 0.114 blue, rounded as TensorFlow rounds it.

    `colors` is uint8 (pictures, 3 IMAGE_SIZE²): all red values, then all green, then all blue. The result is uint8
    (pictures, IMAGE_SIZE²).
    """
    channels = colors.reshape(len(colors), 3, -1).astype(np.int64)
    red = channels[:, 0]
    green = channels[:, 1]
    blue = channels[:, 2]
    return ((2989 * red + 5870 * green + 1140 * blue) * 511 // 5_100_000).astype(np.uint8)


def add_rows_to_splits(
    labeled_rows: Sequence[tuple[str, bytes]], shares: tuple[float, float], rows: RowsBySplit
) -> None:
    """Add pairs of a label and symbols to `rows`: the first to train, the next to valid, the remaining to test.

    `shares` are the fractions for train and valid. If they sum to 1, test gets no rows.
    """
    train_end = round(len(labeled_rows) * shares[0])
    valid_end = round(len(labeled_rows) * (shares[0] + shares[1]))
    for number, (label, symbols) in enumerate(labeled_rows):
        if number < train_end:
            rows["train"].add(label, symbols)
        elif number < valid_end:
            rows["valid"].add(label, symbols)
        else:
            rows["test"].add(label, symbols)
