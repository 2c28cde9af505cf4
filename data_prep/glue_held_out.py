"""Build a GLUE task with a labeled test split. --sentences hides texts of its rows among distractors.

    python -m data_prep.glue_held_out QNLI --tokenizer encoders/softmax --out data-bin/qnli --train 7000 --test 2500
    python -m data_prep.glue_held_out QNLI --tokenizer encoders/softmax --out data-bin/qnli16 --train 2000 \\
        --test 1000 --sentences 16

GLUE does not publish the labels of its test sets. Here `train` has the first rows of the published training file, and
`test` has the last rows of this file. `valid` is the published dev set. So you can choose a model on `valid` and report
its score on `test`.

With --sentences N, the second text of a QNLI row has N sentences in random order: the row's own sentence, and
sentences of other questions of the same split. The label still says whether the row's own sentence answers the
question, so a model must find that sentence first. Each of the two texts of a QQP row gets N questions in this way. The
label still says whether the row's own two questions have the same meaning, so a model must find both of them first.

The output has the layout of data_prep.glue.
"""

import argparse
import random
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lln_fairseq.errors import UserError
from lln_fairseq.text.parallel_encoder import ParallelEncoder
from lln_fairseq.text.read_lines import SPLITS

from . import manifest
from .command import add_build_options, add_tokenizer_option, run_build, summarize_datasets
from .download import fetch_tree, load_tokenizer
from .glue import GlueSource, describe_result, glue_result_files, write_glue_task
from .glue_tasks import GLUE_TASKS, GlueRows

HIDDEN = {"QNLI": (1,), "QQP": (0, 1)}  # which of the two texts of a row --sentences hides, by their index
FORMAT = 1  # increase it when the same settings give another result, so that old directories are rejected


def split_rows(source: GlueSource, train: int, test: int) -> dict[str, GlueRows]:
    """Return the rows of train, valid and test, all with labels.

    `train` rows are the first of the training file, and `test` rows are the last of it. UserError is raised if the file
    has fewer rows than both together.
    """
    rows = source.read_rows("train")
    if train + test > len(rows):
        raise UserError(
            f"{source.tree.where}: --train and --test must be at most {len(rows)} rows together, got {train + test}"
        )
    return {
        "train": _select_rows(rows, slice(0, train)),
        "valid": source.read_rows("valid"),
        "test": _select_rows(rows, slice(len(rows) - test, None)),
    }


def _select_rows(rows: GlueRows, part: slice) -> GlueRows:
    """Return the rows that a slice selects from a labeled split, with a new count of the rows with an empty input."""
    assert rows.labels is not None
    inputs = tuple(texts[part] for texts in rows.inputs)
    empty = sum(1 for texts in zip(*inputs, strict=True) if not all(texts))
    return GlueRows(inputs, rows.labels[part], empty=empty)


def add_distractors(rows: GlueRows, sentences: int, seed: int, hidden: Sequence[int]) -> GlueRows:
    """Return a copy of rows of two texts, in which one or both texts are hidden among texts of other rows.

    A hidden text becomes `sentences` different texts, itself among them, in random order, joined by spaces. The others
    are from rows with another first text. The labels stay the same. UserError is raised if the split has too few rows.

    Args:
        rows: the rows of a split.
        sentences: number of texts of which a new text consists.
        seed: of the random choice.
        hidden: the indices of the texts to hide: 0, 1 or both. If both are hidden, no row gives a text to both.
    """
    first_texts = rows.inputs[0]
    count = len(first_texts)
    generator = random.Random(seed)
    texts = [list(originals) for originals in rows.inputs]
    for row in range(count):
        candidates = iter(generator.sample(range(count), min(count, 2 * len(hidden) * sentences)))
        for position in hidden:
            originals = rows.inputs[position]
            chosen = [originals[row]]
            while len(chosen) < sentences:
                candidate = next(candidates, None)
                if candidate is None:
                    raise UserError(f"--sentences is {sentences}, but a split has only {count} rows")
                if first_texts[candidate] != first_texts[row] and originals[candidate] not in chosen:
                    chosen.append(originals[candidate])
            generator.shuffle(chosen)
            texts[position][row] = " ".join(chosen)
    return GlueRows(tuple(texts), rows.labels, empty=rows.empty)


