"""Read and check the rows of tab-separated files: those of GLUE, and those of a user."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from lln_fairseq.errors import UserError

from .glue_tasks import GlueTask

MAX_SCORE = 5.0  # of STS-B; targets are scores divided by it, in [0, 1] as in fairseq's recipe


@dataclass
class GlueRows:
    """The texts and labels of one split of a GLUE task.

    Attributes:
        inputs: one list for each input of the task, with the text of every row.
        labels: the label of every row. For a regression, the score divided by MAX_SCORE, as text. None if the split has
            no labels.
        broken: the line numbers of the rows that were left out because they have a wrong number of columns.
        empty: the number of rows with an empty input. They are kept.
    """

    inputs: tuple[list[str], ...]
    labels: list[str] | None
    broken: list[int] = field(default_factory=list)
    empty: int = 0

    def __len__(self) -> int:
        return len(self.inputs[0])


def split_cells(lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of each line, counted from 1, and the list of its cells, which are separated by tabs.

    Empty lines at the end of the file are left out. Any other empty line has a single empty cell. Quotes are ordinary
    characters; a CSV reader would join all lines between two stray quotes.
    """
    empty_lines: list[int] = []
    for number, line in enumerate(lines, start=1):
        if not line:
            empty_lines.append(number)
            continue
        for empty_line in empty_lines:
            yield empty_line, [""]
        empty_lines.clear()
        yield number, line.split("\t")


def read_glue_rows(
    lines: Iterable[str],
    name: str,
    task: GlueTask,
    split: str,
    keep: Callable[[list[str]], bool] | None = None,
) -> GlueRows:
    """Read the rows of one split. Texts and labels are stripped, as in fairseq's recipe.

    Args:
        lines: the lines of the file, header included, without line breaks.
        name: the name of the file, for error messages.
        task: the task of the file.
        split: fairseq's name of the split; a name that starts with "test" means that labels are not read.
        keep: a function that takes the cells of a row and returns True if the row belongs to the split; None keeps all
            rows.

    Raises:
        UserError: if a column is missing, a row has a wrong number of columns (unless the task skips such rows), a
            label is unknown, a score is invalid, or there are no rows. The message names the file and the line.
    """
    numbered_cells = split_cells(lines)
    header = task.header.get(split)
    if header is None:
        first_line = next(numbered_cells, None)
        if first_line is not None:
            header = tuple(first_line[1])
    if not header:
        raise UserError(f"{name} is empty")
    has_labels = not split.startswith("test")
    column_names = task.inputs
    if has_labels:
        column_names = (*task.inputs, task.label)
    for column in column_names:
        if column not in header:
            raise UserError(f"{name}, line 1: no column {column!r} among {', '.join(header)[:200]}")
    columns = [header.index(column) for column in column_names]
    label = None
    if has_labels:
        label = columns.pop()
    parse_label = partial(_checked_label, task=task)
    skip_broken = task.skip_broken and has_labels
    return read_rows(numbered_cells, name, len(header), columns, label, parse_label, skip_broken, keep)


def read_rows(
    numbered_cells: Iterable[tuple[int, list[str]]],
    name: str,
    width: int,
    inputs: Sequence[int],
    label: int | None,
    parse_label: Callable[[str, str], str],
    skip_broken: bool = False,
    keep: Callable[[list[str]], bool] | None = None,
) -> GlueRows:
    """Read the texts and labels of rows, and strip them.

    Args:
        numbered_cells: the rows as `split_cells` yields them, without the header.
        name: the name of the file, for error messages.
        width: the number of columns.
        inputs: the columns of the texts, from 0.
        label: the column of the label; None if the rows have no labels.
        parse_label: returns the label to keep for the label of a row. The second argument is the file and the line, for
            error messages.
        skip_broken: leave out rows with a wrong number of columns, and record their lines. Otherwise such a row raises
            UserError.
        keep: as for `read_glue_rows`.
    """
    texts: list[list[str]] = [[] for _ in inputs]
    rows = GlueRows(tuple(texts), labels=None)
    if label is not None:
        rows.labels = []
    for number, cells in numbered_cells:
        if len(cells) != width:
            if not skip_broken:
                raise UserError(f"{name}, line {number}: expected {width} columns, got {len(cells)}")
            rows.broken.append(number)
            continue
        if keep is not None and not keep(cells):
            continue
        if label is not None and rows.labels is not None:
            rows.labels.append(parse_label(cells[label].strip(), f"{name}, line {number}"))
        values = [cells[column].strip() for column in inputs]
        for column_texts, text in zip(texts, values, strict=True):
            column_texts.append(text)
        if not all(values):
            rows.empty += 1
    if not len(rows):
        raise UserError(f"{name} has no rows")
    return rows


def _checked_label(label: str, location: str, task: GlueTask) -> str:
    """Return the label of a classification unchanged, or the score of a regression divided by MAX_SCORE, as text."""
    if task.labels:
        if label not in task.labels:
            raise UserError(f"{location}: the label must be one of {', '.join(task.labels)}, got {label!r}")
        return label
    try:
        score = float(label)
    except ValueError as error:
        raise UserError(f"{location}: the score must be a number, got {label!r}") from error
    if not 0 <= score <= MAX_SCORE:
        raise UserError(f"{location}: the score must be in [0, {MAX_SCORE:g}], got {label}")
    return f"{score / MAX_SCORE:.6g}"
