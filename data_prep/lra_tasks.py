"""The tasks of the Long Range Arena."""

from dataclasses import dataclass

from .listops import DIGITS
from .published_files import FILES, Published

BYTES = tuple(map(str, range(256)))
TEXT_LENGTH = 4000  # bytes per text that the recipe keeps


@dataclass(frozen=True)
class LraTask:
    """A task of the Long Range Arena.

    Attributes:
        name: name of the task and of its directory.
        labels: names of the classes in the files; class k is labels[k].
        symbols: the symbols of the rows; a byte b in a row stands for symbols[b].
        inputs: number of inputs per row, 1 or 2.
        published: files to download if --source is not given; empty if the rows are drawn or need --source.
        drawn: default number of rows if the rows are drawn at random without --source, otherwise 0.
        shares: the fractions of the rows that become train and valid if there are no published splits.
        is_text: True if the rows are texts, which are cut to --length bytes.
    """

    name: str
    labels: tuple[str, ...]
    symbols: tuple[str, ...] = BYTES
    inputs: int = 1
    published: tuple[Published, ...] = ()
    drawn: int = 0
    shares: tuple[float, float] = (0.8, 0.1)
    is_text: bool = False


LRA_TASKS = {
    task.name: task
    for task in (
        LraTask("listops", labels=DIGITS, drawn=100_000, shares=(0.96, 0.02)),
        LraTask("text", labels=("neg", "pos"), published=(FILES["aclImdb_v1.tar.gz"],), is_text=True),
        LraTask("retrieval", labels=("0", "1"), inputs=2, is_text=True),  # no citation, citation
        LraTask("pathfinder", labels=("0", "1")),  # apart, joined
        LraTask(
            "image",
            labels=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
            published=(FILES["cifar-10-binary.tar.gz"],),
        ),
    )
}
