"""Draw the rows of generated data sets in several processes, reproducibly for any number of processes.

Rows are drawn in chunks. Chunk k has its own generator, random.Random("SEED NAME k"), and the chunks are concatenated
in order. Use only the generator's method `random`: its numbers are the same in all versions of Python and on all
machines.
"""

import multiprocessing
import random
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from functools import partial
from itertools import count
from typing import NamedTuple

from lln_fairseq.data.encode import map_in_order, prepare_worker
from lln_fairseq.data.reporting import print_status


class DrawnRow(NamedTuple):
    """A randomly drawn row: its symbols, one byte per symbol, and the number of its class."""

    symbols: bytes
    label: int


DrawFunction = Callable[[random.Random], DrawnRow]


def random_below(generator: random.Random, limit: int) -> int:
    """Return a random integer in [0, limit)."""
    return int(generator.random() * limit)


def draw_chunk(draw: DrawFunction, name: str, seed: int, size: int, chunk: int) -> list[DrawnRow]:
    """Draw the `size` rows of chunk number `chunk`, counted from 0; rows can repeat. See `draw_rows`."""
    generator = random.Random(f"{seed} {name} {chunk}")
    return [draw(generator) for _ in range(size)]


def draw_rows(
    draw: DrawFunction, name: str, seed: int, rows: int, workers: int, chunk_size: int = 25
) -> list[DrawnRow]:
    """Draw `rows` distinct rows, and return them in the order in which they were drawn.

    The result depends on `chunk_size`, but not on `workers`. The function never returns if fewer than `rows` distinct
    rows exist.

    Args:
        draw: draws one row. It must be a function at the top level of a module, so that it can be pickled.
        name: name of the task, for the generators' seeds and the progress bar.
        seed: seed of all chunks.
        rows: number of rows to return.
        workers: number of processes; with 1 or less the rows are drawn in this process.
        chunk_size: rows per chunk.

    Raises:
        DataError: if a worker process is killed.
    """
    from tqdm import tqdm

    print_status(f"{name}: drawing {rows} rows")
    rows_by_symbols: dict[bytes, DrawnRow] = {}
    chunks = _draw_chunks(draw, name, seed, workers, chunk_size)
    with closing(chunks), tqdm(desc=name, total=rows, unit=" rows", leave=False, disable=None) as bar:
        while len(rows_by_symbols) < rows:
            for row in next(chunks):
                rows_by_symbols.setdefault(row.symbols, row)
            bar.update(len(rows_by_symbols) - bar.n)
    return list(rows_by_symbols.values())[:rows]


def _draw_chunks(
    draw: DrawFunction, name: str, seed: int, workers: int, chunk_size: int
) -> Generator[list[DrawnRow], None, None]:
    """Yield chunks 0, 1, 2, ... without end. Closing the generator ends the processes."""
    draw_numbered_chunk = partial(draw_chunk, draw, name, seed, chunk_size)
    if workers <= 1:
        yield from map(draw_numbered_chunk, count())
    context = multiprocessing.get_context("spawn")  # for the same reason as in lln_fairseq/data/encode.py
    pool = ProcessPoolExecutor(workers, context, initializer=prepare_worker)
    try:
        yield from map_in_order(pool, draw_numbered_chunk, count(), workers)
    finally:
        pool.shutdown(cancel_futures=True)
