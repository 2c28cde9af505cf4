"""Build a classification or regression from your own rows, for fairseq's sentence_prediction task.

    python -m data_prep.tsv --train train.tsv --valid valid.tsv --text review --label sentiment \\
        --tokenizer encoders/softmax --out data-bin/reviews

Files are .csv, .jsonl (a JSON object per line, whose keys are the columns), .parquet (if pyarrow is installed), or else
TSV: a row per line, tabs between the columns, and quotes are ordinary characters. They are UTF-8. The first line of TSV
and CSV has the names of the columns, unless --no-header is given. --text and --label select columns by name, or by
number from 1. If the test file has no column of labels, `test` has no labels, and a line says so. A row that cannot be
used is an error.

The classes are the labels of `train`, in sorted order. With --labels they are those of a classifier, in its order.

The output has the layout of data_prep.glue. With --regression, label/SPLIT.label has the number of each row.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lln_fairseq.files import sha256_of
from lln_fairseq.terminal import print_status
from lln_fairseq.text.labels import read_class_names
from lln_fairseq.text.parallel_encoder import ParallelEncoder
from lln_fairseq.text.read_lines import SPLITS
from lln_fairseq.text.row_labels import SCORES_ADVICE, ClassLabels, check_number, look_like_scores
from lln_fairseq.text.rows import Columns, TextRows, read_file_rows

from . import manifest
from .command import add_build_options, add_tokenizer_option, run_command
from .download import load_tokenizer
from .glue import describe_result, glue_result_files, summarize_glue_task, write_glue_task
from .glue_tasks import GlueTask

FORMAT = 1  # increase it when the same settings give another result, so that old directories are rejected


def read_splits(files: Mapping[str, Path], columns: Columns, labels: ClassLabels | None) -> dict[str, TextRows]:
    """Read the rows of every split, with `train` first. `labels` is None for a regression.

    If `labels` has no classes yet, they are set to those of `train`. Only `test` may lack the column of the label.
    """
    rows: dict[str, TextRows] = {}
    for split, path in files.items():
        split_columns = replace(columns, requires_label=split != "test")
        if labels is None:
            rows[split] = read_file_rows(path, split_columns, check_number)
            continue
        rows[split] = read_file_rows(path, split_columns, labels.parse)
        if not labels.classes:
            labels.use_seen_labels(str(path))
    if labels is not None:
        labels.check_names()
    return rows


def build_tsv(
    out: Path,
    tokenizer: str,
    files: Mapping[str, Path],
    columns: Columns,
    regression: bool = False,
    labels: Path | None = None,
    renamed: Mapping[str, str] | None = None,
    workers: int | None = None,
    overwrite: bool = False,
) -> tuple[GlueTask, dict[str, Any]]:
    """Build the data set in `out`, and return its task and its manifest.

    A finished directory with the same settings is kept. The arguments are the options of the program. `files` has the
    file of each split, "train" first; without "train", a classification needs `labels`. `renamed` has the new names by
    the old ones. `workers` None uses all cores.
    """
    vocabulary = load_tokenizer(tokenizer)
    class_labels = None
    if not regression:
        classes = [] if labels is None else read_class_names(labels)
        class_labels = ClassLabels(classes, f"the labels of {labels}", renamed or {})
    rows = read_splits(files, columns, class_labels)
    task = GlueTask(
        out.name,
        inputs=tuple(columns.texts),
        labels=(),
        published=(),
        files={split: path.name for split, path in files.items()},
    )
    if class_labels is not None:
        task = replace(task, labels=tuple(class_labels.classes))
    sources = [{"name": path.name, "split": split, "sha256": sha256_of(path)} for split, path in files.items()]
    settings = {
        "program": "data_prep.tsv",
        "format": FORMAT,
        "source": {source["split"]: source["sha256"] for source in sources},
        "text": list(columns.texts),
        "label": columns.label,
        "header": columns.has_header,
        "labels": list(task.labels),
        "rename": dict(renamed or {}),
        "tokenizer": vocabulary.identity,
    }

    def write(rows: dict[str, TextRows]) -> dict[str, Any]:
        with ParallelEncoder(vocabulary, workers) as encoder:
            datasets = write_glue_task(out, task, rows, encoder)
        return {"sources": sources, **describe_result(task, vocabulary, rows, datasets)}

    labeled_splits = [split for split in files if rows[split].labels is not None]
    result_files = glue_result_files(task, list(files), vocabulary, labeled_splits)
    return task, manifest.build_directory(out, settings, result_files, lambda: rows, write, overwrite)


def build_and_summarize(**options: Any) -> None:
    """Run `build_tsv` with these arguments, and print the counts of each split and the classes."""
    task, content = build_tsv(**options)
    print_status(summarize_glue_task(task, content))
    if task.labels:
        line = f"{len(task.labels)} classes (task.num_classes): {', '.join(task.labels)}"
        if look_like_scores(task.labels):
            line += f"; {SCORES_ADVICE}"
        print_status(line)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m data_prep.tsv", description=(__doc__ or "").split("\n")[0])
    for split in SPLITS:
        parser.add_argument(f"--{split}", type=Path, metavar="FILE", help=f"file with the rows of {split}")
    parser.add_argument(
        "--text", nargs="+", default=["text"], metavar="COLUMN", help="column of the text, or columns of two texts"
    )
    parser.add_argument("--label", default="label", metavar="COLUMN", help="column of the label (default: %(default)s)")
    parser.add_argument(
        "--no-header", action="store_true", help="line 1 of TSV or CSV is a row: columns are numbers from 1"
    )
    parser.add_argument("--regression", action="store_true", help="the labels are numbers to be predicted")
    parser.add_argument(
        "--labels",
        type=Path,
        metavar="CHECKPOINT",
        help="take the labels and their order from this classifier (default: the labels of train, sorted)",
    )
    parser.add_argument(
        "--rename", nargs=2, action="append", default=[], metavar=("OLD", "NEW"), help="rename a label of the files"
    )
    parser.add_argument("--out", type=Path, required=True, help="output directory")
    add_tokenizer_option(parser)
    add_build_options(parser)
    args = parser.parse_args(argv)
    files = {split: getattr(args, split) for split in SPLITS if getattr(args, split) is not None}
    if not files:
        parser.error("give at least one of --train, --valid and --test")
    if args.train and not args.valid:
        parser.error("give --valid with --train: a training run scores its checkpoints on these rows")
    if len(args.text) > 2:
        parser.error(f"--text must be one or two columns, got {len(args.text)}")
    if len(dict(args.rename)) < len(args.rename):
        parser.error("--rename must give every label once")
    if args.regression and (args.labels or args.rename):
        parser.error("--labels and --rename are for classifications")
    if not args.regression and not args.labels and not args.train:
        parser.error("without --train, a classification needs --labels CHECKPOINT")
    return run_command(
        partial(
            build_and_summarize,
            out=args.out,
            tokenizer=args.tokenizer,
            files=files,
            columns=Columns(args.text, args.label, not args.no_header),
            regression=args.regression,
            labels=args.labels,
            renamed=dict(args.rename),
            workers=args.workers,
            overwrite=args.overwrite,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
