"""How far a step is: a bar on a terminal; in a file or a pipe a line at least every half minute."""

import sys
import threading
import time
from types import TracebackType

from tqdm import tqdm

SILENCE = 30.0  # seconds at most between two lines


class Progress:
    """Of a step with so many updates, if it is a training. To be used in a `with` statement, from one thread."""

    def __init__(self, name: str, updates: int | None = None, silence: float = SILENCE) -> None:
        self.name, self.total, self._silence = name, updates, silence
        self._bar = tqdm(total=updates, desc=name, unit="update", dynamic_ncols=True, disable=None)
        self._start = time.monotonic()
        self._first: tuple[float, int] | None = None  # time and number of the first update that was reported
        self._now = 0
        self._loss = ""
        self._ended = threading.Event()
        self._lines = threading.Thread(target=self._write_lines, daemon=True)

    def __enter__(self) -> "Progress":
        if self._bar.disable:
            self._lines.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._ended.set()
        self._bar.close()
        if self._bar.disable:
            self._lines.join()
            tqdm.write(f"{self.name}: {'interrupted' if kind else 'ended'} {self._elapsed()}", file=sys.stderr)

    def update(self, updates: int, loss: str) -> None:
        """Report the number of updates that a training has made, and its current loss."""
        if self._first is None:
            self._first = (time.monotonic(), updates)
        self._now = updates
        self._loss = f"loss {loss} bits"
        self._bar.set_postfix_str(self._loss)
        self._bar.update(updates - self._bar.n)

    def _write_lines(self) -> None:
        while not self._ended.wait(self._silence):
            parts = [f"update {self._now} of {self.total}", self._loss, self._left()] if self._now else []
            tqdm.write(f"{self.name}: {', '.join(part for part in (*parts, self._elapsed()) if part)}", file=sys.stderr)

    def _elapsed(self) -> str:
        return f"after {tqdm.format_interval(time.monotonic() - self._start)}"

    def _left(self) -> str:
        """By the pace since the first update that was heard of: what an interrupted run did before does not count."""
        assert self._first is not None
        start, first = self._first
        if not self.total or self._now == first:
            return ""
        seconds = (time.monotonic() - start) * (self.total - self._now) / (self._now - first)
        return f"about {tqdm.format_interval(seconds)} left"
