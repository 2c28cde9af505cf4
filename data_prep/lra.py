"""Build the Long Range Arena's tasks for fairseq's sentence_prediction task. A symbol is a byte, a pixel or a token.

    python -m data_prep.lra listops                          generates rows; --source reads the published ones
    python -m data_prep.lra text                             IMDb's reviews, downloaded or from --source
    python -m data_prep.lra image                            CIFAR-10 in gray, downloaded or from --source
    python -m data_prep.lra retrieval --source lra_release.gz
    python -m data_prep.lra pathfinder --source lra_release.gz

--source names LRA's release (lra_release.gz), the original archive of a task, or a directory with the unpacked files.

    OUT/TASK/input0/, input1/   dict.txt and {train,valid,test}.{bin,idx}; symbol s of a row has the id 4 + s
    OUT/TASK/label/             dict.txt with class k in line k, and the labels of all three splits
    OUT/TASK/manifest.json      written last: settings, sources, counts, checksums
"""

import argparse
import dataclasses
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lln_fairseq.errors import UserError
from lln_fairseq.files import write_bytes
from lln_fairseq.terminal import print_status
from lln_fairseq.text.binary_format import Block, binarize
from lln_fairseq.text.read_lines import SPLITS
from lln_fairseq.text.special_symbols import EOS, NUM_SPECIAL
from lln_fairseq.text.tokenizers import dictionary_text
from lln_fairseq.text.vocabulary import DICTIONARY

from . import listops, manifest
from .chunks import draw_rows
from .command import add_build_options, run_build
from .directories import split_files, write_labels
from .download import fetch_file
from .lra_sources import LraRows, RowsBySplit, add_rows_to_splits, no_rows, read_published_rows, source_checksum
from .lra_tasks import LRA_TASKS, TEXT_LENGTH, LraTask

FORMAT = 1  # increase it when the same settings give another result, so that old directories are rejected
ROWS_PER_BLOCK = 1000


@dataclasses.dataclass(frozen=True)
class LraOptions:
    """The options of the command line. If `rows` or `length` is None, the default of the task is used."""

    task: str
    source: Path | None = None
    rows: int | None = None
    length: int | None = None
    reading: str = "fixed"
    seed: int = 1
    workers: int = 1


def choose_task(options: LraOptions) -> LraTask:
    """Return the requested task.

    A reading of listops other than "fixed" has its own symbols, and is appended to the name of the task.
    """
    task = LRA_TASKS[options.task]
    if options.task != "listops":
        return task
    task = dataclasses.replace(task, symbols=listops.READINGS[options.reading])
    if options.reading != "fixed":
        task = dataclasses.replace(task, name=f"{task.name}-{options.reading}")
    return task


def is_drawn(task: LraTask, options: LraOptions) -> bool:
    """Return True if the rows are drawn at random instead of read from files."""
    return task.drawn > 0 and options.source is None


def check_options(task: LraTask, options: LraOptions) -> None:
    """Raise UserError if an option does not apply to the task or is invalid, or if the task needs --source."""
    if options.rows is not None and not is_drawn(task, options):
        if task.drawn:
            raise UserError(f"--rows does not apply to {task.name} with --source: its files determine the rows")
        raise UserError(f"--rows does not apply to {task.name}")
    if options.length is not None and not task.is_text:
        raise UserError(f"--length does not apply to {task.name}")
    if options.reading != "fixed" and options.task != "listops":
        raise UserError(f"--reading does not apply to {task.name}")
    min_rows = math.ceil(1 / task.shares[1])  # so that each split has at least one row
    if options.rows is not None and options.rows < min_rows:
        raise UserError(f"--rows must be at least {min_rows}, got {options.rows}")
    if options.length is not None and options.length < 1:
        raise UserError(f"--length must be at least 1, got {options.length}")
    if not (is_drawn(task, options) or task.published or options.source):
        raise UserError(
            f"{options.task} needs --source: lra_release.gz from https://storage.googleapis.com/long-range-arena, or a "
            "directory with its files"
        )


