"""The tasks of the Long Range Arena and what takes the place of their texts and pictures where these cannot be had."""

from dataclasses import dataclass

from lln_fairseq.data.published_files import FILES, Published

from .listops import DIGITS
from .newsgroups import TASK as NEWSGROUPS

BYTES = tuple(map(str, range(256)))
TEXT_LENGTH = 4000  # bytes of a text that the recipe keeps
STAND_IN = "stand-in"


@dataclass(frozen=True)
class LraTask:
    """One task.

    `published`: what is fetched without --source; where there is nothing, `drawn` says whether rows are drawn at random
    and how many.
    """

    name: str
    labels: tuple[str, ...]
    symbols: tuple[str, ...] = BYTES
    inputs: int = 1
    meaning: tuple[str, ...] = ()
    published: tuple[Published, ...] = ()
    drawn: int = 0
    shares: tuple[float, float] = (0.8, 0.1)  # of train and valid among rows that are not split yet
    is_text: bool = False  # and is cut
    instead: str = ""  # what a stand-in is, and of what


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
        LraTask("pathfinder", labels=("0", "1"), meaning=("apart", "joined"), drawn=200_000),
        LraTask(
            "image",
            labels=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
            published=(FILES["cifar-10-binary.tar.gz"],),
        ),
    )
}

STAND_INS = {
    task.name.removesuffix(f"-{STAND_IN}"): task
    for task in (
        LraTask(
            f"text-{STAND_IN}",
            labels=NEWSGROUPS.labels,
            instead="20 newsgroups as bytes, not IMDb's reviews",
            published=NEWSGROUPS.published,
            is_text=True,
        ),
        LraTask(
            f"retrieval-{STAND_IN}",
            labels=("0", "1"),
            inputs=2,
            meaning=("other newsgroups", "one newsgroup"),
            instead="pairs of posts of 20 newsgroups as bytes, not of papers",
            published=NEWSGROUPS.published,
            is_text=True,
        ),
        LraTask(f"image-{STAND_IN}", labels=DIGITS, instead="scikit-learn's digits, 8 x 8 made 32 x 32, not CIFAR-10"),
    )
}
