"""Argument parsing and text tables that the programs of scripts/ share."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def program_parser(program: str, description: str | None) -> argparse.ArgumentParser:
    """Return an argument parser for a program. Its help shows the description with the original line breaks."""
    return argparse.ArgumentParser(
        prog=program, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def at_least_one(text: str) -> int:
    """Convert an argument to an integer that is at least 1.

    Use this function as the `type` of an argparse argument. It raises ArgumentTypeError for a smaller integer, and
    ValueError for any other text. argparse reports both as wrong usage.
    """
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def output_file(text: str) -> Path:
    """Convert an argument to the path of a file to write. Raise ArgumentTypeError if its directory does not exist.

    Use this function as the `type` of an argparse argument. Then a missing directory is reported before a long
    measurement, not after it.
    """
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"no such directory: {path.parent}")
    return path


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text, one line per row, without spaces at the ends of lines and without a final line break.

    Columns are as wide as their widest cell plus two spaces. The first column is left-aligned, and all others are
    right-aligned. All rows must have the same number of cells.
    """
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        line = row[0].ljust(widths[0])
        for cell, width in zip(row[1:], widths[1:], strict=True):
            line += cell.rjust(width)
        lines.append(line.rstrip())
    return "\n".join(lines)


def grid(head: str, columns: Mapping[Any, str], cells: Mapping[tuple[str, Any], str], corner: str = "") -> str:
    """Return a table as text, with a line above it.

    Args:
        head: the line above the table.
        columns: the title of every column by the key of the column.
        cells: the text of each cell, by the name of its row and the key of its column. Rows appear in the order in
            which their names first occur in `cells`. Missing cells are left empty.
        corner: the title of the first column, which has the names of the rows.
    """
    lines = [[corner, *columns.values()]]
    row_names = dict.fromkeys(name for name, _ in cells)
    for name in row_names:
        lines.append([name, *(cells.get((name, column), "") for column in columns)])
    return f"{head}\n{aligned(lines)}"


def settings_line(settings: Mapping[str, Any]) -> str:
    """Return the settings of a training benchmark as one line.

    `settings` has the keys model, preset, batch, dtype, dropout, attention_dropout, device and torch.
    """
    return (
        "{model}, {preset}, batch {batch}, {dtype}, dropout {dropout}, attention dropout {attention_dropout}; "
        "{device}, torch {torch}".format(**settings)
    )
