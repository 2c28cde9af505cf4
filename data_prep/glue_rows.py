"""Read and check the rows of GLUE's tab-separated files."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from lln_fairseq.errors import UserError
from lln_fairseq.text.rows import TextRows, read_rows
from lln_fairseq.text.table_files import split_cells

from .glue_tasks import GlueTask

MAX_SCORE = 5.0  # of STS-B; targets are scores divided by it, in [0, 1] as in fairseq's recipe


def read_glue_rows(
    lines: Iterable[str],
    name: str,
    task: GlueTask,
    split: str,
    keep: Callable[[list[str]], bool] | None = None,
) -> TextRows:
    """Read the rows of one split. Texts and labels are stripped, as in fairseq's recipe.

    The label of a regression is the score divided by MAX_SCORE. A split whose name starts with "test" has no labels.
    With `keep`, only rows for whose cells it returns True belong to the split. UserError, with the `name` of the file
    and the line, is raised if a column is missing, a row has a wrong number of columns (unless the task skips such
    rows), a label is unknown, a score is invalid, or there are no rows.
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
    broken: list[int] = []

    def kept_cells() -> Iterator[tuple[str, list[str]]]:
        for number, cells in numbered_cells:
            location = f"{name}, line {number}"
            if len(cells) != len(header):
                if not (task.skip_broken and has_labels):
                    raise UserError(f"{location}: expected {len(header)} columns, got {len(cells)}")
                broken.append(number)
            elif keep is None or keep(cells):
                yield location, [cells[column].strip() for column in columns]

    parse_label = None
    if has_labels:
        parse_label = partial(_checked_label, task=task)
    rows = read_rows(kept_cells(), name, len(task.inputs), parse_label)
    rows.broken = broken
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
