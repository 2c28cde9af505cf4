"""A progress bar with the time left: a tqdm bar on a terminal, and a line every 20 seconds in a file or a pipe."""

import sys

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 20.0
SHORTEST = 5.0  # seconds; shorter work prints nothing in a file or a pipe


class LinePerState:
    """A replacement for standard error that prints each state of a tqdm bar on a line of its own."""

    def write(self, text: str) -> None:
        """Write the text as one line to standard error, unless it is blank."""
        if text.strip():
            sys.stderr.write(text.strip() + "\n")

    def flush(self) -> None:
        """Flush standard error."""
        sys.stderr.flush()


def progress_bar(name: str, total: int | None, unit: str = "step", initial: int = 0, leave: bool = False) -> tqdm:
    """Return a progress bar.

    Args:
        name: what is being done
        total: number of units of the whole work, or None if it is not known
        unit: name of a unit
        initial: number of units that an earlier run has done
        leave: keep the bar on a terminal when the work is done
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
