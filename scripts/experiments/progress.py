"""Show the progress of training: a bar on a terminal, and a line every half minute in a file or a pipe."""

import sys

from tqdm import tqdm

from lln_fairseq.linearize.progress_bar import LinePerState

SECONDS_BETWEEN_LINES = 30.0


def progress_bar(name: str, updates: int | None = None) -> tqdm:
    """Return a progress bar labeled `name`. Without a terminal, it prints a line every half minute instead.

    `updates` is the total number of updates. It is None for a step that does not train.
    """
    if sys.stderr.isatty():
        return tqdm(total=updates, desc=name, unit="update", dynamic_ncols=True)
    return tqdm(
        total=updates,
        desc=name,
        unit="update",
        file=LinePerState(),
        ncols=100,
        position=0,
        mininterval=SECONDS_BETWEEN_LINES,
        maxinterval=SECONDS_BETWEEN_LINES,
        miniters=1,
    )


def show_update(bar: tqdm, updates: int, loss: str) -> None:
    """Move the bar to `updates`, the number of completed updates, and show the current loss, which is in bits."""
    if not bar.n:
        bar.initial = updates  # the estimate of the remaining time leaves out updates of an earlier, interrupted run
    bar.set_postfix_str(f"loss {loss} bits", refresh=False)
    bar.update(updates - bar.n)