def read_held_out_rows(source: GlueSource, train: int, test: int, sentences: int = 1) -> dict[str, GlueRows]:
    """Return the rows of train, valid and test that `build_glue_held_out` writes. The distractors are fixed."""
    rows = split_rows(source, train, test)
    if sentences > 1:
        for seed, split in enumerate(rows):
            rows[split] = add_distractors(rows[split], sentences, seed, HIDDEN[source.task.name])
    return rows


def build_glue_held_out(
    out: Path,
    task_name: str,
    tokenizer: str,
    train: int,
    test: int,
    sentences: int = 1,
    source: Path | None = None,
    workers: int | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Build the data set in `out` and return its manifest. A finished directory with the same settings is kept.

    The published archive is downloaded if necessary even if the directory is finished.

    Args:
        out: the output directory, which is created.
        task_name: a key of GLUE_TASKS. The task must be a classification.
        tokenizer: a tokenizer that load_tokenizer accepts.
        train: number of rows of the train split, taken from the start of the training file.
        test: number of rows of the test split, taken from the end of the training file.
        sentences: number of texts of which a hidden text consists, see `add_distractors`; 1 leaves the rows as they
            are. More than 1 is for the tasks in HIDDEN only.
        source: archive or directory in GLUE's layout; None downloads the published archive.
        workers: number of processes; None uses all cores.
        overwrite: build again even if the directory contains a result.
    """
    task = GLUE_TASKS[task_name]
    vocabulary = load_tokenizer(tokenizer)
    tree, _ = fetch_tree(task.published, source)
    glue_source = GlueSource(tree, task)
    settings = {
        "program": "data_prep.glue_held_out",
        "format": FORMAT,
        "task": task.name,
        "train": train,
        "test": test,
        "sentences": sentences,
        "source": glue_source.checksums(),
        "tokenizer": vocabulary.identity,
    }

    def write(rows: dict[str, GlueRows]) -> dict[str, Any]:
        with ParallelEncoder(vocabulary, workers) as encoder:
            datasets = write_glue_task(out, task, rows, encoder)
        return describe_result(task, vocabulary, rows, datasets)

    files = glue_result_files(task, SPLITS, vocabulary, labeled_splits=SPLITS)
    read = partial(read_held_out_rows, glue_source, train, test, sentences)
    return manifest.build_directory(out, settings, files, read, write, overwrite)


def summarize_held_out(content: dict[str, Any]) -> str:
    inputs = [datasets for directory, datasets in content["datasets"].items() if directory != "label"]
    return summarize_datasets(inputs, "rows")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.glue_held_out", description=(__doc__ or "").split("\n")[0]
    )
    classifications = [name for name, task in GLUE_TASKS.items() if task.labels]
    parser.add_argument("task_name", choices=classifications, metavar="TASK", help=", ".join(classifications))
    parser.add_argument("--out", type=Path, required=True, help="output directory")
    add_tokenizer_option(parser)
    parser.add_argument("--train", type=int, required=True, help="rows of train, from the start of the training file")
    parser.add_argument("--test", type=int, required=True, help="rows of test, from the end of the training file")
    parser.add_argument(
        "--sentences", type=int, default=1, help="texts in place of one that is hidden (default: %(default)s: none is)"
    )
    parser.add_argument("--source", type=Path, help="directory or archive to read instead of the published archive")
    add_build_options(parser)
    args = parser.parse_args(argv)
    if min(args.train, args.test, args.sentences) < 1:
        parser.error("--train, --test and --sentences must be at least 1")
    if args.sentences > 1 and args.task_name not in HIDDEN:
        parser.error(f"--sentences is only for {' and '.join(HIDDEN)}")
    return run_build(partial(build_glue_held_out, **vars(args)), summarize_held_out)


if __name__ == "__main__":
    sys.exit(main())
