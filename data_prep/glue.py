"""Build GLUE tasks for fairseq's sentence_prediction task from the published archives.

    python -m data_prep.glue --out data-bin/glue --tokenizer data-bin/wikitext-103 --tasks MNLI QNLI QQP SST-2

--tokenizer is required, because fine-tuning needs the tokenizer of pre-training: name the directory of the pre-training
data, or see docs/data.md. The published archives are downloaded. To read local files instead, use --source with a
directory that contains these archives, or with a directory or archive in GLUE's layout (TASK/train.tsv, ...).

    OUT/TASK/{input0,input1}/                 dict.txt and {train,valid,test}.{bin,idx}; for MNLI also valid1, test1
    OUT/TASK/label/                           dict.txt in the order of GLUE_TASKS, and the labels of all splits except
                                              test; for STS-B {train,valid}.label with a scaled score per line
    OUT/TASK/encoder.json, vocab.bpe or spm.model
    OUT/TASK/manifest.json                    written last: settings, sources, tokenizer, counts, checksums
"""

import argparse
import io
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lln_fairseq.errors import UserError
from lln_fairseq.files import write_bytes
from lln_fairseq.terminal import print_status
from lln_fairseq.text.binary_format import binarize
from lln_fairseq.text.parallel_encoder import ParallelEncoder
from lln_fairseq.text.read_lines import read_lines
from lln_fairseq.text.rows import TextRows
from lln_fairseq.text.table_files import split_cells
from lln_fairseq.text.vocabulary import DICTIONARY, Vocabulary

from . import manifest
from .archives import FileTree
from .command import add_build_options, add_tokenizer_option, run_command
from .directories import directory_files, write_labels
from .download import fetch_tree, load_tokenizer
from .glue_rows import read_glue_rows
from .glue_tasks import GLUE_TASKS, GlueTask

FORMAT = 1  # increase it when the same settings give another result, so that old directories are rejected
MAX_LISTED_LINES = 20  # line numbers of broken rows in the manifest
MRPC_TRAIN = "msr_paraphrase_train.txt"
MRPC_TEST = "msr_paraphrase_test.txt"
MRPC_DEV_IDS = "mrpc_dev_ids.tsv"


class GlueSource:
    """Reads the files of one GLUE task from a directory or archive.

    The files must be in GLUE's layout. MRPC can also consist of Microsoft's two files and GLUE's list of dev ids. A
    missing file raises UserError, unless it is a test set.
    """

    def __init__(self, tree: FileTree, task: GlueTask) -> None:
        self.tree = tree
        self.task = task
        # Microsoft's MRPC: the rows of valid are in the training file.
        self.is_microsoft_mrpc = (
            task.name == "MRPC" and tree.find(MRPC_TRAIN) is not None and tree.find(MRPC_DEV_IDS) is not None
        )
        names = task.files
        if self.is_microsoft_mrpc:
            names = {"train": MRPC_TRAIN, "test": MRPC_TEST, "dev ids": MRPC_DEV_IDS}
        self.members: dict[str, str] = {}
        for split, name in names.items():
            member = tree.find(name, directory=task.name, excluded_directories=GLUE_TASKS)
            if member is not None:
                self.members[split] = member
            elif not split.startswith("test"):
                raise UserError(f"{tree.where} has no {task.name}/{name}")

    @property
    def splits(self) -> list[str]:
        """fairseq's names of the splits that the source has, in the order of `task.files`. Test sets may be missing."""
        available = set(self.members)
        if self.is_microsoft_mrpc:
            available.add("valid")
        return [split for split in self.task.files if split in available]

    def checksums(self) -> dict[str, str]:
        """Return the SHA-256 of the archive, or of each file of the task if the source is a directory, by file name."""
        return self.tree.checksums(list(self.members.values()))

    def read_rows(self, split: str) -> TextRows:
        """Read the rows of a split, which must be one of `splits`. Raises UserError if the file is malformed."""
        keep = None
        file_split = split
        if self.is_microsoft_mrpc and split != "test":
            keep = self._mrpc_filter(split)
            file_split = "train"
        member = self.members[file_split]
        name = f"{self.tree.where}: {member}"
        content = io.BytesIO(self.tree.read(member))
        return read_glue_rows(read_lines(content, name), name, self.task, split, keep)

    def _mrpc_filter(self, split: str) -> Callable[[list[str]], bool]:
        """Return a function that returns True if the cells of a row of Microsoft's training file belong to a split.

        GLUE defines its dev set by a list of pairs of sentence ids. The split is "train" or "valid".
        """
        with self.tree.open(self.members["dev ids"]) as stream:
            dev_ids = {tuple(cells) for _, cells in split_cells(read_lines(stream, MRPC_DEV_IDS))}

        def belongs_to_split(cells: list[str]) -> bool:
            is_dev = tuple(cells[1:3]) in dev_ids
            return is_dev == (split == "valid")

        return belongs_to_split


