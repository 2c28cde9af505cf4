"""GLUE, from the published archives to data for fairseq's sentence_prediction task.

    python -m data_prep.glue --out data-bin/glue --tokenizer data-bin/wikitext-103 --tasks MNLI QNLI QQP SST-2

The tokenizer has no default: it must be that of pre-training, so name the pre-training data (or see docs/data.md).
Files come from the published archives, which are fetched, or from --source: a directory or an archive in GLUE's
layout (TASK/train.tsv, ...), or a directory that holds the published archives.

    OUT/TASK/{input0,input1}/                 dict.txt and {train,valid,test}.{bin,idx}; MNLI: valid1, test1 too
    OUT/TASK/label/                           dict.txt in the order of GLUE_TASKS and the labels but of test;
                                              STS-B: {train,valid}.label, score / 5 line by line
    OUT/TASK/encoder.json, vocab.bpe or spm.model
    OUT/TASK/manifest.json                    last file written: settings, sources, tokenizer, counts, checksums
"""

import argparse
import io
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lln_fairseq.data import manifest
from lln_fairseq.data.archives import FileTree
from lln_fairseq.data.binary_format import binarize
from lln_fairseq.data.download import fetch_tree
from lln_fairseq.data.encode import ParallelEncoder, usable_cores
from lln_fairseq.data.files import write_bytes
from lln_fairseq.data.reporting import DataError, print_status
from lln_fairseq.data.text import read_lines
from lln_fairseq.data.vocabulary import DICTIONARY, Vocabulary, load_vocabulary

from .command import run_command
from .folders import folder_files, write_labels
from .glue_tasks import GLUE_TASKS, GlueTask, Rows, read_rows, split_cells

FORMAT = 1  # raise it when the same settings give another result: old directories are then refused, not mixed
BROKEN_LISTED = 20  # line numbers of rows left out that the manifest lists
MRPC_TRAIN, MRPC_TEST, MRPC_DEV_IDS = "msr_paraphrase_train.txt", "msr_paraphrase_test.txt", "mrpc_dev_ids.tsv"


class Source:
    """The files of one task in a tree: GLUE's layout, or MRPC as Microsoft publishes it with GLUE's list of dev ids."""

    def __init__(self, tree: FileTree, task: GlueTask) -> None:
        self.tree, self.task = tree, task
        self.as_published = task.name == "MRPC" and None not in (tree.find(MRPC_TRAIN), tree.find(MRPC_DEV_IDS))
        names = dict(task.files)
        if self.as_published:
            names = {"train": MRPC_TRAIN, "test": MRPC_TEST, "dev ids": MRPC_DEV_IDS}
        found = {split: tree.find(name, folder=task.name, excluded_folders=GLUE_TASKS) for split, name in names.items()}
        for split, name in names.items():
            if found[split] is None and not split.startswith("test"):
                raise DataError(f"{tree.where} has no {task.name}/{name}")
        self.members = {split: member for split, member in found.items() if member is not None}

    @property
    def splits(self) -> list[str]:
        """The splits that are there, fairseq's names. Test sets may be missing."""
        return [split for split in self.task.files if split in self.members or (self.as_published and split == "valid")]

    def checksums(self) -> dict[str, str]:
        """sha256 of the archive or of the task's files."""
        return self.tree.checksums(list(self.members.values()))

    def rows(self, split: str) -> Rows:
        """The rows of one split; DataError with file and line for what is wrong in it."""
        member = self.members["train" if self.as_published and split == "valid" else split]
        name = f"{self.tree.where}: {member}"
        keep = self._mrpc_rows(split) if self.as_published and split != "test" else None
        content = io.BytesIO(self.tree.read(member))
        return read_rows(read_lines(content, name), name, self.task, split, keep)

    def _mrpc_rows(self, split: str) -> Callable[[list[str]], bool]:
        """Which rows of Microsoft's training file GLUE counts to `split`: its dev set is a list of pairs of ids."""
        with self.tree.open(self.members["dev ids"]) as stream:
            ids = {tuple(cells) for _, cells in split_cells(read_lines(stream, MRPC_DEV_IDS))}
        return lambda cells: (tuple(cells[1:3]) in ids) == (split == "valid")


def result_files(
    task: GlueTask, splits: Sequence[str], vocabulary: Vocabulary, labelled: Sequence[str] | None = None
) -> list[str]:
    """Every file of the result relative to OUT/TASK, the manifest excepted. `labelled`: splits (all but test sets)."""
    if labelled is None:
        labelled = [split for split in splits if not split.startswith("test")]
    names = list(vocabulary.tokenizer.files)
    folders = {f"input{i}": splits for i in range(len(task.inputs))}
    if task.labels:
        folders["label"] = labelled
    else:
        names += [f"label/{split}.label" for split in labelled]
    for folder, present in folders.items():
        names += folder_files(folder, present)
    return names


