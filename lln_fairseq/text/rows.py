"""Read the rows of a user's file: one or two texts, and a label and a group if their columns are named."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lln_fairseq.errors import UserError
from lln_fairseq.terminal import print_status
from lln_fairseq.text.checks import is_finite_number
from lln_fairseq.text.table_files import Table, open_table


@dataclass
class TextRows:
    """The texts and labels of rows.

    Attributes:
        inputs: one list for each text of a row, with that text of every row.
        labels: the label of every row, as text. None if the rows have no labels.
        groups: the group of every row, such as the query of a reranker. None if the rows have no groups.
        broken: the line numbers of the rows of GLUE that were left out because they have a wrong number of columns.
        empty: the number of rows with an empty text. They are kept.
    """

    inputs: tuple[list[str], ...]
    labels: list[str] | None
    groups: list[str] | None = None
    broken: list[int] = field(default_factory=list)
    empty: int = 0

    def __len__(self) -> int:
        return len(self.inputs[0])


@dataclass(frozen=True)
class Columns:
    """The columns of a file, by name or by number from 1.

    Attributes:
        texts: those of the texts, one or two.
        label: that of the label; None if labels are not read.
        has_header: the names of the columns are in the first line. TSV and CSV only can be without.
        group: that of the group, such as a reranker's query; None if groups are not read.
        requires_label: False reads rows without labels, and prints a line, if the file has no such column.
    """

    texts: Sequence[str]
    label: str | None
    has_header: bool = True
    group: str | None = None
    requires_label: bool = True

    def find(self, column: str, table: Table) -> int | None:
        """Return the index, from 0, of a column that is given by name or by number from 1; None if there is none.

        A name wins over a number. UserError is raised if two columns have the name.
        """
        if self.has_header and column in table.names:
            if table.names.count(column) > 1:
                raise UserError(
                    f"{table.names_location}: two columns are called {column!r}; give the number of one, from 1"
                )
            return table.names.index(column)
        if column.isdecimal() and 1 <= int(column) <= len(table.names):
            return int(column) - 1
        return None

    def find_required(self, column: str, table: Table) -> int:
        """Return the index of a column as `find`, and raise UserError if there is none."""
        index = self.find(column, table)
        if index is None:
            raise UserError(table.wrong_separator() or self._missing_column(column, table))
        return index

    def find_label(self, table: Table) -> int | None:
        """Return the index of the column of the label, or None if labels are not read or may be missing."""
        if self.label is None:
            return None
        index = self.find(self.label, table)
        # A name with other capitals is a mistake.
        is_misspelled = self.label.casefold() in map(str.casefold, table.names)
        if index is None and not self.requires_label and not is_misspelled:
            names = ", ".join(table.names)[:200]
            print_status(f"{table.name}: no column {self.label!r} among {names}: these rows have no labels")
            return None
        return self.find_required(self.label, table)

    def _missing_column(self, column: str, table: Table) -> str:
        message = f"{table.names_location}: no column {column!r} among {', '.join(table.names)[:200]}"
        words = column.split(",")
        if len(words) > 1 and all(self.find(word, table) is not None for word in words):
            return f"{message}; separate two columns by a space: {' '.join(words)}"
        if not self.has_header:
            return f"{message}; without a header line, columns are numbers from 1 to {len(table.names)}"
        if table.has_lines:
            return f"{message}; without a header line, give --no-header and the numbers of columns"
        return message


def read_file_rows(path: Path, columns: Columns, parse_label: Callable[[str, str], str]) -> TextRows:
    """Read the rows of a TSV, CSV, JSON Lines or Parquet file, which `open_table` tells apart by the suffix.

    Args:
        path: the file.
        columns: what to read. Labels and groups of the result are None if their columns are.
        parse_label: as for `read_rows`.

    Raises:
        UserError: if a column is missing, a row cannot be used, or there are no rows. The message names the line.
    """
    with open_table(path, columns.has_header) as table:
        indices = [columns.find_required(column, table) for column in columns.texts]
        label = columns.find_label(table)
        if label is not None:
            indices.append(label)
        if len(set(indices)) < len(indices):
            message = f"{table.name}: --text and --label must be different columns"
            if columns.has_header and table.has_lines:
                message += "; if line 1 is a row, add --no-header"
            raise UserError(message)
        if columns.group is not None:  # it may be a text: a reranker's query is
            indices.append(columns.find_required(columns.group, table))

        def parse(label: str, location: str) -> str:
            table.check_name(label, location)
            return parse_label(label, location)

        rows = read_rows(
            table.rows(indices),
            table.name,
            num_texts=len(columns.texts),
            parse_label=parse if label is not None else None,
            has_groups=columns.group is not None,
        )
        if columns.has_header and table.has_lines and label is not None:
            _check_header(table, label, columns, rows)
    return rows


def _check_header(table: Table, label: int, columns: Columns, rows: TextRows) -> None:
    """Raise UserError if the first line seems to be a row, or print a line if only its label is a number.

    `label` is the index of the label's column.
    """
    header = table.names[label]
    if header == columns.label:
        if header.isdecimal():
            print_status(
                f"{table.name}: line 1 is the header, with a column {header!r}; if it is a row, add --no-header"
            )
    elif header in (rows.labels or ()) or is_finite_number(header):
        raise UserError(
            f"{table.name}, line 1 looks like a row instead of a header, with the label {header!r}: add --no-header"
        )


def read_rows(
    located_cells: Iterable[tuple[str, Sequence[str]]],
    name: str,
    num_texts: int,
    parse_label: Callable[[str, str], str] | None,
    has_groups: bool = False,
) -> TextRows:
    """Collect the texts, labels and groups of rows.

    Args:
        located_cells: for each row, its file and line, and its stripped cells: the texts, the label and the group, the
            last two if there are any.
        name: the name of the file, for error messages.
        num_texts: the number of texts of a row.
        parse_label: returns the label to keep for a label and its location; None if the rows have no labels.
        has_groups: the last cell is the group.
    """
    inputs: list[list[str]] = [[] for _ in range(num_texts)]
    labels: list[str] = []
    groups: list[str] = []
    empty = 0
    for location, cells in located_cells:
        for texts, text in zip(inputs, cells, strict=False):
            texts.append(text)
        if not all(cells[:num_texts]):
            empty += 1
        if parse_label is not None:
            labels.append(parse_label(cells[num_texts], location))
        if has_groups:
            if not cells[-1]:
                raise UserError(f"{location}: the group is empty")
            groups.append(cells[-1])
    rows = TextRows(tuple(inputs), labels=None, empty=empty)
    if not len(rows):
        raise UserError(f"{name} has no rows")
    if parse_label is not None:
        rows.labels = labels
    if has_groups:
        rows.groups = groups
    return rows