def fill_in_defaults(task: LraTask, options: LraOptions) -> LraOptions:
    """Return the options with defaults instead of None. `rows` becomes 0 for a task that is read from files."""
    if options.rows is None:
        options = dataclasses.replace(options, rows=task.drawn)
    if options.length is None:
        options = dataclasses.replace(options, length=TEXT_LENGTH)
    return options


def build_lra_task(out: Path, options: LraOptions, overwrite: bool = False) -> dict[str, Any]:
    """Build one task in OUT/TASK and return its manifest.

    A finished directory with the same settings is kept, unless `overwrite` is True.
    """
    task = choose_task(options)
    check_options(task, options)
    options = fill_in_defaults(task, options)
    out = out / task.name
    checksums = source_checksums(task, options)
    settings: dict[str, Any] = {
        "program": "data_prep.lra",
        "format": FORMAT,
        "task": task.name,
        "data": "drawn" if is_drawn(task, options) else "published",
        "source": checksums,
        "seed": options.seed,
    }
    if is_drawn(task, options):
        settings["rows"] = options.rows
    if task.is_text:
        settings["length"] = options.length

    def write(rows: RowsBySplit) -> dict[str, Any]:
        datasets = write_lra_task(out, task, rows)
        return {
            "sources": [{"name": name, "sha256": sha256} for name, sha256 in checksums.items()],
            "counts": {split: count_lra_rows(task, rows[split]) for split in rows},
            "datasets": datasets,
            "versions": manifest.versions(["ve-fairseq", "torch", "numpy"]),
        }

    read = partial(make_rows, task, options)
    return manifest.build_directory(out, settings, lra_result_files(task), read, write, overwrite)


def source_checksums(task: LraTask, options: LraOptions) -> dict[str, str]:
    """Return the SHA-256 of each source by its name, without downloading anything. It is empty if the rows are drawn.

    A source with the name of a published file must have its content, or UserError is raised.
    """
    published = {file.name: file for file in task.published}
    source = options.source
    if source is None:
        return {name: file.sha256 for name, file in published.items()}
    if not source.exists():
        raise UserError(f"cannot read {source}: No such file or directory")
    if source.name in published:
        file = published[source.name]
        fetch_file(file, source)  # verifies the checksum
        return {file.name: file.sha256}
    return {source.name: source_checksum(source, options.task)}


def make_rows(task: LraTask, options: LraOptions) -> RowsBySplit:
    """Draw the rows of a task, or read them from --source or from the published file, which is downloaded.

    `options` must have passed check_options and fill_in_defaults.
    """
    assert options.rows is not None
    assert options.length is not None
    source = options.source
    if source is None and task.published:
        source = fetch_file(task.published[0])
    if source is None:
        drawn_rows = draw_rows(listops.draw_listops_row, options.task, options.seed, options.rows, options.workers)
        rows = no_rows(num_inputs=1)
        add_rows_to_splits([(task.labels[row.label], row.symbols) for row in drawn_rows], task.shares, rows)
    else:
        print_status(f"{task.name}: reading {source}")
        rows = read_published_rows(LRA_TASKS[options.task], source, options.length, options.seed)
    if options.task == "listops":
        for split_rows in rows.values():
            (symbols,) = split_rows.inputs
            symbols[:] = [listops.convert_to_reading(row, options.reading) for row in symbols]
    return rows


def lra_result_files(task: LraTask) -> list[str]:
    """Return the paths of all result files except manifest.json, relative to OUT/TASK."""
    directories = [f"input{i}" for i in range(task.inputs)] + ["label"]
    names = [f"{directory}/{DICTIONARY}" for directory in directories]
    for directory in directories:
        names += split_files(directory, SPLITS)
    return names


