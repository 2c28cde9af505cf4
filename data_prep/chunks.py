"""Draw the rows of generated data sets in several processes. The rows do not depend on the number of processes.

Rows are drawn in chunks. Chunk k has its own generator, random.Random("SEED NAME k"), and the chunks are concatenated
in order. A draw function must call only the method `random` of the generator: its numbers are the same in all versions
of Python and on all machines.
"""

import multiprocessing
import random
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from functools import partial
from itertools import count
from typing import NamedTuple

from lln_fairseq.terminal import print_status
from lln_fairseq.text.parallel_encoder import map_in_order, prepare_worker


class DrawnRow(NamedTuple):
    """A randomly drawn row: its symbols, one byte per symbol, and its class, counted from 0."""

    symbols: bytes
    label: int


DrawFunction = Callable[[random.Random], DrawnRow]


def random_below(generator: random.Random, limit: int) -> int:
    """Return a random integer in [0, limit)."""
    return int(generator.random() * limit)


def draw_chunk(draw: DrawFunction, name: str, seed: int, size: int, chunk: int) -> list[DrawnRow]:
    generator = random.Random(f"{seed} {name} {chunk}")
    return [draw(generator) for _ in range(size)]


def draw_rows(
    draw: DrawFunction, name: str, seed: int, rows: int, workers: int, chunk_size: int = 25
) -> list[DrawnRow]:
    """Draw `rows` rows with different symbols, and return them in the order in which they were drawn.

    The result depends on `chunk_size`, but not on `workers`. `draw` must be a function at the top level of a module,
    so that it can be pickled. The function never returns if fewer than `rows` different rows exist.
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
    """Yield the rows of chunk 0, of chunk 1, and so on without end. Closing the generator ends the processes."""
    draw_numbered_chunk = partial(draw_chunk, draw, name, seed, chunk_size)
    if workers <= 1:
        yield from map(draw_numbered_chunk, count())
    context = multiprocessing.get_context("spawn")  # a fork may hang if a library has started threads
    pool = ProcessPoolExecutor(workers, context, initializer=prepare_worker)
    try:
        yield from map_in_order(pool, draw_numbered_chunk, count(), workers)
    finally:
        pool.shutdown(cancel_futures=True)
