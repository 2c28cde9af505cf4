"""Read the cells of a user's file: TSV, CSV, JSON Lines or Parquet, as the suffix of its name says.

Text is UTF-8, and messages name the file and the line.
"""

import contextlib
import csv
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from lln_fairseq.errors import UserError, first_line
from lln_fairseq.text.read_lines import LINE_BREAKS, MAX_LINE, read_lines

QUOTED = re.compile(r'"(?:[^"]|"")*"')  # a cell as CSV writers quote it
HALF_CHARACTER = re.compile("[\ud800-\udfff]")  # as in JSON's "\ud83d", which UTF-8 cannot store


class Table(ABC):
    """An open file of rows.

    Attributes:
        name: the name of the file in messages.
        names: the names of the columns; without a header, the cells of the first row. Cells are stripped.
        names_location: where `names` are, for messages.
        has_lines: True for TSV and CSV, where the names are a line that may be missing.
    """

    name: str
    names: list[str]
    names_location: str
    has_lines = False

    @abstractmethod
    def rows(self, columns: Sequence[int]) -> Iterator[tuple[str, list[str]]]:
        """Yield every row once: where it is, for messages, and its stripped cells in these columns, counted from 0."""

    def check_name(self, cell: str, location: str) -> None:
        """Raise UserError if a label or the name of a column has quotes that a reader of CSV would remove."""
        return None

    def wrong_separator(self) -> str | None:
        """Return the message that the first line has a single column, which has another separator, or None."""
        return None