def symbol_blocks(rows: Sequence[bytes]) -> Iterator[Block]:
    """Yield blocks of samples for `binarize`. Byte b of a row becomes the id 4 + b, and </s> ends each sample."""
    for start in range(0, len(rows), ROWS_PER_BLOCK):
        yield _symbol_block(rows[start : start + ROWS_PER_BLOCK])


def _symbol_block(rows: Sequence[bytes]) -> Block:
    lengths = np.array([len(row) + 1 for row in rows], dtype=np.int64)
    ids = np.full(int(lengths.sum()), EOS, dtype=np.int32)
    is_symbol = np.ones(len(ids), dtype=bool)
    is_symbol[np.cumsum(lengths) - 1] = False
    ids[is_symbol] = np.frombuffer(b"".join(rows), dtype=np.uint8).astype(np.int32) + NUM_SPECIAL
    return ids, lengths


def write_lra_task(out: Path, task: LraTask, rows: RowsBySplit) -> dict[str, dict[str, Any]]:
    """Write every file of OUT/TASK except the manifest, and return the counts of each data set, read back from them."""
    dictionary = dictionary_text(task.symbols, {}, reserved=1)
    size = NUM_SPECIAL + dictionary.count("\n")
    datasets: dict[str, dict[str, Any]] = {}
    for i in range(task.inputs):
        directory = f"input{i}"
        write_bytes(out / directory / DICTIONARY, dictionary.encode())
        datasets[directory] = {}
        for split, split_rows in rows.items():
            blocks = symbol_blocks(split_rows.inputs[i])
            counts = binarize(blocks, size, out / directory / split, len(split_rows))
            datasets[directory][split] = counts.record()
    labels = {split: split_rows.labels for split, split_rows in rows.items()}
    datasets["label"] = write_labels(out / "label", task.labels, labels)
    return datasets


def count_lra_rows(task: LraTask, rows: LraRows) -> dict[str, Any]:
    """Return the counts of a split for the manifest. "empty" is the number of rows that were left out."""
    counts = Counter(rows.labels)
    return {"rows": len(rows), "empty": rows.empty, "labels": {label: counts[label] for label in task.labels}}


def summarize_lra_task(content: dict[str, Any]) -> str:
    lines = []
    task = content["settings"]["task"]
    origin = content["settings"]["data"]
    for split, counts in content["counts"].items():
        dataset = content["datasets"]["input0"][split]
        average = dataset["tokens"] / dataset["samples"] - 1
        majority = max(counts["labels"].values()) / counts["rows"]
        line = (
            f"{task} ({origin}) {split}: {counts['rows']} rows, {average:.0f} symbols on average, "
            f"longest {dataset['longest'] - 1}, majority class {majority:.1%}"
        )
        if counts["empty"]:
            line += f"; left out {counts['empty']} empty rows"
        lines.append(line)
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.lra", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=LRA_TASKS)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("data-bin/lra"),
        help="directory that gets the directory TASK (default: %(default)s)",
    )
    parser.add_argument("--source", type=Path, help="archive or directory with the published files")
    parser.add_argument("--rows", type=int, help="number of rows of listops to draw, over all splits (default: 100000)")
    parser.add_argument("--seed", type=int, default=1, help="seed of drawing and shuffling (default: %(default)s)")
    parser.add_argument("--length", type=int, help=f"cut texts to this number of bytes (default: {TEXT_LENGTH})")
    parser.add_argument(
        "--reading",
        choices=listops.READINGS,
        default="fixed",
        help="tokenization of listops; skyformer drops the closing brackets (default: %(default)s)",
    )
    add_build_options(parser)
    args = parser.parse_args(argv)
    options = LraOptions(
        task=args.task,
        source=args.source,
        rows=args.rows,
        length=args.length,
        reading=args.reading,
        seed=args.seed,
        workers=args.workers,
    )
    return run_build(partial(build_lra_task, args.out, options, args.overwrite), summarize_lra_task)


if __name__ == "__main__":
    sys.exit(main())
