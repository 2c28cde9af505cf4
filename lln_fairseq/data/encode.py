"""Encode lines of text into fairseq's ids, in order, with several processes.

Text is processed as a stream: memory does not grow with the size of the corpus. A small data set is encoded in the
calling process, without starting others.
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

BLOCK_CHARACTERS = 1 << 19
INLINE_BLOCKS = 8  # with fewer blocks, one process is faster than starting others

Item = TypeVar("Item")
Result = TypeVar("Result")


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use, or 1 if the number is unknown."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def encode_block(tokenizer: Tokenizer, table: np.ndarray, lines: Sequence[str]) -> Block:
    """Encode lines into fairseq's ids, one sample per line, each followed by </s>.

    Args:
        tokenizer: turns the lines into its own ids.
        table: fairseq's id for each of the tokenizer's ids, int32 (tokenizer ids,).
        lines: the lines; an empty one becomes </s>.

    Returns:
        The ids of all samples, int32 (tokens,), and the length of each sample, </s> included, int64 (lines,).
    """
    tokenizer_ids, lengths = flat_ids(tokenizer.encode_ids(lines))
    lengths += 1
    ids = np.full(int(lengths.sum()), EOS, dtype=np.int32)
    is_text = np.ones(len(ids), dtype=bool)
    is_text[np.cumsum(lengths) - 1] = False
    ids[is_text] = table[tokenizer_ids]
    return ids, lengths


def split_into_blocks(lines: Iterable[str]) -> Iterator[list[str]]:
    """Yield lists of consecutive lines; each list ends with the line that reaches BLOCK_CHARACTERS characters.

    Each line counts as its length + 1, for the newline. The last list may be shorter. Without lines nothing is yielded.
    """
    block: list[str] = []
    characters = 0
    for line in lines:
        block.append(line)
        characters += len(line) + 1
        if characters >= BLOCK_CHARACTERS:
            yield block
            block = []
            characters = 0
    if block:
        yield block


def prepare_worker() -> None:
    """Prepare a worker process: ignore Ctrl-C, and end this process as soon as its parent process ends.

    Ctrl-C in a terminal also reaches the parent, which shuts its workers down. A worker whose parent was killed would
    otherwise wait for work forever.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_exit_with_parent, args=(parent.sentinel,), daemon=True).start()


def _exit_with_parent(parent_sentinel: int) -> None:
    wait([parent_sentinel])
    os._exit(1)


def map_in_order(
    pool: ProcessPoolExecutor,
    function: Callable[[Item], Result],
    items: Iterable[Item],
    workers: int,
) -> Iterator[Result]:
    """Yield function(item) for every item, in order, computed by a pool of processes.

    `items` may be infinite: it is read at most 2 * workers + 1 items ahead of the results. The caller creates the pool
    with `workers` processes and shuts it down.

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
        raise DataError(
            "a worker process was killed, perhaps because memory ran out; if so, use fewer --workers"
        ) from error


_worker_tokenizer: Tokenizer
_worker_table: np.ndarray


def _start_worker(kind: str, files: dict[str, bytes], table: np.ndarray) -> None:
    global _worker_tokenizer, _worker_table
    prepare_worker()
    _worker_tokenizer = make_tokenizer(kind, files)
    _worker_table = table


def _encode_in_worker(lines: list[str]) -> Block:
    return encode_block(_worker_tokenizer, _worker_table, lines)


class ParallelEncoder:
    """Encodes lines with several processes. Use it as a context manager: leaving the `with` block ends the processes.

    The processes are started for the first large text and kept for later ones.

    Args:
        vocabulary: the tokenizer with its dictionary.
        workers: the number of processes. None uses all cores; 1 encodes in the calling process.
    """

    def __init__(self, vocabulary: Vocabulary, workers: int | None = None) -> None:
        self.vocabulary = vocabulary
        self.workers = usable_cores() if workers is None else workers
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "ParallelEncoder":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _start_pool(self) -> ProcessPoolExecutor:
        tokenizer = self.vocabulary.tokenizer
        return ProcessPoolExecutor(
            self.workers,
            # "fork" may hang here: the tokenizer libraries start threads, and a fork copies locks but no threads.
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start_worker,
            initargs=(tokenizer.kind, dict(tokenizer.files), self.vocabulary.table),
        )

    def blocks(self, lines: Iterable[str]) -> Iterator[Block]:
        """Yield the samples of `lines` in order, one sample per line, in blocks as `encode_block` returns them.

        Lines are read as needed. The calling process encodes them if there are fewer than INLINE_BLOCKS blocks and no
        worker process is running yet.

        Raises:
            DataError: if a process is killed.
        """
        line_blocks = split_into_blocks(lines)
        if self._pool is None:
            first_blocks = list(islice(line_blocks, INLINE_BLOCKS))
            line_blocks = chain(first_blocks, line_blocks)
            if self.workers <= 1 or len(first_blocks) < INLINE_BLOCKS:
                for block in line_blocks:
                    yield encode_block(self.vocabulary.tokenizer, self.vocabulary.table, block)
                return
            self._pool = self._start_pool()
        yield from map_in_order(self._pool, _encode_in_worker, line_blocks, self.workers)