def glue_result_files(
    task: GlueTask, splits: Sequence[str], vocabulary: Vocabulary, labeled_splits: Sequence[str] | None = None
) -> list[str]:
    """Return the paths of all result files except manifest.json, relative to OUT/TASK.

    If `labeled_splits` is None, the splits have labels whose names do not start with "test".
    """
    if labeled_splits is None:
        labeled_splits = [split for split in splits if not split.startswith("test")]
    names = list(vocabulary.tokenizer.files)
    if not task.labels:
        names += [f"label/{split}.label" for split in labeled_splits]
    for i in range(len(task.inputs)):
        names += directory_files(f"input{i}", splits)
    if task.labels:
        names += directory_files("label", labeled_splits)
    return names


def build_glue_task(
    out: Path,
    task: GlueTask,
    vocabulary: Vocabulary,
    source: Path | None = None,
    encoder: ParallelEncoder | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Build one task in `out` and return its manifest. A finished directory with the same settings is kept.

    `source` is an archive or directory; None downloads the published files, unless the directory is finished. Several
    tasks can share the processes of an `encoder`, which has this vocabulary; None encodes in this process.
    """
    given_source = None
    published = True
    if source is not None:
        tree, published = fetch_tree(task.published, source)
        given_source = GlueSource(tree, task)
    if given_source is None or published:
        # Nothing is downloaded yet, because the result may already be finished.
        checksums = {file.name: file.sha256 for file in task.published}
        splits = list(task.files)
    else:
        checksums = given_source.checksums()
        splits = given_source.splits
    settings = {
        "program": "data_prep.glue",
        "format": FORMAT,
        "task": task.name,
        "labels": list(task.labels),
        "source": checksums,
        "tokenizer": vocabulary.identity,
    }

    def read() -> dict[str, TextRows]:
        glue_source = given_source
        if glue_source is None:
            tree, _ = fetch_tree(task.published, None)
            glue_source = GlueSource(tree, task)
        print_status(f"{task.name}: reading {glue_source.tree.where}")
        return {split: glue_source.read_rows(split) for split in splits}

    def write(rows: dict[str, TextRows]) -> dict[str, Any]:
        datasets = write_glue_task(out, task, rows, encoder or ParallelEncoder(vocabulary, 1))
        sources = []
        for name, sha256 in checksums.items():
            sources.append({"name": name, "sha256": sha256, "published": published})
        return {"sources": sources, **describe_result(task, vocabulary, rows, datasets)}

    files = glue_result_files(task, splits, vocabulary)
    return manifest.build_directory(out, settings, files, read, write, overwrite)


def describe_result(
    task: GlueTask, vocabulary: Vocabulary, rows: dict[str, TextRows], datasets: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Return the entries of a manifest that describe the tokenizer, the rows of a task and its data sets.

    `datasets` are the counts that write_glue_task returned.
    """
    return {
        "tokenizer": vocabulary.record(directory="input0/"),
        "counts": {split: count_glue_rows(task, split_rows) for split, split_rows in rows.items()},
        "datasets": datasets,
        "versions": manifest.versions(["ve-fairseq", "sentencepiece", "tiktoken", "tokenizers", "torch", "numpy"]),
    }


def count_glue_rows(task: GlueTask, rows: TextRows) -> dict[str, Any]:
    """Return the counts of a split for the manifest.

    "rows" is the number of rows, "broken" the number of rows that were left out because they have a wrong number of
    columns, and "empty_inputs" the number of rows with an empty input. If rows were left out, "broken_lines" has the
    numbers of the first MAX_LISTED_LINES of their lines. If the split of a classification has labels, "labels" has the
    number of rows of each class.
    """
    counts: dict[str, Any] = {"rows": len(rows), "broken": len(rows.broken), "empty_inputs": rows.empty}
    if rows.broken:
        counts["broken_lines"] = rows.broken[:MAX_LISTED_LINES]
    if rows.labels is not None and task.labels:
        label_counts = Counter(rows.labels)
        counts["labels"] = {label: label_counts[label] for label in task.labels}
    return counts


def write_glue_task(
    out: Path, task: GlueTask, rows: dict[str, TextRows], encoder: ParallelEncoder
) -> dict[str, dict[str, Any]]:
    """Write every result file in OUT/TASK except the manifest.

    Returns the counts of each data set by directory and split, read back from the files. A regression has no entry
    "label". A split without rows raises UserError.
    """
    vocabulary = encoder.vocabulary
    for name, data in vocabulary.tokenizer.files.items():
        write_bytes(out / name, data)
    datasets: dict[str, dict[str, Any]] = {}
    for i in range(len(task.inputs)):
        directory = f"input{i}"
        write_bytes(out / directory / DICTIONARY, vocabulary.dictionary.encode())
        datasets[directory] = {}
        for split, split_rows in rows.items():
            blocks = encoder.blocks(split_rows.inputs[i])
            counts = binarize(blocks, vocabulary.size, out / directory / split, len(split_rows))
            datasets[directory][split] = counts.record()
    labels = {split: split_rows.labels for split, split_rows in rows.items() if split_rows.labels is not None}
    if task.labels:
        datasets["label"] = write_labels(out / "label", task.labels, labels)
    else:
        for split, scores in labels.items():
            write_bytes(out / f"label/{split}.label", "".join(f"{score}\n" for score in scores).encode())
    return datasets


def build_glue_tasks(
    out: Path,
    tokenizer: str,
    tasks: Sequence[str],
    source: Path | None = None,
    workers: int | None = None,
    overwrite: bool = False,
) -> dict[str, dict[str, Any]]:
    """Build GLUE tasks, each in OUT/TASK, print a summary of each, and return their manifests by the task's name.

    `tasks` are keys of GLUE_TASKS. With `workers` None, all cores are used. After an error, the tasks that were built
    before it remain.
    """
    vocabulary = load_tokenizer(tokenizer)
    manifests = {}
    with ParallelEncoder(vocabulary, workers) as encoder:
        for name in tasks:
            task = GLUE_TASKS[name]
            manifests[name] = build_glue_task(out / name, task, vocabulary, source, encoder, overwrite)
            print_status(summarize_glue_task(task, manifests[name]))
    return manifests


def summarize_glue_task(task: GlueTask, content: dict[str, Any]) -> str:
    """Return the counts of a manifest as text: one line per split, and a last line if the source lacks some splits.

    A line has the number of rows and the number of rows with each label. Broken rows that were left out, unknown tokens
    and rows with an empty input follow if there are any.
    """
    lines = []
    for split, counts in content["counts"].items():
        line = f"{task.name} {split}: {counts['rows']} rows"
        for label, count in counts.get("labels", {}).items():
            line += f", {count} {label}"
        if counts["broken"]:
            first_lines = ", ".join(map(str, counts["broken_lines"][:5]))
            line += f"; LEFT OUT {counts['broken']} broken rows, first at line {first_lines}"
        unknown = 0
        for directory, datasets in content["datasets"].items():
            if directory != "label":
                unknown += datasets[split]["unknown"]
        if unknown:
            line += f"; {unknown} tokens are unknown to the tokenizer"
        if counts["empty_inputs"]:
            line += f"; {counts['empty_inputs']} rows with an empty input"
        lines.append(line)
    missing = [split for split in task.files if split not in content["counts"]]
    if missing:
        lines.append(f"{task.name}: the source has no {', '.join(missing)}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m data_prep.glue", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("data-bin/glue"),
        help="directory that gets a directory TASK for each task (default: %(default)s)",
    )
    add_tokenizer_option(parser)
    parser.add_argument("--tasks", nargs="+", choices=GLUE_TASKS, default=["MNLI", "QNLI", "QQP", "SST-2"])
    parser.add_argument("--source", type=Path, help="directory or archive to read instead of the published archives")
    add_build_options(parser)
    return run_command(partial(build_glue_tasks, **vars(parser.parse_args(argv))))


if __name__ == "__main__":
    sys.exit(main())
