"""Encode lines of text into fairseq's ids, in order, with several processes.

Text is processed as a stream, so the memory in use does not grow with the size of the corpus. A small data set is
encoded in the calling process, and no other processes are started for it.
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

from lln_fairseq.errors import UserError
from lln_fairseq.text.binary_format import Block
from lln_fairseq.text.special_symbols import EOS
from lln_fairseq.text.tokenizers import make_tokenizer
from lln_fairseq.text.vocabulary import Vocabulary

BLOCK_CHARACTERS = 1 << 19
INLINE_BLOCKS = 8  # with fewer blocks, one process is faster than starting others

Item = TypeVar("Item")
Result = TypeVar("Result")


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use. If the number is unknown, return 1."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def encode_block(vocabulary: Vocabulary, lines: Sequence[str]) -> Block:
    """Encode lines into fairseq's ids. Each line becomes one sample, which ends with </s>; an empty line has only </s>.

    The result is the ids of all samples, int32 (tokens,), and the length of each, </s> included, int64 (lines,).
    """
    end = np.array([EOS], dtype=np.int32)
    samples = []
    for ids in vocabulary.encode(lines):
        samples += [ids, end]
    lengths = np.array([len(ids) + 1 for ids in samples[::2]], dtype=np.int64)
    return np.concatenate([end[:0], *samples]), lengths


def split_into_blocks(lines: Iterable[str]) -> Iterator[list[str]]:
    """Yield lists of consecutive lines, each ending with the line that completes BLOCK_CHARACTERS characters.

    The last list may be shorter. The newline of each line counts as a character.
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
    """Prepare this worker process: ignore Ctrl-C, and end the process as soon as its parent process ends.

    Ctrl-C in a terminal also reaches the parent, which shuts its workers down. If the parent is killed, a worker would
    otherwise wait for work forever.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_exit_with_parent, args=(parent.sentinel,), daemon=True).start()


def _exit_with_parent(parent_sentinel: int) -> None:
    """Wait until the parent process ends, and then end this process at once with exit code 1."""
    wait([parent_sentinel])
    os._exit(1)


def map_in_order(
    pool: ProcessPoolExecutor,
    function: Callable[[Item], Result],
    items: Iterable[Item],
    workers: int,
) -> Iterator[Result]:
    """Call a function for every item in a pool of processes, and yield the results in the order of the items.

    At most 2 * workers + 1 items are read ahead of the results, so there may be infinitely many. The function's
    exceptions are raised by the iterator, and UserError if a process is killed. The caller shuts the pool down.
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
        raise UserError(
            "a worker process was killed, perhaps because memory ran out; if so, use fewer --workers"
        ) from error


_worker_vocabulary: Vocabulary


def _start_worker(kind: str, files: dict[str, bytes], dictionary: str) -> None:
    """Initialize a process of the pool: create the vocabulary that `_encode_in_worker` uses."""
    global _worker_vocabulary
    prepare_worker()
    _worker_vocabulary = Vocabulary(make_tokenizer(kind, files), dictionary)


def _encode_in_worker(lines: list[str]) -> Block:
    return encode_block(_worker_vocabulary, lines)


class ParallelEncoder:
    """Encodes lines with several processes.

    The processes are started for the first large text, and kept for later texts. Use the encoder as a context manager:
    the processes end with the `with` block.

    Args:
        vocabulary: the tokenizer with its dictionary.
        workers: the number of processes. None uses all cores; with 1, the calling process encodes everything.
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
            initargs=(tokenizer.kind, dict(tokenizer.files), self.vocabulary.dictionary),
        )

    def blocks(self, lines: Iterable[str]) -> Iterator[Block]:
        """Encode the lines, one sample per line, and yield them in order as blocks of `encode_block`.

        The lines are read while the blocks are consumed. If the text makes fewer than INLINE_BLOCKS blocks and the
        processes have not been started yet, the calling process encodes it. UserError is raised if a process is killed.
        """
        line_blocks = split_into_blocks(lines)
        if self._pool is None:
            first_blocks = list(islice(line_blocks, INLINE_BLOCKS))
            line_blocks = chain(first_blocks, line_blocks)
            if self.workers <= 1 or len(first_blocks) < INLINE_BLOCKS:
                for block in line_blocks:
                    yield encode_block(self.vocabulary, block)
                return
            self._pool = self._start_pool()
        yield from map_in_order(self._pool, _encode_in_worker, line_blocks, self.workers)
