"""What a worker needs before and after fairseq's `main`: its rank, and the lock of the run's directory."""

import atexit
import queue
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from fairseq import checkpoint_utils
from fairseq.data.iterators import BackgroundConsumer
from fairseq.distributed import utils as distributed_utils

from lln_fairseq.checkpoints.saving import lock_directory
from lln_fairseq.errors import TrainingError, UserError, first_line

LONGEST_BATCH = 10  # seconds to wait for a batch; torch notices an interrupted loader process after five
NO_GPU = "cannot start a worker for each GPU: torch finds no GPU here. On CPUs, use torchrun with run=cpu_workers"


@contextmanager
def report_lost_workers() -> Iterator[None]:
    """Turn torch.distributed's errors about a worker that has ended or does not answer into a TrainingError."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        # The part of gloo's message between the line of its source code and its advice.
        gloo_reason = re.search(r"\.cc:\d+\] (.+?)(\. |$)", str(error))
        reason = gloo_reason[1] if gloo_reason else first_line(error)
        raise TrainingError(
            f"another worker of this training has ended or does not answer: see its own messages ({reason})"
        ) from error


def leave_process_group_at_exit() -> None:
    """Wait for all workers to get here, and let Python destroy their process group when this process ends.

    fairseq never destroys it, although torch asks for that, above all with NCCL. It is not destroyed at once, because
    fairseq uses it after its `main`. Without the wait, a worker that ends early would interrupt the collectives of the
    others. If a worker has failed, nothing is destroyed: NCCL could wait for it.
    """
    if dist.is_initialized():
        dist.barrier(distributed_utils.get_global_group())
        atexit.register(dist.destroy_process_group)


def end_prefetching() -> None:
    """End fairseq's threads that load batches ahead, and wait up to LONGEST_BATCH seconds for each thread.

    If such a thread were still running when Python ends, torch's C++ code would abort the process.
    """
    for thread in threading.enumerate():
        if isinstance(thread, BackgroundConsumer):
            thread._max_len = 0  # it ends after its next batch
            deadline = time.monotonic() + LONGEST_BATCH
            while thread.is_alive() and time.monotonic() < deadline:
                with suppress(queue.Empty):  # makes room, in case the thread waits because its queue is full
                    thread._queue.get(timeout=0.01)


def is_first_worker() -> bool:
    """Return True in the first of several workers, and in a process that is the only worker."""
    return not dist.is_initialized() or dist.get_rank() == 0


def find_workers(cfg: Any) -> None:
    """Set the rank of this process, the number of workers and the first one's address in `cfg`, from the environment.

    fairseq finds them in the variables of torchrun or Slurm, or counts the GPUs of this machine. UserError is raised if
    it does not find the workers that the configuration requests.
    """
    distributed = cfg.distributed_training
    workers = distributed.distributed_world_size
    try:
        distributed_utils.infer_init_method(distributed)
    except ZeroDivisionError:  # fairseq divides the ranks of torchrun's workers by the number of GPUs
        raise UserError(NO_GPU) from None
    except (AssertionError, TypeError) as error:
        reason = "SLURM_NTASKS is not set" if isinstance(error, TypeError) else error
        raise UserError(
            f"cannot start {workers} workers: {reason}. A Slurm job needs one task per node (--ntasks-per-node=1)"
        ) from error
    spawns = distributed.distributed_init_method is not None and not distributed.distributed_no_spawn
    if spawns and torch.cuda.device_count() == 0:  # fairseq would spawn no process, and end with exit code 0
        raise UserError(NO_GPU)
    if workers > 1 and distributed.distributed_init_method is None and not distributed.tpu:
        raise UserError(
            f"distributed_training.distributed_port is set, but nothing has started {workers} workers: use srun in a "
            "Slurm job, or torchrun (docs/training.md), or another run= for one machine"
        )


@contextmanager
def lock_save_dir(cfg: Any) -> Iterator[None]:
    """Lock the save_dir of a run during the `with` block: two runs would overwrite each other's checkpoints.

    The directory is created if it is missing. If there are several workers, the first one locks it for all of them.
    Nothing is created or locked with --no-save, or in a program that does not train.
    """
    is_training = cfg.model is not None
    if not is_training or cfg.checkpoint.no_save or cfg.distributed_training.distributed_rank != 0:
        yield
        return
    checkpoint_utils.verify_checkpoint_directory(cfg.checkpoint.save_dir)
    with lock_directory(cfg.checkpoint.save_dir):
        yield
