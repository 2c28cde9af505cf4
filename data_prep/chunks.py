"""Rows that are drawn at random, in chunks over several processes: the same rows whatever the number of processes.

Chunk k of a seed is drawn by a generator of its own, random.Random("SEED NAME k"), and the rows are those of the chunks
in order. Only `random()` of Python's generator is used, whose numbers no version and no machine changes.
"""

import multiprocessing
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import count
from typing import NamedTuple

from lln_fairseq.data.encode import ignore_interrupts
from lln_fairseq.data.reporting import DataError, say

SILENCE = 20.0  # seconds between two lines about the progress


class Drawn(NamedTuple):
    """A row that was drawn: its symbols (numbers below 256), its class, and what makes it the same as another."""

    symbols: bytes
    label: int
    key: bytes


Draw = Callable[[random.Random], Drawn]


def below(generator: random.Random, number: int) -> int:
    """A whole number in [0, number)."""
    return int(generator.random() * number)


def draw_chunk(draw: Draw, name: str, seed: int, chunk: int, size: int) -> list[Drawn]:
    """The rows of one chunk."""
    generator = random.Random(f"{seed} {name} {chunk}")
    return [draw(generator) for _ in range(size)]


def draw_rows(draw: Draw, name: str, seed: int, rows: int, workers: int, size: int = 25) -> list[Drawn]:
    """`rows` rows of `draw`, no two with the same key, drawn by `workers` processes in chunks of `size`.

    `draw` must be a function of a module. Says how far it is. Raises DataError when a process is killed.
    """
    found: dict[bytes, Drawn] = {}
    start = said = time.monotonic()
    for chunk in _chunks(draw, name, seed, workers, size):
        for row in chunk:
            found.setdefault(row.key, row)
            if len(found) == rows:
                say(f"{name}: {rows} rows drawn in {time.monotonic() - start:.0f} s")
                return list(found.values())
        if time.monotonic() - said > SILENCE:
            said = time.monotonic()
            left = (said - start) * (rows / len(found) - 1)
            say(f"{name}: {len(found)} of {rows} rows, {left:.0f} s left")
    raise AssertionError("there is always another chunk")


def _chunks(draw: Draw, name: str, seed: int, workers: int, size: int) -> Iterator[list[Drawn]]:
    if workers <= 1:
        yield from (draw_chunk(draw, name, seed, chunk, size) for chunk in count())
    context = multiprocessing.get_context("spawn")  # as in encode.py
    pool = ProcessPoolExecutor(workers, context, initializer=ignore_interrupts)
    try:
        pending: deque[Future[list[Drawn]]] = deque()
        for chunk in count():
            pending.append(pool.submit(draw_chunk, draw, name, seed, chunk, size))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise DataError("a process that draws rows was killed (out of memory?); try fewer --workers") from error
    finally:
        pool.shutdown(cancel_futures=True)
