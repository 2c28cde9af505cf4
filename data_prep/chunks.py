"""Rows that are drawn at random, in chunks over several processes: the same rows whatever the number of processes.

Chunk k of a seed is drawn by a generator of its own, random.Random("SEED NAME k"), and the rows are those of the chunks
in order. Only `random()` of Python's generator is used, whose numbers no version and no machine changes.
"""

import multiprocessing
import random
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from functools import partial
from itertools import count
from typing import NamedTuple

from lln_fairseq.data.encode import ignore_interrupts, map_in_order
from lln_fairseq.data.reporting import print_status


class Drawn(NamedTuple):
    """A row that was drawn: its symbols (numbers below 256) and its class."""

    symbols: bytes
    label: int


Draw = Callable[[random.Random], Drawn]


def below(generator: random.Random, number: int) -> int:
    """A whole number in [0, number)."""
    return int(generator.random() * number)


def draw_chunk(draw: Draw, name: str, seed: int, size: int, chunk: int) -> list[Drawn]:
    """The rows of one chunk."""
    generator = random.Random(f"{seed} {name} {chunk}")
    return [draw(generator) for _ in range(size)]


def draw_rows(draw: Draw, name: str, seed: int, rows: int, workers: int, size: int = 25) -> list[Drawn]:
    """`rows` rows of `draw`, no two with the same symbols, drawn by `workers` processes in chunks of `size`.

    `draw` must be a function of a module. Raises DataError when a process is killed.
    """
    from tqdm import tqdm

    print_status(f"{name}: drawing {rows} rows")
    found: dict[bytes, Drawn] = {}
    chunks = _chunks(draw, name, seed, workers, size)
    with closing(chunks), tqdm(desc=name, total=rows, unit=" rows", leave=False, disable=None) as bar:
        while len(found) < rows:
            for row in next(chunks):
                found.setdefault(row.symbols, row)
            bar.update(len(found) - bar.n)
    return list(found.values())[:rows]


def _chunks(draw: Draw, name: str, seed: int, workers: int, size: int) -> Generator[list[Drawn], None, None]:
    draw_one = partial(draw_chunk, draw, name, seed, size)
    if workers <= 1:
        yield from map(draw_one, count())
    context = multiprocessing.get_context("spawn")  # as in encode.py
    pool = ProcessPoolExecutor(workers, context, initializer=ignore_interrupts)
    try:
        yield from map_in_order(pool, draw_one, count(), workers)
    finally:
        pool.shutdown(cancel_futures=True)
