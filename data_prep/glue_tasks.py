"""The GLUE tasks as one table, and the reader of their files.

The order of `labels` is the order of label/dict.txt: class k of a model is labels[k], whatever the labels' frequency.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from lln_fairseq.data.published_files import FILES, Published
from lln_fairseq.data.reporting import DataError

_FILES = {"train": "train.tsv", "valid": "dev.tsv", "test": "test.tsv"}
MAX_SCORE = 5.0  # STS-B; divided by it the targets lie in [0, 1], as in fairseq's recipe


@dataclass(frozen=True)
class GlueTask:
    """One task. `inputs` and `label` are columns of the files, `rows` the published number by split.

    `labels` empty: regression, one target. `meaning` says in words what the labels are where they are digits.
    """

    name: str
    inputs: tuple[str, ...]
    labels: tuple[str, ...]
    metric: str
    rows: Mapping[str, int]
    published: tuple[Published, ...]
    label: str = "label"
    meaning: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=_FILES.copy)  # by the name that fairseq gives the split
    header: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # columns of the splits whose file names none
    skip_broken: bool = False  # labelled rows with too few or too many columns: left out and counted, else an error

    @property
    def num_classes(self) -> int:
        """Outputs of the classification head."""
        return len(self.labels) or 1


_COLA = ("source", "label", "mark", "sentence")
_ENTAILMENT = ("entailment", "not_entailment")

GLUE_TASKS = {
    task.name: task
    for task in (
        GlueTask(
            "MNLI",
            inputs=("sentence1", "sentence2"),
            labels=("contradiction", "neutral", "entailment"),  # the order of fairseq's published MNLI models
            label="gold_label",
            metric="accuracy",  # valid and test are matched, valid1 and test1 mismatched
            files={
                "train": "train.tsv",
                "valid": "dev_matched.tsv",
                "valid1": "dev_mismatched.tsv",
                "test": "test_matched.tsv",
                "test1": "test_mismatched.tsv",
            },
            rows={"train": 392702, "valid": 9815, "valid1": 9832, "test": 9796, "test1": 9847},
            published=(FILES["MNLI.zip"],),
        ),
        GlueTask(
            "QNLI",
            inputs=("question", "sentence"),
            labels=_ENTAILMENT,
            metric="accuracy",
            rows={"train": 104743, "valid": 5463, "test": 5463},
            published=(FILES["QNLIv2.zip"],),
        ),
        GlueTask(
            "QQP",
            inputs=("question1", "question2"),
            labels=("0", "1"),
            meaning=("different", "duplicate"),
            label="is_duplicate",
            metric="accuracy, F1 of class 1",
            rows={"train": 363846, "valid": 40430, "test": 390965},
            published=(FILES["QQP-clean.zip"],),
            skip_broken=True,  # older copies of the file have rows that a line break inside a question has torn
        ),
        GlueTask(
            "SST-2",
            inputs=("sentence",),
            labels=("0", "1"),
            meaning=("negative", "positive"),
            metric="accuracy",
            rows={"train": 67349, "valid": 872, "test": 1821},
            published=(FILES["SST-2.zip"],),
        ),
        GlueTask(
            "RTE",
            inputs=("sentence1", "sentence2"),
            labels=_ENTAILMENT,
            metric="accuracy",
            rows={"train": 2490, "valid": 277, "test": 3000},
            published=(FILES["RTE.zip"],),
        ),
        GlueTask(
            "MRPC",
            inputs=("#1 String", "#2 String"),
            labels=("0", "1"),
            meaning=("different", "paraphrase"),
            label="Quality",
            metric="accuracy, F1 of class 1",
            rows={"train": 3668, "valid": 408, "test": 1725},
            published=tuple(
                FILES[name] for name in ("msr_paraphrase_train.txt", "msr_paraphrase_test.txt", "mrpc_dev_ids.tsv")
            ),
        ),
        GlueTask(
            "CoLA",
            inputs=("sentence",),
            labels=("0", "1"),
            meaning=("unacceptable", "acceptable"),
            metric="Matthews correlation",
            header={"train": _COLA, "valid": _COLA},
            rows={"train": 8551, "valid": 1043, "test": 1063},
            published=(FILES["CoLA.zip"],),
        ),
        GlueTask(
            "STS-B",
            inputs=("sentence1", "sentence2"),
            labels=(),
            label="score",
            metric="Pearson and Spearman correlation",
            rows={"train": 5749, "valid": 1500, "test": 1379},
            published=(FILES["STS-B.zip"],),
        ),
    )
}


@dataclass
class Rows:
    """The rows of one split: texts by input, labels (None for a test set), and what was noticed."""

    inputs: tuple[list[str], ...]
    labels: list[str] | None
    broken: list[int] = field(default_factory=list)  # numbers of the lines that were left out
    empty: int = 0  # rows with an empty input; they are kept

    def __len__(self) -> int:
        return len(self.inputs[0])


def split_cells(lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """Number and cells of each line, the empty lines at the end of the file left out.

    A tab is the one thing that parts cells: quotes are text like any other. (A CSV reader that honours quotes joins
    the lines between one stray quote and the next, silently.)
    """
    blank: list[int] = []
    for number, line in enumerate(lines, start=1):
        if not line:
            blank.append(number)
            continue
        yield from ((empty, [""]) for empty in blank)
        blank.clear()
        yield number, line.split("\t")


def read_rows(
    lines: Iterable[str],
    name: str,
    task: GlueTask,
    split: str,
    keep: Callable[[list[str]], bool] | None = None,
) -> Rows:
    """The rows of the file `name`, or those of them that `keep` says (by their cells).

    Inputs are stripped, as in fairseq's recipe; test sets have no labels.

    Raises DataError with file and line for a missing column, a row with another number of columns, an unknown label;
    and for a file without rows.
    """
    cells = split_cells(lines)
    header = task.header.get(split) or next(cells, (0, ()))[1]
    if not header:
        raise DataError(f"{name} is empty")
    labelled = not split.startswith("test")
    wanted = (*task.inputs, task.label) if labelled else task.inputs
    missing = [column for column in wanted if column not in header]
    if missing:
        raise DataError(f"{name}, line 1: no column {missing[0]!r} among {', '.join(header)[:200]}")
    columns = [list(header).index(column) for column in wanted]
    rows = Rows(tuple([] for _ in task.inputs), [] if labelled else None)
    for number, row in cells:
        if len(row) != len(header):
            if not (task.skip_broken and labelled):
                raise DataError(f"{name}, line {number}: {len(row)} columns, expected {len(header)}")
            rows.broken.append(number)
            continue
        if keep is not None and not keep(row):
            continue
        values = [row[column].strip() for column in columns]
        if rows.labels is not None:
            rows.labels.append(_checked_label(values.pop(), task, f"{name}, line {number}"))
        for texts, value in zip(rows.inputs, values, strict=True):
            texts.append(value)
        rows.empty += not all(values)
    if not len(rows):
        raise DataError(f"{name} has no rows")
    return rows


def _checked_label(label: str, task: GlueTask, where: str) -> str:
    if task.labels:
        if label not in task.labels:
            raise DataError(f"{where}: the label {label!r} is none of {', '.join(task.labels)}")
        return label
    try:
        score = float(label)
    except ValueError as error:
        raise DataError(f"{where}: the score {label!r} is not a number") from error
    if not 0 <= score <= MAX_SCORE:
        raise DataError(f"{where}: the score {label} is not in [0, {MAX_SCORE:g}]")
    return f"{score / MAX_SCORE:.6g}"
