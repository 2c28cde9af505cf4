"""What runs in each worker of a training in place of fairseq's `main`.

A process that fairseq spawns imports this file, and with it all that registers, in order to call it; fairseq's own
import of the user directory finds the package imported and does no more.
"""

import multiprocessing
import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fairseq.data.iterators import BackgroundConsumer

from lln_fairseq import command
from lln_fairseq.errors import InputError, lost_workers
from lln_fairseq.training import run_state
from lln_fairseq.training.malloc import keep_freed_memory
from lln_fairseq.training.wandb import own_run

LONGEST_BATCH = 10  # seconds; a loader process that was interrupted is missed after five


def run(main: Callable, cfg: Any, **kwargs: Any) -> Any:
    """main(cfg, ...). A process of its own ends with its parent, and with one line where a user's input is wrong."""
    parent = multiprocessing.parent_process()
    if parent:
        command.end_with(parent.pid)
    keep_freed_memory()
    run_state.begin(main)
    try:
        with own_run(), lost_workers():
            return main(cfg, **kwargs)
    except InputError as error:
        if not parent:
            raise
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        _end_prefetching()


def _end_prefetching() -> None:
    """Python ends a thread that makes batches while it itself ends; torch's C++ code aborts the process on that."""
    for thread in threading.enumerate():
        if isinstance(thread, BackgroundConsumer):
            thread._max_len = 0  # its next batch is the last
            deadline = time.monotonic() + LONGEST_BATCH
            while thread.is_alive() and time.monotonic() < deadline:
                with suppress(queue.Empty):  # it may wait for room in its queue
                    thread._queue.get(timeout=0.01)
