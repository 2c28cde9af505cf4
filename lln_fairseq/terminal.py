"""What programs show on a terminal and read from it: progress bars, tables, and arguments."""

import argparse
import sys
from collections.abc import Sequence

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 20.0
SHORTEST = 5.0  # seconds; shorter work prints nothing in a file or a pipe


class LinePerState:
    """A replacement for standard error that prints each state of a tqdm bar on a line of its own."""

    def write(self, text: str) -> None:
        if text.strip():
            sys.stderr.write(text.strip() + "\n")

    def flush(self) -> None:
        sys.stderr.flush()


def progress_bar(name: str, total: int | None, unit: str = "step", initial: int = 0, leave: bool = False) -> tqdm:
    """Return a tqdm bar with the time left. In a file or a pipe it prints a line every 20 seconds.

    Work of less than 5 seconds prints nothing there. `total` is None if it is not known, and `initial` is the number of
    units that an earlier run has done. With `leave`, the bar stays on a terminal when the work is done.
    """
    if sys.stderr.isatty():
        return tqdm(total=total, desc=name, unit=f" {unit}s", initial=initial, leave=leave, dynamic_ncols=True)
    return tqdm(
        total=total,
        desc=name,
        unit=f" {unit}s",
        initial=initial,
        leave=False,
        file=LinePerState(),
        ncols=100,
        position=0,
        delay=SHORTEST,
        mininterval=SECONDS_BETWEEN_LINES,
        maxinterval=SECONDS_BETWEEN_LINES,
        miniters=1,
    )


def print_status(message: str) -> None:
    """Print a status line on stdout and flush it. Errors and progress bars are printed on stderr instead."""
    print(message, flush=True)


def show_update(bar: tqdm, updates: int, loss: str) -> None:
    """Move the bar to the number of completed updates, and show the current loss, which is in bits."""
    if not bar.n:
        bar.initial = updates  # the estimate of the remaining time leaves out updates of an earlier, interrupted run
    bar.set_postfix_str(f"loss {loss} bits", refresh=False)
    bar.update(updates - bar.n)


def program_parser(program: str, description: str | None) -> argparse.ArgumentParser:
    """Return an argument parser whose help shows the description with its line breaks."""
    return argparse.ArgumentParser(
        prog=program, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text: the first column left-aligned, all others right-aligned, no final line break."""
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        line = row[0].ljust(widths[0])
        for cell, width in zip(row[1:], widths[1:], strict=True):
            line += cell.rjust(width)
        lines.append(line.rstrip())
    return "\n".join(lines)
