"""Run fairseq's `main` in each worker of a training."""

import multiprocessing
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist
from fairseq import checkpoint_utils
from fairseq.data.iterators import BackgroundConsumer
from fairseq.distributed import utils as distributed_utils

from lln_fairseq import command
from lln_fairseq.checkpoints.saving import lock_directory
from lln_fairseq.errors import InputError, report_lost_workers
from lln_fairseq.training import resume
from lln_fairseq.training.malloc import disable_malloc_trim
from lln_fairseq.training.wandb import own_run

LONGEST_BATCH = 10  # seconds; a loader process that was interrupted is missed after five


def run_worker(main: Callable, cfg: Any, **kwargs: Any) -> Any:
    """Run main(cfg, ...). A spawned process ends with its parent, and with one line if a user's input is wrong."""
    parent: Any = multiprocessing.parent_process()
    if parent:
        command.exit_with_parent(parent.pid)
    disable_malloc_trim()
    resume.forget_previous_run(main)
    try:
        with own_run(), report_lost_workers():
            return main(cfg, **kwargs)
    except InputError as error:
        if not parent:
            raise
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        _end_prefetching()


def _end_prefetching() -> None:
    """End the threads that make batches: at Python's own end torch's C++ code would abort the process."""
    for thread in threading.enumerate():
        if isinstance(thread, BackgroundConsumer):
            thread._max_len = 0  # its next batch is the last
            deadline = time.monotonic() + LONGEST_BATCH
            while thread.is_alive() and time.monotonic() < deadline:
                with suppress(queue.Empty):  # it may wait for room in its queue
                    thread._queue.get(timeout=0.01)


def is_first_worker() -> bool:
    """Return True in the first worker of a training, and in a training without workers."""
    return not dist.is_initialized() or dist.get_rank() == 0


@contextmanager
def lock_save_dir(cfg: Any) -> Iterator[None]:
    """Lock the save_dir of a fairseq configuration: two trainings would overwrite each other's checkpoints.

    The first of several workers locks it for all of them.
    Raises: InputError if another training has the directory.
    """
    distributed_utils.infer_init_method(cfg.distributed_training)  # the rank; call_main does it next
    is_training = cfg.model is not None  # fairseq-validate and others only read
    if not is_training or cfg.checkpoint.no_save or cfg.distributed_training.distributed_rank != 0:
        yield
        return
    checkpoint_utils.verify_checkpoint_directory(cfg.checkpoint.save_dir)
    with lock_directory(cfg.checkpoint.save_dir):
        yield
