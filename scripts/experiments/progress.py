"""How far a training is: a bar on a terminal; in a file or a pipe a line every half minute."""

import sys

from tqdm import tqdm

SECONDS = 30.0  # between two lines


class LineStream:
    """Standard error for tqdm, where each state of the bar is a line of its own."""

    def write(self, text: str) -> None:
        if text.strip():
            sys.stderr.write(text.strip() + "\n")

    def flush(self) -> None:
        sys.stderr.flush()


def progress_bar(name: str, updates: int | None = None) -> tqdm:
    """Return a bar of a step with so many updates, if it is a training."""
    if sys.stderr.isatty():
        return tqdm(total=updates, desc=name, unit="update", dynamic_ncols=True)
    return tqdm(
        total=updates,
        desc=name,
        unit="update",
        file=LineStream(),
        ncols=100,
        position=0,
        mininterval=SECONDS,
        maxinterval=SECONDS,
        miniters=1,
    )


def report_update(bar: tqdm, updates: int, loss: str) -> None:
    """Show how many updates a training has made, and its current loss in bits."""
    if not bar.n:
        bar.initial = updates  # what an interrupted run did before says nothing about the pace
    bar.set_postfix_str(f"loss {loss} bits", refresh=False)
    bar.update(updates - bar.n)
