"""Tables for the terminal."""

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """One line a row; each column is as wide as its widest cell, the first one to the left, the others to the right."""
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    lines = [first.ljust(widths[0]) + "".join(map(str.rjust, cells, widths[1:])) for first, *cells in rows]
    return "\n".join(map(str.rstrip, lines))
