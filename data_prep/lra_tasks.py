"""List the tasks of the Long Range Arena, and the stand-ins that replace them where their data is not available."""

from dataclasses import dataclass

from lln_fairseq.data.published_files import FILES, Published

from .listops import DIGITS
from .newsgroups import TASK as NEWSGROUPS

BYTES = tuple(map(str, range(256)))
TEXT_LENGTH = 4000  # bytes per text that the recipe keeps
STAND_IN = "stand-in"


@dataclass(frozen=True)
class LraTask:
    """Describes a task of the Long Range Arena or a stand-in.

    Attributes:
        name: name of the task and of its directory.
        labels: names of the classes in the files; class k is labels[k].
        symbols: the symbols of the rows; a byte b in a row stands for symbols[b].
        inputs: number of inputs per row, 1 or 2.
        meaning: descriptions of the classes; empty if the labels describe themselves.
        published: files to download if --source is not given; empty if the rows are generated or need --source.
        drawn: default number of rows if the rows are generated at random, otherwise 0.
        shares: the fractions of the rows that become train and valid if there are no published splits. The remaining
            rows become test.
        is_text: True if the rows are texts, which are truncated to --length bytes.
        instead: for a stand-in, a description of it and of the data that it replaces; otherwise empty.
    """

    name: str
    labels: tuple[str, ...]
    symbols: tuple[str, ...] = BYTES
    inputs: int = 1
    meaning: tuple[str, ...] = ()
    published: tuple[Published, ...] = ()
    drawn: int = 0
    shares: tuple[float, float] = (0.8, 0.1)
    is_text: bool = False
    instead: str = ""


LRA_TASKS = {
    task.name: task
    for task in (
        LraTask(
            "listops",
            labels=DIGITS,
            drawn=100_000,
            shares=(0.96, 0.02),
        ),
        LraTask(
            "text",
            labels=("neg", "pos"),
            published=(FILES["aclImdb_v1.tar.gz"],),
            is_text=True,
        ),
        LraTask(
            "retrieval",
            labels=("0", "1"),
            inputs=2,
            meaning=("no citation", "citation"),
            is_text=True,
        ),
        LraTask(
            "pathfinder",
            labels=("0", "1"),
            meaning=("apart", "joined"),
            drawn=200_000,
        ),
        LraTask(
            "image",
            labels=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
            published=(FILES["cifar-10-binary.tar.gz"],),
        ),
    )
}

# Stand-ins, by the name of the task that they replace.
STAND_INS = {
    "text": LraTask(
        f"text-{STAND_IN}",
        labels=NEWSGROUPS.labels,
        instead="20 newsgroups as bytes, not IMDb's reviews",
        published=NEWSGROUPS.published,
        is_text=True,
    ),
    "retrieval": LraTask(
        f"retrieval-{STAND_IN}",
        labels=("0", "1"),
        inputs=2,
        meaning=("other newsgroups", "one newsgroup"),
        instead="pairs of posts of 20 newsgroups as bytes, not of papers",
        published=NEWSGROUPS.published,
        is_text=True,
    ),
    "image": LraTask(
        f"image-{STAND_IN}",
        labels=DIGITS,
        instead="scikit-learn's digits, 8 x 8 made 32 x 32, not CIFAR-10",
    ),
}