def build(
    out: Path,
    task: GlueTask,
    vocabulary: Vocabulary,
    source: Path | None = None,
    encoder: ParallelEncoder | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Build one task in `out` and return its manifest; a finished one with the same settings is kept.

    `source`: archive or directory instead of the published files; `encoder`: one of this vocabulary, to share its
    processes between tasks. Raises DataError.
    """
    given = None  # nothing is fetched for a result that turns out to be finished
    published = True
    if source is not None:
        tree, published = fetch_tree(task.published, source)
        given = Source(tree, task)
    if given is None or published:
        sources = {file.name: file.sha256 for file in task.published}
        splits = list(task.files)
    else:
        sources = given.checksums()
        splits = given.splits
    settings = {
        "program": "data_prep.glue",
        "format": FORMAT,
        "task": task.name,
        "labels": list(task.labels),
        "source": sources,
        "tokenizer": vocabulary.identity,
    }

    def read() -> dict[str, Rows]:
        found = given or Source(fetch_tree(task.published, None)[0], task)
        print_status(f"{task.name}: reading {found.tree.where}")
        return {split: found.rows(split) for split in splits}

    def write(rows: dict[str, Rows]) -> dict[str, Any]:
        datasets = write_result(out, task, rows, encoder or ParallelEncoder(vocabulary, 1))
        return {
            "sources": [{"name": n, "sha256": s, "published": published} for n, s in sources.items()],
            "tokenizer": vocabulary.record(folder="input0/"),
            "task": {"classes": list(task.meaning or task.labels), "metric": task.metric, "head": task.num_classes},
            "counts": {split: row_counts(task, rows[split]) for split in splits},
            "datasets": datasets,
            "versions": manifest.versions(["ve-fairseq", "sentencepiece", "tiktoken", "tokenizers", "torch", "numpy"]),
        }

    files = result_files(task, splits, vocabulary)
    return manifest.build_directory(out, settings, files, read, write, overwrite)


def row_counts(task: GlueTask, rows: Rows) -> dict[str, Any]:
    """What a manifest says of the rows of a split."""
    counts: dict[str, Any] = {"rows": len(rows), "broken": len(rows.broken), "empty_inputs": rows.empty}
    if rows.broken:
        counts["broken_lines"] = rows.broken[:BROKEN_LISTED]
    if rows.labels is not None and task.labels:
        found = Counter(rows.labels)
        counts["labels"] = {label: found[label] for label in task.labels}
    return counts


def write_result(
    out: Path, task: GlueTask, rows: dict[str, Rows], encoder: ParallelEncoder
) -> dict[str, dict[str, Any]]:
    """Write every file of the result but the manifest; return the counts read back by folder and split.

    Raises DataError where a dataset does not have as many samples as its file has rows.
    """
    vocabulary = encoder.vocabulary
    for name, data in vocabulary.tokenizer.files.items():
        write_bytes(out / name, data)
    datasets: dict[str, dict[str, Any]] = {}
    for i in range(len(task.inputs)):
        folder = f"input{i}"
        write_bytes(out / folder / DICTIONARY, vocabulary.dictionary.encode())
        datasets[folder] = {}
        for split, split_rows in rows.items():
            blocks = partial(encoder.blocks, split_rows.inputs[i])
            counts = binarize(blocks, vocabulary.size, out / folder / split, len(split_rows))
            datasets[folder][split] = counts.record()
    labels = {split: split_rows.labels for split, split_rows in rows.items() if split_rows.labels is not None}
    if not task.labels:
        for split, scores in labels.items():
            write_bytes(out / f"label/{split}.label", "".join(f"{score}\n" for score in scores).encode())
        return datasets
    datasets["label"] = write_labels(out / "label", task.labels, labels)
    return datasets


def build_all(
    out: Path,
    tokenizer: str,
    tasks: Sequence[str],
    source: Path | None = None,
    workers: int | None = None,
    overwrite: bool = False,
) -> dict[str, dict[str, Any]]:
    """Build `tasks` (names of GLUE_TASKS) in OUT/TASK each; return their manifests. Raises DataError."""
    vocabulary = load_vocabulary(tokenizer)
    with ParallelEncoder(vocabulary, workers) as encoder:
        manifests = {}
        for name in tasks:
            manifests[name] = build(out / name, GLUE_TASKS[name], vocabulary, source, encoder, overwrite)
            print_status(summary(GLUE_TASKS[name], manifests[name]))
        return manifests


def summary(task: GlueTask, content: dict[str, Any]) -> str:
    """The manifest's counts as lines for the terminal."""
    lines = []
    for split, counts in content["counts"].items():
        number, published = counts["rows"], task.rows[split]
        line = f"{task.name} {split}: {number} rows" + ("" if number == published else f" (published: {published})")
        lines.append(line + "".join(f", {count} {label}" for label, count in counts.get("labels", {}).items()))
        if counts["broken"]:
            first = ", ".join(map(str, counts["broken_lines"][:5]))
            lines[-1] += f"; LEFT OUT {counts['broken']} broken rows, first at line {first}"
        unknown = sum(d[split]["unknown"] for folder, d in content["datasets"].items() if folder != "label")
        if unknown:
            lines[-1] += f"; {unknown} tokens the tokenizer does not know"
        if counts["empty_inputs"]:
            lines[-1] += f"; {counts['empty_inputs']} rows with an empty input"
    missing = [split for split in task.files if split not in content["counts"]]
    if missing:
        lines.append(f"{task.name}: the source has no {', '.join(missing)}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code (0, 1 for a failure, 2 for wrong usage, 130 for Ctrl-C)."""
    parser = argparse.ArgumentParser(prog="python -m data_prep.glue", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("data-bin/glue"), help="OUT of OUT/TASK (%(default)s)")
    parser.add_argument(
        "--tokenizer", required=True, help="the pre-training data's directory, gpt2, or a directory with a tokenizer"
    )
    parser.add_argument("--tasks", nargs="+", choices=GLUE_TASKS, default=["MNLI", "QNLI", "QQP", "SST-2"])
    parser.add_argument("--source", type=Path, help="directory or archive instead of the published archives")
    parser.add_argument("--workers", type=int, default=usable_cores(), help="processes (default: cores, %(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="build anew what is in the output directory")
    a = parser.parse_args(argv)
    return run_command(partial(build_all, a.out, a.tokenizer, a.tasks, a.source, a.workers, a.overwrite))


if __name__ == "__main__":
    sys.exit(main())
