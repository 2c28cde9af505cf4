"""Lines of text to blocks of fairseq ids, in order, over several processes and without holding the corpus.

Memory is a few blocks per process, whatever the size of the corpus. Processes start with the first text that is
worth it, so small data sets are encoded where they are.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from multiprocessing.connection import wait
from types import TracebackType
from typing import TypeVar

import numpy as np

from lln_fairseq.data.binary_format import Block
from lln_fairseq.data.reporting import DataError
from lln_fairseq.data.special_symbols import EOS
from lln_fairseq.data.tokenizers import Tokenizer, flat_ids, make_tokenizer
from lln_fairseq.data.vocabulary import Vocabulary

BLOCK = 1 << 19  # characters
INLINE_BLOCKS = 8  # up to here one process is faster than starting others

Item = TypeVar("Item")
Result = TypeVar("Result")


def usable_cores() -> int:
    """The number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def encode_block(tokenizer: Tokenizer, table: np.ndarray, lines: Sequence[str]) -> Block:
    """The samples of these lines: table[the tokenizer's ids] and </s>."""
    own, lengths = flat_ids(tokenizer.encode_ids(lines))
    lengths += 1
    ids = np.full(int(lengths.sum()), EOS, dtype=np.int32)
    is_text = np.ones(len(ids), dtype=bool)
    is_text[np.cumsum(lengths) - 1] = False
    ids[is_text] = table[own]
    return ids, lengths


def cut(lines: Iterable[str]) -> Iterator[list[str]]:
    """The lines in lists of about BLOCK characters."""
    block: list[str] = []
    size = 0
    for line in lines:
        block.append(line)
        size += len(line) + 1
        if size >= BLOCK:
            yield block
            block, size = [], 0
    if block:
        yield block


_worker: tuple[Tokenizer, np.ndarray]


def _end_with(parent: int) -> None:
    """If the first process is killed nobody else tells this one, and it would wait for work for ever."""
    wait([parent])
    os._exit(1)


def ignore_interrupts() -> None:
    """For a process that works for another: Ctrl-C reaches both, and the first one deals with it; it ends with that."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def map_in_order(
    pool: ProcessPoolExecutor,
    function: Callable[[Item], Result],
    items: Iterable[Item],
    workers: int,
) -> Iterator[Result]:
    """Yield function(item) of every item in order, computed by a pool; takes few more items than have come out.

    Raises:
        DataError: if a process of the pool is killed.
    """
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise DataError("a worker process was killed (out of memory?); fewer --workers need less") from error


def _start_worker(kind: str, files: dict[str, bytes], table: np.ndarray) -> None:
    global _worker
    ignore_interrupts()
    _worker = make_tokenizer(kind, files), table


def _work(lines: list[str]) -> Block:
    return encode_block(*_worker, lines)


class Encoder:
    """Encodes with `workers` processes; a context manager, so that they end with it."""

    def __init__(self, vocabulary: Vocabulary, workers: int | None = None) -> None:
        self.vocabulary = vocabulary
        self.workers = usable_cores() if workers is None else workers
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Encoder":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _processes(self) -> ProcessPoolExecutor:
        if self._pool is None:
            tokenizer = self.vocabulary.tokenizer
            self._pool = ProcessPoolExecutor(
                self.workers,
                # not "fork": the libraries here have threads, and a fork of a process with threads may hang
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_start_worker,
                initargs=(tokenizer.kind, dict(tokenizer.files), self.vocabulary.table),
            )
        return self._pool

    def blocks(self, lines: Iterable[str]) -> Iterator[Block]:
        """The samples of `lines` in order. Raises DataError when a process is killed."""
        pieces = cut(lines)
        if self._pool is None:
            first = list(islice(pieces, INLINE_BLOCKS))
            pieces = chain(first, pieces)
            if self.workers <= 1 or len(first) < INLINE_BLOCKS:
                for piece in pieces:
                    yield encode_block(self.vocabulary.tokenizer, self.vocabulary.table, piece)
                return
        yield from map_in_order(self._processes(), _work, pieces, self.workers)