class TsvTable(Table):
    """A file with tabs between the columns, in which quotes are ordinary characters."""

    has_lines = True
    separator = "tab"

    def __init__(self, stream: BinaryIO, name: str, has_header: bool) -> None:
        self.name = name
        self.names_location = f"{name}, line 1"
        self.numbered_cells = self.split(read_lines(stream, name))
        first = next(self.numbered_cells, None)
        if first is None:
            raise UserError(f"{name} is empty")
        self.names = [cell.strip() for cell in first[1]]
        if has_header:
            for cell in self.names:
                self.check_name(cell, self.names_location)
        else:
            self.numbered_cells = chain([first], self.numbered_cells)

    def split(self, lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
        return split_cells(lines)

    def rows(self, columns: Sequence[int]) -> Iterator[tuple[str, list[str]]]:
        for number, cells in self.numbered_cells:
            location = f"{self.name}, line {number}"
            if len(cells) != len(self.names):
                message = f"{location}: expected {len(self.names)} columns, got {len(cells)}"
                raise UserError(message + self.advice_on_width(cells))
            for cell in cells:
                self.check_cell(cell, location)
            yield location, [cells[column].strip() for column in columns]

    def advice_on_width(self, cells: Sequence[str]) -> str:
        """Return the end of the message that a row has these cells, which are too many or too few."""
        if any(cell.count('"') % 2 for cell in cells):  # a part of a quoted cell
            return "; a cell in CSV quotes seems to hold a tab or a line break: replace them by spaces"
        return ""

    def check_cell(self, cell: str, location: str) -> None:
        """Raise UserError if a CSV writer has doubled the quotes of a text; otherwise it may be a quotation."""
        if '""' in cell:
            self.check_name(cell, location)

    def check_name(self, cell: str, location: str) -> None:
        if QUOTED.fullmatch(cell):
            raise UserError(
                f"{location}: {cell[:40]} is quoted as in CSV, but quotes are ordinary characters in TSV: write the "
                "file without quoting, or name it .csv if its columns are separated by commas"
            )

    def wrong_separator(self) -> str | None:
        if len(self.names) > 1:
            return None
        return (
            f"{self.names_location} has no {self.separator}: the columns must be separated by {self.separator}s, got "
            f"{self.names[0][:200]!r}"
        )


class CsvTable(TsvTable):
    """A file with commas between the columns. A quoted cell can have commas, quotes and line breaks."""

    separator = "comma"

    def split(self, lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
        return _without_empty_end(_read_csv(lines, self.name))

    def advice_on_width(self, cells: Sequence[str]) -> str:
        return ""

    def check_name(self, cell: str, location: str) -> None:
        return None


class JsonTable(Table):
    """A file with a JSON object per line. The columns are the keys of the first one."""

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self.name = name
        self.names_location = f"{name}, line 1"
        self.objects = _read_objects(read_lines(stream, name), name)
        first = next(self.objects, None)
        if first is None:
            raise UserError(f"{name} is empty")
        self.names = list(first[1])
        self.objects = chain([first], self.objects)

    def rows(self, columns: Sequence[int]) -> Iterator[tuple[str, list[str]]]:
        keys = [self.names[column] for column in columns]
        for location, values in self.objects:
            for key in keys:
                if key not in values:
                    raise UserError(f"{location}: the key {key!r} is missing")
            yield location, [_cell_text(values[key], f"{location}: {key!r}") for key in keys]


class ParquetTable(Table):
    """A Parquet file, of which pyarrow reads the columns that are needed."""

    def __init__(self, file: Any, name: str) -> None:
        """`file` is pyarrow's ParquetFile."""
        self.name = name
        self.names_location = name
        self.file = file
        self.names = list(file.schema_arrow.names)

    def rows(self, columns: Sequence[int]) -> Iterator[tuple[str, list[str]]]:
        names = [self.names[column] for column in columns]
        number = 0
        for batch in self.file.iter_batches(columns=list(set(names))):
            values = [batch.column(name).to_pylist() for name in names]
            for row in zip(*values, strict=True):
                number += 1
                location = f"{self.name}, row {number}"
                cells = zip(names, row, strict=True)
                yield location, [_cell_text(value, f"{location}: {name!r}") for name, value in cells]


@contextlib.contextmanager
def open_table(path: Path, has_header: bool) -> Iterator[Table]:
    """Open a file for a `with` block, by its suffix: .csv, .jsonl or .json, .parquet; any other is TSV.

    Only TSV and CSV can be without a header; UserError is raised for others.
    """
    name = str(path)
    suffix = path.suffix.lower()
    with path.open("rb") as stream:
        if suffix == ".csv":
            yield CsvTable(stream, name, has_header)
            return
        if suffix not in (".jsonl", ".json", ".parquet"):
            yield TsvTable(stream, name, has_header)
            return
        if not has_header:
            raise UserError(f"{name}: --no-header is for TSV and CSV")
        if suffix != ".parquet":
            yield JsonTable(stream, name)
            return
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError as error:
            raise UserError(f"{name}: reading Parquet needs pyarrow: pip install pyarrow") from error
        try:
            yield ParquetTable(parquet.ParquetFile(stream), name)
        except pyarrow.ArrowException as error:
            raise UserError(f"{name}: {first_line(error)}") from error


def split_cells(lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of each line, counted from 1, and the list of its cells, which are separated by tabs.

    Empty lines at the end of the file are left out. Any other empty line has a single empty cell. Quotes are ordinary
    characters; a CSV reader would join all lines between two stray quotes.
    """
    lines = (LINE_BREAKS.sub(" ", line) for line in lines)  # a CR alone does not end a line
    return _without_empty_end((number, line.split("\t")) for number, line in enumerate(lines, start=1))


def _without_empty_end(numbered_cells: Iterable[tuple[int, list[str]]]) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows unchanged, except those at the end that have a single empty cell."""
    empty_rows: list[tuple[int, list[str]]] = []
    for row in numbered_cells:
        if row[1] == [""]:
            empty_rows.append(row)
            continue
        yield from empty_rows
        empty_rows.clear()
        yield row


def _read_csv(lines: Iterable[str], name: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of the first line of each row, and its cells. Line breaks in cells become spaces."""
    csv.field_size_limit(MAX_LINE)  # of the process; the default is 128 KiB
    reader = csv.reader((line + "\n" for line in lines), strict=True)
    number = 1
    try:
        for cells in reader:
            yield number, [LINE_BREAKS.sub(" ", cell) for cell in cells] or [""]
            number = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{name}: the row that starts in line {number} is not CSV: {error}") from error


def _read_objects(lines: Iterable[str], name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the location and the JSON object of each line that is not empty. Numbers stay as they are written.

    NaN and Infinity, which pandas writes for missing cells, become None.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        location = f"{name}, line {number}"
        try:
            value = json.loads(line, parse_int=str, parse_float=str, parse_constant=lambda _: None)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{location}: expected a JSON object in one line, got {line[:40]!r}: {error}") from error
        if not isinstance(value, dict):
            raise UserError(f"{location}: expected a JSON object in one line, got {line[:40]!r}")
        yield location, value


def _cell_text(value: Any, location: str) -> str:
    """Return the text of a value of JSON or Parquet, stripped and with spaces for line breaks."""
    if isinstance(value, bool):
        value = str(value).lower()
    if isinstance(value, int | float) and math.isfinite(value):
        value = str(value)
    if not isinstance(value, str):
        raise UserError(f"{location} must be a text or a number, got {json.dumps(value, default=str)[:40]}")
    if HALF_CHARACTER.search(value):
        raise UserError(f"{location} has half of a character: {HALF_CHARACTER.findall(value)[0]!a}")
    return LINE_BREAKS.sub(" ", value).strip()
