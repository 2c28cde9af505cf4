"""What all programs here share: parsers of their arguments and tables for the terminal."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def program_parser(program: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help shows the description as it is laid out in the source."""
    return argparse.ArgumentParser(
        prog=program, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def at_least_one(text: str) -> int:
    """The type of an argument: a whole number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def output_file(text: str) -> Path:
    """The type of an argument: a file in a directory that exists, which is better known before measuring than after."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"no such directory: {path.parent}")
    return path


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """One line a row; each column is as wide as its widest cell, the first one to the left, the others to the right."""
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    lines = [first.ljust(widths[0]) + "".join(map(str.rjust, cells, widths[1:])) for first, *cells in rows]
    return "\n".join(map(str.rstrip, lines))


def grid(head: str, columns: Mapping[Any, str], cells: Mapping[tuple[str, Any], str], corner: str = "") -> str:
    """Return a table below a line; `columns` has their titles, `cells` what stands in (row, column)."""
    lines = [[corner, *columns.values()]]
    for name in dict.fromkeys(name for name, _ in cells):
        lines.append([name, *(cells.get((name, column), "") for column in columns)])
    return f"{head}\n{aligned(lines)}"


def settings_line(settings: Mapping[str, Any]) -> str:
    """Return what a benchmark of training iterations measured, and where."""
    return (
        "{model}, {preset}, batch {batch}, {dtype}, dropout {dropout}, of attention {attention_dropout}; {device}, "
        "torch {torch}".format(**settings)
    )
